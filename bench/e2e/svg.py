"""Grouped bars with intervals, and lines, as SVG files: nothing to install, text to compare."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

PANEL_WIDTH, PANEL_HEIGHT = 90.0, 180.0  # pixels: of one group, of all bars
MARGIN = 48.0
LABEL_HEIGHT = 110.0
COLOURS = ("#8fa3bf", "#2f5d8a", "#c98b3b", "#6b8f5e")
NUM_TICKS = 5
LINES_WIDTH = 560.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """A share and its interval, all in [0, 1]."""

    value: float
    low: float
    high: float


Panel = Mapping[str, Sequence[Bar]]  # group name -> one bar per series


def bar_chart(panels: Mapping[str, Panel], *, series: Sequence[str], y_label: str) -> str:
    """Return an SVG document: one panel per title, one group of bars per name.

    Every group has one bar per series, in their order.
    """
    parts, left = [], MARGIN
    for title, panel in panels.items():
        width = max(1, len(panel)) * PANEL_WIDTH
        parts.append(_panel(panel, title=title, left=left, width=width))
        left += width + MARGIN
    height = MARGIN + PANEL_HEIGHT + LABEL_HEIGHT
    parts.append(_text(14, MARGIN + PANEL_HEIGHT / 2, y_label, turn=-90))
    parts.append(_legend(series, height - 16))
    return _document(parts, width=left, height=height)


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A curve from its first point to its last one."""

    name: str
    points: Sequence[tuple[float, float]]


def line_chart(lines: Sequence[Line], *, x_label: str, y_label: str) -> str:
    """Return an SVG document: all lines over the same two axes, which begin at 0."""
    most_x = max((x for line in lines for x, _ in line.points), default=0.0) or 1.0
    most_y = max((y for line in lines for _, y in line.points), default=0.0) or 1.0
    parts = []
    for tick in range(NUM_TICKS + 1):
        share = tick / NUM_TICKS
        x, y = MARGIN + share * LINES_WIDTH, _y(share)
        parts.append(_line(MARGIN, y, MARGIN + LINES_WIDTH, y, "#dddddd"))
        parts.append(_text(MARGIN - 4, y + 3, f"{share * most_y:.3g}", anchor="end"))
        parts.append(_text(x, _y(0) + 14, f"{share * most_x:.3g}"))
    for number, line in enumerate(lines):
        points = " ".join(
            f"{MARGIN + x / most_x * LINES_WIDTH:.1f},{_y(y / most_y):.1f}" for x, y in line.points
        )
        colour = COLOURS[number % len(COLOURS)]
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}"/>')
    bottom = _y(0) + 34
    parts.append(_text(MARGIN + LINES_WIDTH / 2, bottom, x_label))
    parts.append(_text(14, _y(0.5), y_label, turn=-90))
    parts.append(_legend([line.name for line in lines], bottom + 12))
    return _document(parts, width=MARGIN * 2 + LINES_WIDTH, height=bottom + 30)


def _document(parts: Sequence[str], *, width: float, height: float) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}"'
        ' font-family="sans-serif" font-size="10">'
        f'<rect width="100%" height="100%" fill="white"/>{"".join(parts)}</svg>\n'
    )


def _legend(names: Sequence[str], top: float) -> str:
    return "".join(
        f'<rect x="{MARGIN + 130 * k:.1f}" y="{top:.1f}" width="10" height="10"'
        f' fill="{COLOURS[k % len(COLOURS)]}"/>'
        + _text(MARGIN + 130 * k + 14, top + 9, name, anchor="start")
        for k, name in enumerate(names)
    )


def _panel(panel: Panel, *, title: str, left: float, width: float) -> str:
    lines = [_text(left + width / 2, MARGIN - 12, title)]
    for tick in range(NUM_TICKS + 1):
        share = tick / NUM_TICKS
        lines.append(_line(left, _y(share), left + width, _y(share), "#dddddd"))
        lines.append(_text(left - 4, _y(share) + 3, f"{share:.0%}", anchor="end"))
    for number, (name, bars) in enumerate(panel.items()):
        middle = left + (number + 0.5) * PANEL_WIDTH
        lines.append(_group(bars, middle))
        lines.append(_text(middle, MARGIN + PANEL_HEIGHT + 12, name, turn=-30, anchor="end"))
    return "".join(lines)


def _group(bars: Sequence[Bar], middle: float) -> str:
    width = 0.7 * PANEL_WIDTH / max(1, len(bars))
    parts = []
    for number, bar in enumerate(bars):
        x = middle + (number - len(bars) / 2) * width
        parts.append(
            f'<rect x="{x:.1f}" y="{_y(bar.value):.1f}" width="{width:.1f}"'
            f' height="{bar.value * PANEL_HEIGHT:.1f}" fill="{COLOURS[number % len(COLOURS)]}"/>'
        )
        parts.append(_line(x + width / 2, _y(bar.low), x + width / 2, _y(bar.high), "black"))
    return "".join(parts)


def _y(share: float) -> float:
    return MARGIN + (1 - share) * PANEL_HEIGHT


def _line(x1: float, y1: float, x2: float, y2: float, colour: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}"/>'


def _text(x: float, y: float, text: str, *, anchor: str = "middle", turn: int = 0) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
        f' transform="rotate({turn} {x:.1f} {y:.1f})">{escape(text)}</text>'
    )
