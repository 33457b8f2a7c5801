"""What the report of the papers' figures shows, as HTML for the page and as text for a terminal."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from bench.papers.cells import Simulated
from simulator.comparison.grid import CellResult
from simulator.report.charts import Chart, Line
from simulator.report.page import Section, charts, table

Shown = Callable[[float], str]
Column = tuple[str, str, Shown]  # name of the figure, heading, how it is written
NO_AXIS = "-"  # of a table with one x


def as_percent(value: float) -> str:
    return f"{100 * value:.1f}"


def as_ms(value: float) -> str:
    return f"{1e3 * value:.0f}"


def as_number(value: float) -> str:
    return f"{value:.2f}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """A figure that is drawn over x."""

    figure: str
    title: str
    unit: str = "%"  # shares are drawn in percent

    @property
    def is_share(self) -> bool:
        return self.unit == "%"


@dataclass(frozen=True, slots=True, kw_only=True)
class Counting:
    """Which figures count as a paper does; all others count as this project does."""

    theirs: frozenset[str] = frozenset()  # the paper's own, shown beside this project's
    alike: frozenset[str] = frozenset()  # there is one way to count them

    def of(self, columns: Sequence[Column]) -> str:
        """Say how each of a table's columns counts."""
        kinds: dict[str, list[str]] = {
            "As the paper counts": [],
            "As this project counts": [],
            "Both alike": [],
        }
        for name, heading, _ in columns:
            ours = "Both alike" if name in self.alike else "As this project counts"
            kinds["As the paper counts" if name in self.theirs else ours].append(heading)
        return " ".join(f"{kind}: {', '.join(named)}." for kind, named in kinds.items() if named)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shows:
    """One table: rows are policies at an x."""

    title: str
    x_label: str  # NO_AXIS: no column for x
    columns: Sequence[Column]
    points: Sequence[Simulated]
    counting: Counting
    drawn: Sequence[Drawn] = ()  # charts over x, where x is an axis
    charts: Sequence[Chart] = ()  # others

    def rows(self) -> list[list[str]]:
        """Return one row per x, SLO scale and policy; means over seeds."""
        groups: dict[tuple[float, float, str], list[Mapping[str, float]]] = {}
        for point, result in self.points:
            key = point.x, point.cell.slo_scale or 0.0, point.cell.name
            groups.setdefault(key, []).append(result.figures)
        return [
            [
                name,
                *([f"{scale:g}"] if self._has_scales else []),
                *([f"{x:g}"] if self._has_x else []),
                *(self._cell(found, column) for column in self.columns),
            ]
            for (x, scale, name), found in groups.items()
        ]

    @property
    def _has_scales(self) -> bool:
        return any(point.cell.slo_scale for point, _ in self.points)

    @property
    def _has_x(self) -> bool:
        return self.x_label != NO_AXIS

    @staticmethod
    def _cell(found: list[Mapping[str, float]], column: Column) -> str:
        name, _, shown = column
        values = [figures[name] for figures in found if name in figures]
        return shown(fmean(values)) if values else "-"

    @property
    def ratios(self) -> str:
        """Say the lambda of the table: the least and the greatest of its cells."""
        found = [100.0 * result.figures["lambda"] for _, result in self.points]
        low, high = (
            f"{one:.2g}" if one < 100.0 else f"{one:.0f}" for one in (min(found), max(found))
        )
        return f"lambda {low} %" if low == high else f"lambda {low} to {high} %"

    @property
    def heads(self) -> list[str]:
        return [
            "policy",
            *(["SLO x"] if self._has_scales else []),
            *([self.x_label] if self._has_x else []),
            *(heading for _, heading, _ in self.columns),
        ]

    def markdown(self) -> str:
        lines = [self.heads, ["---"] * len(self.heads), *self.rows()]
        head = f"### {self.title}\n\n{self.ratios}. {self.counting.of(self.columns)}\n\n"
        return head + "\n".join(f"| {' | '.join(line)} |" for line in lines)

    def chart(self, drawn: Drawn, suffix: str) -> Chart:
        """Return a figure over x, one curve per policy."""
        factor = 100.0 if drawn.is_share else 1.0
        curves: dict[str, dict[float, list[float]]] = {}
        for point, result in self.points:
            curve = curves.setdefault(point.cell.name, {})
            curve.setdefault(point.x, []).append(factor * result.figures.get(drawn.figure, 0.0))
        lines = [
            Line(
                name=name,
                points=[(x, fmean(values)) for x, values in sorted(curve.items())],
                colour=colour,
                marked=True,
            )
            for colour, (name, curve) in enumerate(curves.items())
        ]
        return Chart(
            title=f"{drawn.title}{suffix}",
            x_label=self.x_label,
            y_label=drawn.unit,
            lines=lines,
            y_high=100.0 if drawn.is_share else None,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Stated:
    """A table that no simulation is needed for."""

    title: str
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    is_prose: bool = False  # sentences, not figures

    def markdown(self) -> str:
        lines = [self.heads, ["---"] * len(self.heads), *self.rows]
        return f"### {self.title}\n\n" + "\n".join(f"| {' | '.join(line)} |" for line in lines)

    def section(self) -> Section:
        body = table(self.heads, self.rows)
        whole = f'<div class="prose">{body}</div>' if self.is_prose else body
        return Section(title=self.title, body=whole)


def section(one: Shows) -> Section:
    """Return a table with its charts."""
    made = list(one.charts)
    if len({point.x for point, _ in one.points}) > 1:
        scales = sorted({point.cell.slo_scale or 0.0 for point, _ in one.points})
        by_scale = [one] if one.x_label == "SLO scale" else [_at(one, scale) for scale in scales]
        for part in by_scale:
            scale = part.points[0][0].cell.slo_scale
            whole = not scale or (part is one and len(scales) > 1)
            suffix = "" if whole else f", SLO x {scale:g}"
            made += [part.chart(drawn, suffix) for drawn in one.drawn]
    body = (
        f"<p>{one.ratios}. {one.counting.of(one.columns)}</p>"
        + charts(made)
        + table(one.heads, one.rows())
    )
    return Section(title=one.title, body=body)


def _at(one: Shows, scale: float) -> Shows:
    points = [(point, r) for point, r in one.points if (point.cell.slo_scale or 0.0) == scale]
    return replace(one, points=points)


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
