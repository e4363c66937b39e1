"""Values from a peer as text for an error: short, on one line, whatever they are.

A peer chooses its keys, names and forms. None of them may fill a log, forge a line in it, or take longer to
show than to send.
"""

from __future__ import annotations

MOST_CHARACTERS = 200
_MOST_ITEMS = 6
_MOST_DEPTH = 3
_ALIKE_SHOWN = 14


def show(value: object, depth: int = 0) -> str:
    """Show a value, and of a large one only the beginning.

    >>> show({"shape": list(range(1000)), "name": "w"})
    "{'shape': [0, 1, 2, 3, 4, 5, …], 'name': 'w'}"
    """
    if isinstance(value, (str, bytes, bytearray, memoryview)):
        cut = len(value) > MOST_CHARACTERS
        text = repr(value[:MOST_CHARACTERS] if isinstance(value, str) else bytes(value[:MOST_CHARACTERS]))
        return f"{text}…" if cut else text
    if isinstance(value, (list, tuple, dict)):
        return _show_items(value, depth)
    if isinstance(value, int) and value.bit_length() > 512:
        return f"an int of {value.bit_length()} bits"
    return repr(value)


def show_name(name: str) -> str:
    """Show a key or name as it is if it is short and printable, and quoted if not.

    >>> show_name("weight"), show_name("line\\nbreak")
    ('weight', "'line\\\\nbreak'")
    """
    return name if len(name) <= MOST_CHARACTERS and name.isprintable() else show(name)


def show_difference(one: str, two: str) -> tuple[str, str]:
    """Shorten two texts to the part in which they differ.

    >>> show_difference("[4, 3]", "[4, 4]")
    ('[4, 3]', '[4, 4]')
    >>> long = ", ".join(map(str, range(100)))
    >>> show_difference(long + ", 7", long + ", 8")
    ('…, 97, 98, 99, 7', '…, 97, 98, 99, 8')
    """
    if max(len(one), len(two)) <= MOST_CHARACTERS:
        return show_name(one), show_name(two)
    alike = 0
    for mine, theirs in zip(one, two, strict=False):
        if mine != theirs:
            break
        alike += 1
    start = max(alike - _ALIKE_SHOWN, 0)
    return _excerpt(one, start), _excerpt(two, start)


def _excerpt(text: str, start: int) -> str:
    cut = text[start : start + MOST_CHARACTERS - 2]
    before, after = "…" if start else "", "…" if start + len(cut) < len(text) else ""
    return before + show_name(cut) + after


def _show_items(value: list[object] | tuple[object, ...] | dict[object, object], depth: int) -> str:
    if depth >= _MOST_DEPTH:
        return "…"
    more = ["…"] if len(value) > _MOST_ITEMS else []
    if isinstance(value, dict):
        first = [(key, value[key]) for key, _ in zip(value, range(_MOST_ITEMS), strict=False)]
        shown = [f"{show(key, depth + 1)}: {show(item, depth + 1)}" for key, item in first]
        return "{" + ", ".join(shown + more) + "}"
    inside = ", ".join([show(item, depth + 1) for item in value[:_MOST_ITEMS]] + more)
    return f"[{inside}]" if isinstance(value, list) else f"({inside})"
