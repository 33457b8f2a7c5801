"""Bars with intervals, in panels side by side."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from simulator.report.charts import COLOURS, CONFIG, HEIGHT, Specification

PANEL_WIDTH = 90  # pixels, of one group of bars


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """A share and its interval, all in [0, 1]."""

    value: float
    low: float
    high: float


Panel = Mapping[str, Sequence[Bar]]  # group name -> one bar per series


def bar_chart(panels: Mapping[str, Panel], *, series: Sequence[str], y_label: str) -> Specification:
    """Return one panel per title, one group of bars with intervals per name, side by side.

    Every group has one bar per series, in their order.
    """
    return CONFIG | {
        "hconcat": [_panel(title, panel, series, y_label) for title, panel in panels.items()]
    }


def _panel(title: str, panel: Panel, series: Sequence[str], y_label: str) -> Specification:
    colours = {"domain": list(series), "range": list(COLOURS[: len(series)])}
    share = {"type": "quantitative", "title": y_label, "scale": {"domain": [0, 1]}}
    return {
        "title": title,
        "width": PANEL_WIDTH * max(1, len(panel)),
        "height": HEIGHT,
        "data": {
            "values": [
                {"name": name, "series": one, "value": bar.value, "low": bar.low, "high": bar.high}
                for name, bars in panel.items()
                for one, bar in zip(series, bars, strict=True)
            ]
        },
        "encoding": {
            "x": {
                "field": "name",
                "title": None,
                "sort": list(panel),
                "axis": {"labelAngle": -30},
            },
            "xOffset": {"field": "series", "sort": list(series)},
            "tooltip": [{"field": field} for field in ("name", "series", "value", "low", "high")],
        },
        "layer": [
            {
                "mark": "bar",
                "encoding": {
                    "y": {"field": "value", "axis": {"format": "%"}, **share},
                    "color": {"field": "series", "title": None, "scale": colours},
                },
            },
            {"mark": "rule", "encoding": {"y": {"field": "low", **share}, "y2": {"field": "high"}}},
        ],
    }
