"""How numbers are said, in the terminal, on the page and in the document alike."""

from __future__ import annotations

from benchmarks.results import Judgement, Series

# What the figures mean, for those who read them.
_METHOD = """
Rank 0 sends, the others receive, each a process of its own. All start together after a barrier; a take
lasts until the last side is done. Systems take turns, in every round in another order, so that what else the
machine does happens to all of them alike, and nobody is always the one who comes after the same other. The
first round warms up and is not counted; what takes longer than eight seconds in it is not repeated.

After each take, outside the time, every tensor that arrived is compared with the one that was sent, bit
for bit, by digests of 128 bits. Memory that is received into is overwritten with a pattern before each
take.

Times are medians. The spread is the distance between the quartiles, as a part of the median. Two systems
are within noise of each other if their quartiles overlap; a mark is, if it lies between the ratios at the
quartiles. The rate is the state's bytes, to all receivers together, over the median.

Bytes on the wire are what the kernel counts on the TCP sockets of the busiest receiver. Memory is by how
much the process that grew most grew at its peak, as the kernel counts it, in the warm-up or the take
itself; what is received fresh is part of it.
"""
METHOD = tuple(" ".join(paragraph.split()) for paragraph in _METHOD.split("\n\n"))

COLUMNS = ("median", "spread", "rate", "on the wire", "memory")

_BYTE_UNITS = ("B", "kB", "MB", "GB", "TB")
_BINARY_UNITS = ("B", "KiB", "MiB", "GiB")


def say_seconds(seconds: float) -> str:
    """A time, in the unit that suits it.

    >>> say_seconds(0.00123), say_seconds(0.45), say_seconds(12.345)
    ('1.23 ms', '450 ms', '12.3 s')
    """
    if seconds < 0.001:
        return f"{_three(seconds * 1e6)} µs"
    return f"{_three(seconds * 1e3)} ms" if seconds < 1 else f"{_three(seconds)} s"


def say_bytes(size: float) -> str:
    """A number of bytes, decimal.

    >>> say_bytes(40_000_000), say_bytes(512)
    ('40 MB', '512 B')
    """
    return _scaled(size, 1000, _BYTE_UNITS)


def say_binary(size: float) -> str:
    """A number of bytes that somebody chose as a power of two.

    >>> say_binary(65536)
    '64 KiB'
    """
    return _scaled(size, 1024, _BINARY_UNITS)


def say_rate(bytes_per_second: float) -> str:
    """A rate.

    >>> say_rate(1_234_000_000)
    '1.23 GB/s'
    """
    return f"{say_bytes(bytes_per_second)}/s"


def say_wanted(judgement: Judgement) -> str:
    """What must be reached.

    >>> say_wanted(Judgement("w", "t", 15.0, True)), say_wanted(Judgement("w", "t", 64.0, False, " MiB"))
    ('≥ 15×', '≤ 64 MiB')
    """
    return f"{'≥' if judgement.at_least else '≤'} {judgement.wanted:g}{judgement.unit}"


def say_ratio(judgement: Judgement) -> str:
    """What was measured, and between what; a dash if nothing was.

    >>> say_ratio(Judgement("w", "t", 1.0, True, ratio=1.5, low=1.25, high=2.0))
    '1.50× (1.25 to 2.00)'
    """
    if judgement.ratio is None or judgement.low is None or judgement.high is None:
        return "–"
    ratio, low, high = (_two(one) for one in (judgement.ratio, judgement.low, judgement.high))
    return f"{ratio}{judgement.unit} ({low} to {high})" if low != high else f"{ratio}{judgement.unit}"


def say_series(series: Series, baseline: Series | None) -> list[str] | None:
    """What was measured, under `COLUMNS`, and how it compares; None if nothing was."""
    spread = series.spread()
    if spread is None:
        return None
    wires = [take.wire_bytes for take in series.takes if take.wire_bytes is not None]
    peaks = [take.peak_bytes for take in series.takes if take.peak_bytes is not None]
    return [
        say_seconds(spread.median),
        f"{spread.noise:.0%}" if len(series.takes) > 1 else "one take",
        say_rate(series.bytes_per_second) if series.bytes_per_second else "",
        say_bytes(max(wires)) if wires else "",
        say_bytes(max(peaks)) if peaks else "",
        say_comparison(series, baseline),
    ]


def say_comparison(series: Series, baseline: Series | None) -> str:
    """How many times as fast as the baseline it is, and whether that is more than noise."""
    spread = series.spread()
    base = baseline.spread() if baseline is not None else None
    if spread is None or base is None or series is baseline:
        return ""
    ratio = f"{_two(base.median / spread.median)}×"
    return f"{ratio} (within noise)" if spread.overlaps(base) else ratio


def _two(number: float) -> str:
    return f"{number:.2f}" if number < 100 else f"{number:,.0f}"


def _three(number: float) -> str:
    """Three digits that count, without an exponent.

    >>> _three(1.2345), _three(12.3456), _three(1234.5), _three(400.0)
    ('1.23', '12.3', '1,234', '400')
    """
    if number >= 100:
        return f"{number:,.0f}"
    return f"{number:.3g}"


def _scaled(size: float, step: int, units: tuple[str, ...]) -> str:
    for unit in units[:-1]:
        # So that what rounds up to the next unit is said in it.
        if size < step * 0.9995:
            return f"{_three(size)} {unit}"
        size /= step
    return f"{_three(size)} {units[-1]}"
