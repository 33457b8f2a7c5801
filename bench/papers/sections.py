"""What the report of the papers' figures shows, as HTML for the page and as text for a terminal."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from bench.papers.orbitflow import LOAD, SCALE, Point
from simulator.grid import CellResult
from simulator.report.charts import Chart, Line
from simulator.report.page import Section, charts, table

Shown = Callable[[float], str]


def _percent(value: float) -> str:
    return f"{100 * value:.1f}"


def _ms(value: float) -> str:
    return f"{1e3 * value:.0f}"


def _number(value: float) -> str:
    return f"{value:.2f}"


# Ours: as generated and behind Token-Deposit; "artefact": as OrbitFlow's scripts count.
ATTAINMENT: Sequence[tuple[str, str, Shown]] = (
    ("tbt", "TBT %", _percent),
    ("tbt_deposit", "TBT+D %", _percent),
    ("step_tbt", "artefact TBT %", _percent),
    ("step_tbt_deposit", "artefact TBT+D %", _percent),
    ("tpot", "TPOT %", _percent),
    ("tpot_deposit", "TPOT+D %", _percent),
    ("step_tpot", "artefact TPOT %", _percent),
)
LATENCY: Sequence[tuple[str, str, Shown]] = (
    ("p95_s", "P95 TBT ms", _ms),
    ("e2e_s", "E2E s", _number),
)
FIGURE_9: Sequence[tuple[str, str, Shown]] = (
    ("p99_s", "P99 TBT ms", _ms),
    ("tpot_p99_s", "P99 TPOT ms", _ms),
    ("requests_per_min", "requests/min", _number),
    ("tokens_per_s", "tokens/s", _number),
    ("pool", "pool %", _percent),
    ("ttft_s", "TTFT s", _number),
)
PAUSES: Sequence[tuple[str, str, Shown]] = (
    ("pauses", "pauses", _number),
    ("preemptions", "preemptions", _number),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shows:
    """One table: rows are policies at an x."""

    title: str
    x_label: str
    columns: Sequence[tuple[str, str, Shown]]
    points: Sequence[tuple[Point, CellResult]]

    def rows(self) -> list[list[str]]:
        """Return one row per x, SLO scale and policy; means over seeds."""
        groups: dict[tuple[float, float, str], list[Mapping[str, float]]] = {}
        for point, result in self.points:
            key = point.x, point.cell.slo_scale or 0.0, point.cell.name
            groups.setdefault(key, []).append(result.figures)
        return [
            [name, f"{scale:g}", f"{x:g}", *(self._cell(found, column) for column in self.columns)]
            for (x, scale, name), found in groups.items()
        ]

    @staticmethod
    def _cell(found: list[Mapping[str, float]], column: tuple[str, str, Shown]) -> str:
        name, _, shown = column
        values = [figures[name] for figures in found if name in figures]
        return shown(fmean(values)) if values else "-"

    @property
    def heads(self) -> list[str]:
        return ["policy", "SLO x", self.x_label, *(heading for _, heading, _ in self.columns)]

    def markdown(self) -> str:
        lines = [self.heads, ["---"] * len(self.heads), *self.rows()]
        return f"### {self.title}\n\n" + "\n".join(f"| {' | '.join(line)} |" for line in lines)

    def chart(self, figure: str, title: str) -> Chart:
        """Return a figure over x, one curve per policy; only of the first SLO scale in it."""
        curves: dict[str, dict[float, list[float]]] = {}
        for point, result in self.points:
            curve = curves.setdefault(point.cell.name, {})
            curve.setdefault(point.x, []).append(100.0 * result.figures.get(figure, 0.0))
        lines = [
            Line(
                name=name,
                points=[(x, fmean(values)) for x, values in sorted(curve.items())],
                colour=colour,
                marked=True,
            )
            for colour, (name, curve) in enumerate(curves.items())
        ]
        return Chart(title=title, x_label=self.x_label, y_label="%", lines=lines, y_high=100.0)


Found = Mapping[str, Sequence[tuple[Point, CellResult]]]


def shows(found: Found) -> list[Shows]:
    """Return the tables of all figures that there are cells of."""
    eight = found["8"]
    nine = [
        (point, result)
        for point, result in eight
        if point.x == LOAD and point.cell.slo_scale == SCALE
    ]
    both = (*ATTAINMENT, *LATENCY)
    made = [
        Shows(
            title="Fig. 8: SLO attainment, P95 and E2E", x_label="load", columns=both, points=eight
        ),
        Shows(
            title="Fig. 9: tails, throughput, memory", x_label="load", columns=FIGURE_9, points=nine
        ),
        Shows(title="Fig. 12a: bursts", x_label="CV", columns=ATTAINMENT, points=found["12a"]),
        Shows(
            title="Fig. 12b: batch size",
            x_label="batch size",
            columns=ATTAINMENT,
            points=found["12b"],
        ),
        Shows(
            title="Fig. 14a: components",
            x_label="SLO scale",
            columns=ATTAINMENT,
            points=found["14a"],
        ),
        Shows(
            title="Fig. 14c: whom to pause",
            x_label="-",
            columns=(*ATTAINMENT, *PAUSES),
            points=found["14c"],
        ),
    ]
    made += [
        Shows(title=f"Recorded: {name}", x_label="-", columns=(*both, *FIGURE_9), points=points)
        for name, points in found.items()
        if name.endswith(".json")
    ]
    return made


def section(one: Shows) -> Section:
    """Return a table with its chart, where x is an axis."""
    drawn = []
    if one.x_label != "-":
        scales = sorted({point.cell.slo_scale or 0.0 for point, _ in one.points})
        by_scale = [one] if one.x_label == "SLO scale" else [_at(one, scale) for scale in scales]
        for part in by_scale:
            scale = part.points[0][0].cell.slo_scale
            suffix = "" if part is one and len(scales) > 1 else f", SLO x {scale:g}"
            drawn.append(part.chart("tbt_deposit", f"TBT + deposit{suffix}"))
            drawn.append(part.chart("tbt", f"TBT{suffix}"))
            drawn.append(part.chart("step_tbt_deposit", f"Artefact's TBT + deposit{suffix}"))
    return Section(title=one.title, body=charts(drawn) + table(one.heads, one.rows()))


def _at(one: Shows, scale: float) -> Shows:
    points = [(point, r) for point, r in one.points if point.cell.slo_scale == scale]
    return Shows(title=one.title, x_label=one.x_label, columns=one.columns, points=points)


def speed(results: Mapping[str, Sequence[CellResult]]) -> tuple[list[str], list[list[str]]]:
    """Return a table of the simulator's speed by policy, from the runs' own CPU time."""
    rows = []
    for policy, found in results.items():
        cpu_s = sum(result.cpu_s for result in found)
        events = sum(result.figures["events"] for result in found)
        steps = sum(result.figures["steps"] for result in found)
        tokens = sum(result.figures.get("output_tokens", 0.0) for result in found)
        rows.append(
            [policy, f"{len(found)}", f"{cpu_s:.0f}"]
            + [f"{number / cpu_s:,.0f}" for number in (events, steps, tokens)]
        )
    return ["policy", "runs", "CPU s", "events/s", "steps/s", "tokens/s"], rows
