"""Values from a peer as text for error messages: short and on one line.

A peer chooses its keys and names. They must not fill a log, forge a line in it, or take long to format.
"""

from itertools import islice

from torchferry.errors import what_of

MAX_CHARACTERS = 200
_MAX_ITEMS = 6
_MAX_DEPTH = 3
_EQUAL_CHARACTERS_SHOWN = 14


def show(value: object, depth: int = 0) -> str:
    """Return text like the repr of a value, with a limit on strings, items and levels.

    >>> show({"shape": list(range(1000)), "name": "w"})
    "{'shape': [0, 1, 2, 3, 4, 5, …], 'name': 'w'}"
    """
    if isinstance(value, (str, bytes, bytearray, memoryview)):
        start = value[:MAX_CHARACTERS]
        text = repr(start if isinstance(start, str) else bytes(start))
        return f"{text}…" if len(value) > MAX_CHARACTERS else text
    if isinstance(value, int) and value.bit_length() > 512:
        return f"an int of {value.bit_length()} bits"
    if not isinstance(value, (list, tuple, dict)):
        return repr(value)
    if depth >= _MAX_DEPTH:
        return "…"
    shown = [show(item, depth + 1) for item in islice(value, _MAX_ITEMS)]
    if isinstance(value, dict):
        shown = [f"{key}: {show(item, depth + 1)}" for key, item in zip(shown, value.values(), strict=False)]
    opening, closing = "{}" if isinstance(value, dict) else "[]" if isinstance(value, list) else "()"
    return opening + ", ".join([*shown, "…"] if len(value) > _MAX_ITEMS else shown) + closing


def show_name(name: str) -> str:
    """Return a key or name as it is if it is short and printable, and quoted otherwise.

    >>> show_name("weight"), show_name("line\\nbreak")
    ('weight', "'line\\\\nbreak'")
    """
    return name if len(name) <= MAX_CHARACTERS and name.isprintable() else show(name)


def show_text(text: str, max_characters: int = 1000) -> str:
    """Return a text on one line, without what is not printable.

    >>> show_text("two\\n  lines\\x07")
    'two lines'
    """
    printable = "".join(c if c.isprintable() else " " for c in text[: 2 * max_characters])
    line = " ".join(printable.split())
    return line if len(line) <= max_characters else f"{line[:max_characters]}…"


def show_error(error: BaseException) -> str:
    """Return what happened, on one line, to tell a peer."""
    return show_text(what_of(error))


def show_difference(one: str, two: str) -> tuple[str, str]:
    """Shorten two texts to the part in which they differ.

    >>> show_difference("[4, 3]", "[4, 4]")
    ('[4, 3]', '[4, 4]')
    >>> long = ", ".join(map(str, range(100)))
    >>> show_difference(long + ", 7", long + ", 8")
    ('…, 97, 98, 99, 7', '…, 97, 98, 99, 8')
    """
    if max(len(one), len(two)) <= MAX_CHARACTERS:
        return show_name(one), show_name(two)
    differing = (place for place, (a, b) in enumerate(zip(one, two, strict=False)) if a != b)
    start = max(next(differing, min(len(one), len(two))) - _EQUAL_CHARACTERS_SHOWN, 0)
    end = start + MAX_CHARACTERS - 2
    before = "…" if start else ""
    shown = [before + show_name(text[start:end]) + ("…" if end < len(text) else "") for text in (one, two)]
    return shown[0], shown[1]
