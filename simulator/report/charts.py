"""Charts as Vega-Lite specifications: one for a page and for an SVG file.

On a page of `page.page`, which carries Vega with it, a chart shows figures on hover, zooms, and
leaves a line alone that is clicked in its legend. `svg` needs no browser.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import vl_convert

WIDTH, HEIGHT = 380, 200  # pixels, of the plot
COLOURS = (
    "#2f5d8a", "#c98b3b", "#6b8f5e", "#a4423f", "#7a5ea8", "#4aa3a2", "#8a6d4b", "#b05f93",
    "#5b6770", "#b8a63a",
)  # fmt: skip
BAND_COLOUR = "#c98b3b"
DASHES = [4, 3]
FAINT = 0.08  # opacity of lines that are not chosen


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


Specification = dict[str, Any]
CONFIG: Specification = {
    "$schema": "https://vega.github.io/schema/vega-lite/v6.json",
    "config": {
        "legend": {"orient": "bottom", "columns": 2, "labelLimit": 320},
        "view": {"stroke": None},
    },
}


def draw(specification: Specification) -> str:
    """Return an element that a page turns into the chart."""
    return f'<div class="chart" data-chart="{escape(json.dumps(specification))}"></div>'


def svg(specification: Specification) -> str:
    """Return an SVG document."""
    return str(vl_convert.vegalite_to_svg(specification)) + "\n"


def line_chart(chart: Chart) -> Specification:
    """Return lines over two axes; a click on a name of the legend leaves that line alone."""
    names = list(dict.fromkeys(line.name for line in chart.lines))
    colours = {line.name: COLOURS[line.colour % len(COLOURS)] for line in chart.lines}
    layers = [_bands(chart.bands)] if chart.bands else []
    for stepped in (False, True):
        lines = [line for line in chart.lines if line.stepped is stepped]
        layers += [_lines(lines, stepped=stepped)] if lines else []
    if not chart.lines:
        layers.append(_lines([], stepped=False))
    layers[-1]["params"] = [
        {"name": "zoom", "select": "interval", "bind": "scales"},
        {"name": "chosen", "select": {"type": "point", "fields": ["name"]}, "bind": "legend"},
    ]
    return CONFIG | {
        "title": chart.title,
        "width": WIDTH,
        "height": HEIGHT,
        "encoding": {
            "x": _quantity("x", chart.x_label, _x_scale(chart)),
            "y": _quantity("y", chart.y_label, _y_scale(chart)),
            "color": {
                "field": "name",
                "title": None,
                "scale": {"domain": names, "range": [colours[name] for name in names]},
            },
        },
        "layer": layers,
    }


def _x_scale(chart: Chart) -> Specification:
    if chart.x_low is not None and chart.x_high is not None:
        return {"domain": [chart.x_low, chart.x_high], "nice": False}
    return {"zero": False} if any(line.points for line in chart.lines) else {"domain": [0, 1]}


def _y_scale(chart: Chart) -> Specification:
    if chart.y_high is not None:
        return {"domain": [0, chart.y_high]}
    some = any(y > 0 for line in chart.lines for _, y in line.points)
    return {"domainMin": 0} if some else {"domain": [0, 1]}


def _quantity(field: str, title: str, scale: Specification) -> Specification:
    return {"field": field, "type": "quantitative", "title": title, "scale": scale}


def _lines(lines: Sequence[Line], *, stepped: bool) -> Specification:
    mark: Specification = {"type": "line", "strokeWidth": 1.5, "clip": True}
    if stepped:
        mark["interpolate"] = "step-after"
    if any(line.marked for line in lines):
        mark["point"] = {"size": 24}
    return {
        "data": {
            "values": [
                {"name": line.name, "x": x, "y": y, "dashed": line.dashed}
                for line in lines
                for x, y in line.points
            ]
        },
        "mark": mark,
        "encoding": {
            "strokeDash": {
                "field": "dashed",
                "legend": None,
                "scale": {"domain": [False, True], "range": [[1, 0], DASHES]},
            },
            "opacity": {"condition": {"param": "chosen", "value": 1.0}, "value": FAINT},
            "tooltip": [{"field": field} for field in ("name", "x", "y")],
        },
    }


def _bands(bands: Sequence[Band]) -> Specification:
    return {
        "data": {"values": [{"x": band.low, "high": band.high} for band in bands]},
        "mark": {"type": "rect", "color": BAND_COLOUR, "opacity": 0.25, "clip": True},
        "encoding": {"x2": {"field": "high"}, "y": None, "color": None},
    }
