"""A drawing of lines, boxes and words, written as SVG text; the same input makes the same bytes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from xml.sax.saxutils import escape

__all__ = ["ANSWER", "COLOURS", "EDGE", "GREY", "GRID", "INK", "QUESTION", "Drawing", "percent", "signed"]

COLOURS = ("#0b5fa5", "#c9470b", "#2a7d2e", "#8e2aa0", "#8a6d00", "#b0125b", "#00727a", "#5b4636")
GREY, GRID, EDGE = "#666666", "#e4e4e4", "#999999"
QUESTION, ANSWER = "#fff4d6", "#e3f0fa"  # what boxes are filled with
INK, _PAPER = "#222222", "#ffffff"
# What each colour becomes on a dark page. A colour that is not here is refused.
_DARK = {
    **dict(zip(COLOURS, ("#6cb4f0", "#ff9a66", "#7fd08a", "#d39be6", "#e0c040", "#f58ab8", "#5fd0d6", "#c9b09c"),
               strict=True)),
    GREY: "#a9afba", GRID: "#3a404c", EDGE: "#7d8594", QUESTION: "#463c1b", ANSWER: "#1d3850", INK: "#e8eaee",
    _PAPER: "#1b1f27",
}  # fmt: skip


class Drawing:
    """Elements in the order in which they are drawn; lengths in pixels, y grows downwards."""

    def __init__(self, width: float, height: float, title: str) -> None:
        self.width, self.height = width, height
        box = f'viewBox="0 0 {_n(width)} {_n(height)}" width="{_n(width)}" height="{_n(height)}"'
        font = 'font-family="Helvetica, Arial, sans-serif" font-size="12"'
        self._parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" {box} {font} role="img">',
            f"<title>{escape(title)}</title>",
            f'<rect width="100%" height="100%" rx="6" fill="{_PAPER}"/>',
        ]

    def text(
        self, x: float, y: float, words: str, anchor: str = "start", size: float = 12, colour: str = INK,
        bold: bool = False, turned: bool = False,
    ) -> None:  # fmt: skip
        """Write `words` with their baseline at y."""
        more = ' font-weight="bold"' if bold else ""
        more += f' transform="rotate(-90 {_n(x)} {_n(y)})"' if turned else ""
        self._parts.append(
            f'<text x="{_n(x)}" y="{_n(y)}" text-anchor="{anchor}" font-size="{_n(size)}" fill="{colour}"{more}>'
            f"{escape(words)}</text>"
        )

    def line(self, points: Sequence[tuple[float, float]], colour: str = INK, width: float = 1, dash: str = "") -> None:
        """Join the points."""
        dashes = f' stroke-dasharray="{dash}"' if dash else ""
        self._parts.append(
            f'<polyline points="{_points(points)}" fill="none" stroke="{colour}" stroke-width="{_n(width)}" '
            f'stroke-linejoin="round"{dashes}/>'
        )

    def area(self, points: Sequence[tuple[float, float]], colour: str, opacity: float = 0.15) -> None:
        """Fill the polygon."""
        self._parts.append(f'<polygon points="{_points(points)}" fill="{colour}" fill-opacity="{_n(opacity)}"/>')

    def box(
        self, x: float, y: float, width: float, height: float, fill: str, edge: str = "none", round_: float = 0
    ) -> None:
        """Draw a rectangle with its upper left corner at (x, y)."""
        self._parts.append(
            f'<rect x="{_n(x)}" y="{_n(y)}" width="{_n(width)}" height="{_n(height)}" rx="{_n(round_)}" fill="{fill}" '
            f'stroke="{edge}"/>'
        )

    def dot(self, x: float, y: float, colour: str, radius: float = 4, hollow: bool = False) -> None:
        """Draw a circle."""
        fill = _PAPER if hollow else colour
        self._parts.append(
            f'<circle cx="{_n(x)}" cy="{_n(y)}" r="{_n(radius)}" fill="{fill}" stroke="{colour}" stroke-width="1.5"/>'
        )

    def arrow(self, points: Sequence[tuple[float, float]], colour: str = INK) -> None:
        """Join the points; a head at the last one. The last piece goes along an axis."""
        self.line(points, colour, 1.2)
        (x0, y0), (x, y) = points[-2], points[-1]
        dx, dy = (x > x0) - (x < x0), (y > y0) - (y < y0)
        left, right = (x - 7 * dx - 4 * dy, y - 7 * dy - 4 * dx), (x - 7 * dx + 4 * dy, y - 7 * dy + 4 * dx)
        self._parts.append(f'<polygon points="{_points([(x, y), left, right])}" fill="{colour}"/>')

    def lines_of_text(self, x: float, y: float, lines: Sequence[str], anchor: str = "middle", size: float = 12) -> None:
        """Write lines around the height y; those that begin with "*" in bold."""
        top = y - (len(lines) - 1) * (size + 3) / 2 + size / 3
        for number, words in enumerate(lines):
            bold = words.startswith("*")
            self.text(x, top + number * (size + 3), words.lstrip("*"), anchor, size, bold=bold)

    def render(self, dark: bool = False) -> str:
        """Return the file's text.

        Args:
            dark: for a dark page.

        Raises:
            KeyError: a colour has no dark form.
        """
        text = "\n".join([*self._parts, "</svg>"]) + "\n"
        return re.sub(r'"(#[0-9a-f]{6})"', lambda match: f'"{_DARK[match[1]]}"', text) if dark else text


def signed(value: float) -> str:
    """Return the number with its sign and one digit behind the point; zero has none."""
    return f"{value:+.1f}" if abs(value) >= 0.05 else "0.0"


def percent(value: float) -> str:
    """Return "+1.2 %", say."""
    return f"{signed(value)} %"


def _n(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def _points(points: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{_n(x)},{_n(y)}" for x, y in points)
