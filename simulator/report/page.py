"""Puts tables and charts on one HTML page."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from html import escape
from itertools import groupby

import vl_convert

from simulator.report.charts import Chart, draw, line_chart
from simulator.report.plots import (
    GOODPUT_SHARE,
    Run,
    attainment_chart,
    distribution_charts,
    goodput,
    over_rate_charts,
    policies_of,
    residency_chart,
    timeline_chart,
)
from simulator.report.tables import COLUMNS, MORE_COLUMNS

STYLE = """
body { font: 14px/1.45 sans-serif; margin: 2em auto; padding: 0 1em; color: #222 }
body { max-width: 1440px }
table { border-collapse: collapse; margin: 1em 0; font-variant-numeric: tabular-nums }
td, th { border-bottom: 1px solid #ddd; padding: 2px 9px; text-align: right; white-space: nowrap }
td:first-child, th:first-child { text-align: left }
.prose td, .prose th { text-align: left; vertical-align: top; white-space: normal }
.charts { display: flex; flex-wrap: wrap; gap: 12px }
.chart { min-width: 460px; min-height: 270px }
summary { cursor: pointer; font-weight: bold; margin: 1em 0 .4em }
dt { font-weight: bold } dd { margin: 0 0 .4em 1.5em }
"""


# A chart in a folded part is drawn when it is unfolded: it has no width before.
DRAW = """
function drawIn(part) {
  for (const element of part.querySelectorAll(".chart:empty")) {
    if (element.offsetParent === null) continue;
    vegaEmbed(element, JSON.parse(element.dataset.chart), {actions: {export: true, source: false,
      compiled: false, editor: false}, renderer: "svg"});
  }
}
drawIn(document);
for (const part of document.querySelectorAll("details")) {
  part.addEventListener("toggle", () => drawIn(part));
}
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A heading and what is below it, as HTML."""

    title: str
    body: str


def page(title: str, intro: str, sections: Iterable[Section]) -> str:
    """Return a whole page that loads nothing."""
    parts = [f"<section><h2>{escape(one.title)}</h2>{one.body}</section>" for one in sections]
    return (
        f'<!DOCTYPE html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f"<style>{STYLE}</style></head><body><h1>{escape(title)}</h1><p>{escape(intro)}</p>"
        f"{''.join(parts)}<script>{_vega()}</script><script>{DRAW}</script></body></html>\n"
    )


@cache
def _vega() -> str:
    """Return Vega, Vega-Lite and Vega-Embed, as one script."""
    bundle: str = vl_convert.javascript_bundle()  # type: ignore[call-arg]  # its default serves
    return bundle.replace("</script>", "<\\/script>")


def sweep_sections(runs: Sequence[Run]) -> list[Section]:
    """Return everything a sweep has to show."""
    by_slo = sorted(runs, key=lambda run: run.slo_s)
    slos = [(slo_s, list(found)) for slo_s, found in groupby(by_slo, key=lambda run: run.slo_s)]
    attained = [attainment_chart(found, title=_slo(found[0])) for _, found in slos]
    sections = [
        Section(title="Tokens in time over the arrival rate", body=charts(attained)),
        Section(title="Goodput", body=goodput_table(runs)),
        Section(title="Figures", body=figures_table(runs)),
    ]
    for number, (_, found) in enumerate(slos):
        drawn = charts(over_rate_charts(found))
        body = _folded(_slo(found[0]), drawn, opened=number == 0)
        sections.append(Section(title=f"Over the arrival rate, {_slo(found[0])}", body=body))
    sections.append(Section(title="Runs", body="".join(_groups(runs))))
    return sections


def _groups(runs: Sequence[Run]) -> Iterable[str]:
    """Yield the runs of each rate and SLO, those of the first ones unfolded."""
    ordered = sorted(runs, key=lambda run: (run.slo_s, run.rate_per_s))
    groups = groupby(ordered, key=lambda run: (run.slo_s, run.rate_per_s))
    for number, ((_, rate_per_s), members) in enumerate(groups):
        found = list(members)
        drawn = [*distribution_charts(found), *(residency_chart(run) for run in found)]
        timelines = (timeline_chart(run) for run in found)
        drawn += [chart for chart in timelines if chart is not None]
        yield _folded(
            f"{rate_per_s:g} requests/s, {_slo(found[0])}", charts(drawn), opened=not number
        )


def _slo(run: Run) -> str:
    scale = run.row.get("slo_scale")
    suffix = f" ({scale:g} x base)" if scale else ""
    return f"SLO {1e3 * run.slo_s:.1f} ms{suffix}"


def charts(wanted: Iterable[Chart]) -> str:
    drawn = (draw(line_chart(chart)) for chart in wanted)
    return f'<div class="charts">{"".join(drawn)}</div>'


def _folded(title: str, body: str, *, opened: bool) -> str:
    return f"<details{' open' if opened else ''}><summary>{escape(title)}</summary>{body}</details>"


def goodput_table(runs: Sequence[Run]) -> str:
    found = goodput(runs)
    slos_s = sorted({slo_s for _, slo_s in found})
    heads = [f"SLO {1e3 * slo_s:.1f} ms" for slo_s in slos_s]
    rows = [
        [policy, *(_rate(found.get((policy, slo_s))) for slo_s in slos_s)]
        for policy in policies_of(runs)
    ]
    note = (
        f"<p>Highest rate tried, in requests/s, at which {GOODPUT_SHARE:.0%} of tokens are in time "
        "behind Token-Deposit.</p>"
    )
    return note + table(["policy", *heads], rows)


def _rate(value: float | None) -> str:
    return "-" if value is None else f"{value:g}" if value else "none"


def figures_table(runs: Sequence[Run]) -> str:
    columns = [*COLUMNS, *MORE_COLUMNS]
    rows = [
        [
            run.policy,
            *(shown(run.row[name]) if name in run.row else "-" for name, _, shown in columns),
        ]
        for run in runs
    ]
    return table(["policy", *(heading for _, heading, _ in columns)], rows)


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table; all texts are escaped."""
    head = "".join(f"<th>{escape(text)}</th>" for text in heads)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(text)}</td>" for text in row) + "</tr>" for row in rows
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def definitions(texts: Mapping[str, str]) -> Section:
    """Return what the figures mean."""
    entries = (f"<dt>{escape(k)}</dt><dd>{escape(v)}</dd>" for k, v in texts.items())
    return Section(title="Definitions", body=f"<dl>{''.join(entries)}</dl>")
