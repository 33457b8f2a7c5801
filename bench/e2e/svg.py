"""Grouped bars with intervals, as an SVG file: nothing to install, and text to compare."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

PANEL_WIDTH, PANEL_HEIGHT = 90.0, 180.0  # pixels: of one group, of all bars
MARGIN = 48.0
LABEL_HEIGHT = 110.0
COLOURS = ("#8fa3bf", "#2f5d8a", "#c98b3b", "#6b8f5e")
NUM_TICKS = 5


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
    legend = "".join(
        f'<rect x="{MARGIN + 130 * k:.1f}" y="{height - 16:.1f}" width="10" height="10"'
        f' fill="{COLOURS[k % len(COLOURS)]}"/>'
        + _text(MARGIN + 130 * k + 14, height - 7, name, anchor="start")
        for k, name in enumerate(series)
    )
    axis = _text(14, MARGIN + PANEL_HEIGHT / 2, y_label, turn=-90)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{left:.0f}" height="{height:.0f}"'
        ' font-family="sans-serif" font-size="10">'
        '<rect width="100%" height="100%" fill="white"/>'
        f"{axis}{''.join(parts)}{legend}</svg>\n"
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
