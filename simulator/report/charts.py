"""Line charts as SVG text."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 460.0, 260.0  # pixels, of a whole chart without its legend
LEFT, RIGHT, TOP, BOTTOM = 58.0, 12.0, 26.0, 40.0  # of it around the plot
LEGEND_LINE = 15.0  # pixels
NUM_TICKS = 5
COLOURS = (
    "#2f5d8a", "#c98b3b", "#6b8f5e", "#a4423f", "#7a5ea8", "#4aa3a2", "#8a6d4b", "#b05f93",
    "#5b6770", "#b8a63a",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One curve."""

    name: str
    points: Sequence[tuple[float, float]]  # ascending x
    colour: int = 0  # number in COLOURS, modulo their count
    dashed: bool = False
    stepped: bool = False  # y holds from its x to the next
    marked: bool = False  # a dot at each point


@dataclass(frozen=True, slots=True, kw_only=True)
class Band:
    """A span of x, shaded."""

    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """What is drawn, and between which ends; None: those of the data, y from 0."""

    title: str
    x_label: str
    y_label: str
    lines: Sequence[Line]
    bands: Sequence[Band] = ()
    x_low: float | None = None
    x_high: float | None = None
    y_high: float | None = None


def draw(chart: Chart) -> str:
    """Return the chart as an SVG element."""
    plot = _Plot(chart)
    names = list(dict.fromkeys((line.name, line.colour, line.dashed) for line in chart.lines))
    height = HEIGHT + LEGEND_LINE * math.ceil(len(names) / 2)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH:g}" height="{height:g}"'
        f' viewBox="0 0 {WIDTH:g} {height:g}" font-family="sans-serif" font-size="10">',
        _text(LEFT, 14, chart.title, anchor="start", bold=True),
        *plot.grid(),
        *(plot.band(band) for band in chart.bands),
        *(plot.line(line) for line in chart.lines),
        *_legend(names),
        "</svg>",
    ]
    return "".join(parts)


class _Plot:
    """Maps data to pixels."""

    def __init__(self, chart: Chart) -> None:
        self.chart = chart
        xs = [x for line in chart.lines for x, _ in line.points] or [0.0]
        ys = [y for line in chart.lines for _, y in line.points] or [0.0]
        self.x_low = min(xs) if chart.x_low is None else chart.x_low
        self.x_high = max(xs) if chart.x_high is None else chart.x_high
        if self.x_high <= self.x_low:
            self.x_low, self.x_high = self.x_low - 0.5, self.x_low + 0.5
        self.y_high = (max(ys) if chart.y_high is None else chart.y_high) or 1.0

    def x(self, value: float) -> float:
        share = (value - self.x_low) / (self.x_high - self.x_low)
        return LEFT + min(1.0, max(0.0, share)) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        share = min(1.0, max(0.0, value / self.y_high))
        return HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)

    def grid(self) -> list[str]:
        right, low = WIDTH - RIGHT, HEIGHT - BOTTOM
        parts = []
        for value in ticks(0.0, self.y_high):
            y = self.y(value)
            parts.append(f'<path d="M{LEFT:g} {y:.1f}H{right:g}" stroke="#ddd"/>')
            parts.append(_text(LEFT - 4, y + 3, f"{value:g}", anchor="end"))
        for value in ticks(self.x_low, self.x_high):
            x = self.x(value)
            parts.append(f'<path d="M{x:.1f} {low:g}v4" stroke="#888"/>')
            parts.append(_text(x, low + 14, f"{value:g}"))
        parts.append(f'<path d="M{LEFT:g} {low:g}H{right:g}" stroke="#888"/>')
        parts.append(_text((LEFT + right) / 2, low + 30, self.chart.x_label))
        middle = (TOP + low) / 2
        parts.append(_text(12, middle, self.chart.y_label, turned=True))
        return parts

    def band(self, band: Band) -> str:
        left, right = self.x(band.low), self.x(band.high)
        return (
            f'<rect x="{left:.1f}" y="{TOP:g}" width="{max(1.0, right - left):.1f}"'
            f' height="{HEIGHT - TOP - BOTTOM:g}" fill="#c98b3b" fill-opacity="0.25"/>'
        )

    def line(self, line: Line) -> str:
        if not line.points:
            return ""
        colour = COLOURS[line.colour % len(COLOURS)]
        dash = ' stroke-dasharray="4 3"' if line.dashed else ""
        path, before = [], 0.0
        for number, (x, y) in enumerate(line.points):
            if line.stepped and number:
                path.append(f"L{self.x(x):.1f} {before:.1f}")
            before = self.y(y)
            path.append(f"{'L' if number else 'M'}{self.x(x):.1f} {before:.1f}")
        dots = [
            f'<circle cx="{self.x(x):.1f}" cy="{self.y(y):.1f}" r="2.5" fill="{colour}">'
            f"<title>{escape(line.name)}: {x:g}, {y:.4g}</title></circle>"
            for x, y in (line.points if line.marked else ())
        ]
        return (
            f'<path d="{"".join(path)}" fill="none" stroke="{colour}" stroke-width="1.5"{dash}/>'
            + "".join(dots)
        )


def ticks(low: float, high: float) -> list[float]:
    """Return round values in [low, high], about NUM_TICKS of them; `low` < `high`."""
    rough = (high - low) / NUM_TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1.0, 2.0, 2.5, 5.0, 10.0) if m * power >= rough * (1 - 1e-9))
    first = math.ceil(low / step - 1e-9)
    return [
        round(k * step, 12)
        for k in range(first, first + 2 * NUM_TICKS + 2)
        if k * step <= high * (1 + 1e-9)
    ]


def _legend(names: Sequence[tuple[str, int, bool]]) -> list[str]:
    parts = []
    for number, (name, colour, dashed) in enumerate(names):
        x = LEFT + number % 2 * (WIDTH - LEFT) / 2
        y = HEIGHT + number // 2 * LEGEND_LINE
        dash = ' stroke-dasharray="4 3"' if dashed else ""
        stroke = COLOURS[colour % len(COLOURS)]
        parts.append(
            f'<path d="M{x:.0f} {y + 4:.0f}h16" stroke="{stroke}" stroke-width="2"{dash}/>'
        )
        parts.append(_text(x + 20, y + 8, name, anchor="start"))
    return parts


def _text(  # noqa: PLR0913
    x: float,
    y: float,
    text: str,
    *,
    anchor: str = "middle",
    turned: bool = False,
    bold: bool = False,
) -> str:
    turn = f' transform="rotate(-90 {x:.1f} {y:.1f})"' if turned else ""
    weight = ' font-weight="bold"' if bold else ""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{turn}{weight}>{escape(text)}</text>'
    )
