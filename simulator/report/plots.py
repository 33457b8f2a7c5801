"""The charts of a sweep: over the arrival rate, and of the runs at one rate and SLO."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from simulator.report.charts import Band, Chart, Line
from simulator.report.views import NUM_QUANTILES

GOODPUT_SHARE = 0.9  # of tokens in time, behind Token-Deposit

# figure, title, y label, factor from the figure to what is drawn
OVER_RATE: Sequence[tuple[str, str, str, float]] = (
    ("p95_s", "P95 of generated TBT", "ms", 1e3),
    ("p99_s", "P99 of generated TBT", "ms", 1e3),
    ("tokens_per_s", "Throughput", "tokens/s", 1.0),
    ("requests_per_min", "Throughput", "requests/min", 1.0),
    ("e2e_s", "End-to-end latency, mean", "s", 1.0),
    ("ttft_p95_s", "P95 of time to first token", "s", 1.0),
    ("pool", "Pool in use", "%", 100.0),
    ("offloaded", "Layer groups on the host", "%", 100.0),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One cell as reports see it."""

    row: Mapping[str, Any]  # what identifies the cell, and its figures
    view: Mapping[str, Any]

    @property
    def policy(self) -> str:
        return str(self.row["policy"])

    @property
    def slo_s(self) -> float:
        return float(self.row["slo_tbt_s"])

    @property
    def rate_per_s(self) -> float:
        return float(self.row["rate_per_s"])


def policies_of(runs: Sequence[Run]) -> list[str]:
    return list(dict.fromkeys(run.policy for run in runs))


def attainment_chart(runs: Sequence[Run], *, title: str) -> Chart:
    """Return tokens in time over the rate, behind Token-Deposit and as generated (dashed)."""
    lines = []
    for colour, policy in enumerate(policies_of(runs)):
        for figure, suffix in (("tbt_deposit", " + deposit"), ("tbt", "")):
            points = _points([r for r in runs if r.policy == policy], figure, 100.0)
            dashed = figure == "tbt"
            lines.append(
                Line(name=policy + suffix, points=points, colour=colour, dashed=dashed, marked=True)
            )
    return Chart(
        title=title, x_label="requests/s", y_label="% of tokens in time", lines=lines, y_high=100.0
    )


def over_rate_charts(runs: Sequence[Run]) -> list[Chart]:
    """Return the other figures over the rate; those that a run lacks are left out."""
    return [
        Chart(
            title=title,
            x_label="requests/s",
            y_label=unit,
            lines=[
                Line(
                    name=policy,
                    points=_points([r for r in runs if r.policy == policy], figure, factor),
                    colour=colour,
                    marked=True,
                )
                for colour, policy in enumerate(policies_of(runs))
            ],
        )
        for figure, title, unit, factor in OVER_RATE
    ]


def _points(runs: Sequence[Run], figure: str, factor: float) -> list[tuple[float, float]]:
    return sorted((r.rate_per_s, factor * r.row[figure]) for r in runs if figure in r.row)


def distribution_charts(runs: Sequence[Run]) -> list[Chart]:
    """Return cumulative distributions of one rate and SLO, one curve per policy."""
    return [
        _distribution(runs, "generated_gaps_s", "TBT as generated", 1e3, "ms"),
        _distribution(runs, "delivered_gaps_s", "TBT as delivered (behind deposit)", 1e3, "ms"),
        _distribution(runs, "ttft_s", "Time to first token", 1.0, "s"),
    ]


def _distribution(runs: Sequence[Run], name: str, title: str, factor: float, unit: str) -> Chart:
    lines = [
        Line(
            name=run.policy,
            points=[
                (factor * value, 100.0 * k / NUM_QUANTILES)
                for k, value in enumerate(run.view[name])
            ],
            colour=colour,
        )
        for colour, run in enumerate(runs)
    ]
    # The last percent may be a hundred times as long; it is cut off at the right.
    ends = [line.points[int(0.99 * NUM_QUANTILES)][0] for line in lines if line.points]
    return Chart(
        title=f"{title}, up to its 99th percentile",
        x_label=unit,
        y_label="% of tokens" if name.endswith("gaps_s") else "% of requests",
        lines=lines,
        x_low=0.0,
        x_high=max(ends, default=1.0),
        y_high=100.0,
    )


def residency_chart(run: Run) -> Chart:
    """Return where KV is over time, and how many requests wait or are paused."""
    samples = run.view["residency"]
    most = max((max(sample[4], sample[6]) for sample in samples), default=0) or 1
    shares = [("pool in use", 1), ("layer groups on the host", 2), ("host memory in use", 3)]
    lines = [
        Line(
            name=f"{name}, %",
            points=[(sample[0], 100.0 * sample[index]) for sample in samples],
            colour=colour,
            stepped=True,
        )
        for colour, (name, index) in enumerate(shares)
    ]
    lines += [
        Line(
            name=f"{name} (100: {most})",
            points=[(sample[0], 100.0 * sample[index] / most) for sample in samples],
            colour=3 + offset,
            stepped=True,
            dashed=True,
        )
        for offset, (name, index) in enumerate([("waiting requests", 6), ("paused requests", 5)])
    ]
    return Chart(
        title=f"{run.policy}: residency", x_label="s", y_label="%", lines=lines, y_high=100.0
    )


def timeline_chart(run: Run) -> Chart | None:
    """Return one request's tokens: generated, delivered, in deposit; its pauses are shaded."""
    given = run.view["timeline"]
    if given is None:
        return None
    generated = list(zip(given["generated_s"], given["token"], strict=True))
    delivered = list(zip(given["delivered_s"], given["token"], strict=True))
    return Chart(
        title=f"{run.policy}: request {given['request_id']}, {len(given['pauses_s'])} pauses, "
        f"{given['num_preemptions']} preemptions",
        x_label="s",
        y_label="tokens",
        lines=[
            Line(name="generated", points=generated, colour=0, stepped=True),
            Line(name="delivered", points=delivered, colour=1, stepped=True),
            Line(name="deposit", points=deposit(generated, delivered), colour=2, stepped=True),
        ],
        bands=[Band(low=low, high=high) for low, high in given["pauses_s"]],
    )


def deposit(
    generated: Sequence[tuple[float, float]], delivered: Sequence[tuple[float, float]]
) -> list[tuple[float, float]]:
    """Return tokens generated and not yet delivered, at every instant at which either changes."""
    changes = sorted([(t, 0, n) for t, n in generated] + [(t, 1, n) for t, n in delivered])
    counts, points = [0.0, 0.0], list[tuple[float, float]]()
    for instant_s, kind, number in changes:
        counts[kind] = number
        if points and points[-1][0] == instant_s:
            points.pop()
        points.append((instant_s, max(0.0, counts[0] - counts[1])))
    return points


def goodput(runs: Sequence[Run]) -> dict[tuple[str, float], float]:
    """Return the highest rate with GOODPUT_SHARE of tokens in time, by policy and SLO; 0: none."""
    found: dict[tuple[str, float], float] = {}
    for run in runs:
        key = run.policy, run.slo_s
        held = run.row.get("tbt_deposit", 0.0) >= GOODPUT_SHARE
        found[key] = max(found.get(key, 0.0), run.rate_per_s if held else 0.0)
    return found
