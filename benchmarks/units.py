"""Numbers with units, for tables and plots."""

from __future__ import annotations


def format_seconds(seconds: float) -> str:
    """Format a time.

    >>> format_seconds(0.00123), format_seconds(0.45), format_seconds(12.345)
    ('1.23 ms', '450 ms', '12.3 s')
    """
    for unit, scale in (("µs", 1e6), ("ms", 1e3)):
        if seconds * scale < 1000:
            return f"{_digits(seconds * scale)} {unit}"
    return f"{_digits(seconds)} s"


def format_bytes(size: float) -> str:
    """Format a number of bytes in decimal units.

    >>> format_bytes(40_000_000), format_bytes(512)
    ('40 MB', '512 B')
    """
    return _scaled(size, 1000, ("B", "kB", "MB", "GB", "TB"))


def format_binary(size: float) -> str:
    """Format a power of two of bytes.

    >>> format_binary(65536)
    '64 KiB'
    """
    return _scaled(size, 1024, ("B", "KiB", "MiB", "GiB"))


def format_rate(bytes_per_s: float) -> str:
    """Format a rate.

    >>> format_rate(1_234_000_000)
    '1.23 GB/s'
    """
    return f"{format_bytes(bytes_per_s)}/s"


def format_ratio(ratio: float) -> str:
    """Format a ratio.

    >>> format_ratio(1.5), format_ratio(1234.5)
    ('1.50', '1,234')
    """
    return f"{ratio:.2f}" if ratio < 100 else f"{ratio:,.0f}"


def _digits(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def _scaled(size: float, step: int, units: tuple[str, ...]) -> str:
    for unit in units[:-1]:
        # 999.6 kB would round to "1000 kB".
        if size < step * 0.9995:
            return f"{_digits(size)} {unit}"
        size /= step
    return f"{_digits(size)} {units[-1]}"
