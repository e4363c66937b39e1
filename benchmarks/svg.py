"""SVG by hand: a few shapes, escaped, with numbers rounded. No library, no script, no font to load."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from math import ceil, floor, log10

# Up to here, an axis has room for 1, 2 and 5 in each of its powers of ten.
_FEW_DECADES = 300.0


@dataclass(frozen=True)
class Drawing:
    """An SVG, in its own coordinates; it scales to the width that it is given."""

    width: float
    height: float
    shapes: tuple[str, ...]
    # Read out where the picture can't be seen.
    title: str

    def inline(self) -> str:
        """The drawing as an element of a page, whose style sheet it uses."""
        return self._element("")

    def standalone(self, style: str) -> str:
        """The drawing as a file of its own, which brings its style along."""
        return self._element(f"<style>{style}</style>", ' xmlns="http://www.w3.org/2000/svg"')

    def _element(self, before: str, namespace: str = "") -> str:
        body = "\n".join(self.shapes)
        return (
            f'<svg{namespace} viewBox="0 0 {_n(self.width)} {_n(self.height)}" role="img" class="plot">'
            f"<title>{escape(self.title)}</title>{before}\n{body}\n</svg>"
        )


def rect(x: float, y: float, width: float, height: float, classes: str, tip: str = "") -> str:
    """A box; `tip` is shown when one points at it."""
    place = f'x="{_n(x)}" y="{_n(y)}" width="{_n(max(width, 0))}" height="{_n(height)}"'
    shape = f'<rect {place} class="{classes}" rx="2"'
    return f"{shape}><title>{escape(tip)}</title></rect>" if tip else f"{shape}/>"


def line(x1: float, y1: float, x2: float, y2: float, classes: str) -> str:
    """A straight line."""
    return f'<line x1="{_n(x1)}" y1="{_n(y1)}" x2="{_n(x2)}" y2="{_n(y2)}" class="{classes}"/>'


def path(points: Sequence[tuple[float, float]], classes: str) -> str:
    """A line through points."""
    return f'<polyline points="{" ".join(f"{_n(x)},{_n(y)}" for x, y in points)}" class="{classes}"/>'


def dot(x: float, y: float, classes: str, tip: str) -> str:
    """A point of a curve; `tip` is shown when one points at it."""
    return f'<circle cx="{_n(x)}" cy="{_n(y)}" r="4" class="{classes}"><title>{escape(tip)}</title></circle>'


def text(x: float, y: float, what: str, classes: str = "", anchor: str = "start") -> str:
    """Some words."""
    return f'<text x="{_n(x)}" y="{_n(y)}" class="{classes}" text-anchor="{anchor}">{escape(what)}</text>'


@dataclass(frozen=True)
class Scale:
    """From values to places: linear, or by powers of ten."""

    low: float
    high: float
    start: float
    end: float
    logarithmic: bool = False

    def __call__(self, value: float) -> float:
        """Where a value lies.

        >>> Scale(0, 10, 100, 200)(5), Scale(1, 100, 0, 50, logarithmic=True)(10)
        (150.0, 25.0)
        """
        low, high = self._flat(self.low), self._flat(self.high)
        part = (self._flat(value) - low) / (high - low) if high > low else 0.5
        return self.start + part * (self.end - self.start)

    def _flat(self, value: float) -> float:
        return log10(value) if self.logarithmic else value


def round_up(value: float) -> float:
    """The next number that is 1, 2, 2.5 or 5 times a power of ten.

    >>> round_up(3.1), round_up(0.18), round_up(7)
    (5.0, 0.2, 10.0)
    """
    if value <= 0:
        return 1.0
    unit = 10.0 ** floor(log10(value))
    return next(round(unit * step, 12) for step in (1, 2, 2.5, 5, 10) if value <= unit * step * 1.0000001)


def ticks(low: float, high: float) -> list[float]:
    """What to write on an axis by powers of ten: those, and if there are few, what lies between them.

    >>> ticks(0.02, 300), ticks(3, 40)
    ([0.1, 1.0, 10.0, 100.0], [5.0, 10.0, 20.0])
    """
    powers = range(floor(log10(low)), ceil(log10(high)) + 1)
    steps = (1, 2, 5) if high / low < _FEW_DECADES else (1,)
    marks = [round(10.0**power * step, 12) for power in powers for step in steps]
    return [mark for mark in marks if low <= mark <= high]


def _n(number: float) -> str:
    return f"{number:.1f}".removesuffix(".0")
