"""`python -m bench.who_runs`: which requests run? Policies over regimes of the link, simulated."""

import argparse
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from statistics import fmean
from types import MappingProxyType

from bench.document import Benchmark, Row, document, markdown, save
from bench.who_runs import beside_people, sessions
from bench.who_runs.beside_best import VLLM, pairs
from bench.who_runs.cases import Case
from bench.who_runs.reading import figures_by_kind
from bench.who_runs.regimes import SETS, all_regimes
from lab.policies.presets import full_name
from services.placement.types import PolicyParameters
from simulator.comparison.link_ratio import workload_link_ratio
from simulator.compose import make_engine
from simulator.device.drafts import Drafts
from simulator.engine.engine import Engine
from simulator.engine.planning import PlanningOptions
from simulator.engine.records import RunRecord
from simulator.engine.simulation import simulate
from simulator.engine.vllm import VllmOptions
from simulator.report import steps
from simulator.report.figures import figures

POLICIES = (*VLLM, "evenflow")
DEFINITIONS = {
    "lambda": "bytes that the link moves in a resident decode step / bytes of the KV pool",
    "tokens/s": "of complete requests, from the first arrival to the last token",
    "in time": "tokens after the first that are there 5 ms after they are due at the latest, "
    "behind Token-Deposit",
    "TPOT": "requests whose mean time per token is met, behind Token-Deposit",
    "effective, QoS, rebuffering": "as `simulator/report/streaming.py` defines them",
    "TTFT": "from the arrival to the first token, in seconds; of requests that were served",
    "cached": "tokens of prompts that were found and not computed / tokens of prompts",
    "vllm@0.02": "vLLM with `watermark` 0.02; the best of its settings is that with most tokens/s, "
    "of those within 0.2 % the one with the soonest first token",
    "people, agents": "requests that state a rate and a TTFT SLO, and which share of them has its "
    "first token within it; those that state nothing, and how long each takes to its end, in "
    "seconds",
    "fluid": "first tokens of a fluid, first come first served, whose readers get their rate, with "
    "memory and link for nothing (`capacity.py`)",
    "never read, read tokens/s": "share of the generated tokens behind the point at which their "
    "reader left; tokens up to there, per second",
    "never made": "share of the tokens asked for that were not generated: their reader had left",
    "refused": "requests larger than the engine can ever hold, per run",
}
SHARES = (  # column, figure, decimals
    ("in time", "tbt_deposit", 2),
    ("TPOT", "tpot_deposit", 0),
    ("rebuffering", "rebuffering", 2),
)
TTFT = "TTFT mean / P50 / P95 / P99"
OWN_TABLES = MappingProxyType({"sessions": sessions, "people": beside_people})  # sets that have one


def main() -> None:
    options = _options()
    load, regimes = os.getloadavg(), SETS[options.set]()
    chosen = [name for name in regimes if any(part in name for part in options.only or [""])]
    own = OWN_TABLES.get(options.set)
    policies = options.policies or (own.POLICIES if own else POLICIES)
    drafts = None
    if options.drafts:
        drafts = Drafts(num_drafts=options.drafts, acceptance=options.acceptance)
    measure = partial(measured, host_frac=options.host_frac, drafts=drafts)
    seeds = range(1, options.seeds + 1)
    rows = means(measure, chosen, policies, seeds=seeds, jobs=options.jobs)
    benchmark = Benchmark(
        name="who_runs",
        title=f"Who runs: means of {options.seeds} seeds, simulated",
        definitions=own.DEFINITIONS if own else DEFINITIONS,
        measure=lambda: rows,
        table=own.table if own else table,
        verdicts=own.verdicts if own else verdicts,
    )
    content = document(benchmark, rows, load)
    save(content, options.out)
    print(markdown(benchmark, content))


def means(
    measure: Callable[[str, str, int], Row],
    regimes: Sequence[str],
    policies: Sequence[str],
    *,
    seeds: Iterable[int],
    jobs: int | None = None,
) -> list[Row]:
    """Return a row for each regime and policy, the mean of its seeds; `jobs` runs at a time."""
    cells = list(product(regimes, policies, seeds))
    with ProcessPoolExecutor(jobs) as pool:
        runs = list(pool.map(measure, *zip(*cells, strict=True)))
    return [
        mean_of([run for cell, run in zip(cells, runs, strict=True) if cell[:2] == (name, policy)])
        for name, policy in product(regimes, policies)
    ]


def measured(
    regime: str,
    policy: str,
    seed: int,
    host_frac: float | None = None,
    drafts: Drafts | None = None,
) -> Row:
    """Return the figures of one run. `host_frac`: as much room on the host, of the pool."""
    case = all_regimes()[regime](seed)
    if drafts is not None:
        case = case.with_drafts(drafts)
    if host_frac is not None:
        case = case.with_host(host_frac)
    record, engine = run(case, policy)
    counted = tuple(one for one in record.outcomes if one.arrival_s >= case.counted_from_s)
    return {
        "regime": regime,
        "policy": policy,
        "seed": seed,
        "lambda": workload_link_ratio(case.shape, case.machine, case.requests),
        "parks": float(engine.scheduler.counters.num_parks),
        **figures(replace(record, outcomes=counted)),
        **figures_by_kind(counted),
        **steps.figures(record, case.requests, case.shape.block_size),
        **{f"fluid_{name}": value for name, value in case.fluid.items()},
    }


def run(case: Case, policy: str) -> tuple[RunRecord, Engine]:
    """Simulate a policy, by its name, by `name@alpha`, or by `vllm@watermark`."""
    name, _, value = policy.partition("@")
    parameters, vllm = PolicyParameters(), VllmOptions()
    if value and name == "vllm":
        vllm = VllmOptions(watermark=float(value))
    elif value:
        parameters = PolicyParameters(alpha=float(value))
    options = PlanningOptions(
        policy=full_name(name),
        parameters=parameters,
        vllm=vllm,
        report_interval_s=case.report_interval_s,
    )
    engine = make_engine(case.shape, case.machine, options)
    return simulate(engine, case.requests), engine


def mean_of(runs: Sequence[Row]) -> Row:
    """Return one row of the seeds' means; the seeds' own figures stay beside them.

    A count that a seed does not name is 0 there.
    """
    names = dict.fromkeys(name for run in runs for name in run)
    counted = [name for name in names if name not in ("regime", "policy", "seed")]
    row = {name: fmean(run.get(name, 0.0) for run in runs) for name in counted}
    return {"regime": runs[0]["regime"], "policy": runs[0]["policy"], **row, "runs": list(runs)}


def verdicts(rows: Sequence[Row]) -> list[str]:
    """Return a line for each regime: `evenflow` beside the best setting of vLLM."""
    return [verdict(best, ours) for best, ours in pairs(rows)]


def verdict(best: Row, ours: Row) -> str:
    """Say how `evenflow` compares, and whether it is behind: by 1 %, 2 %, or half a point."""
    tokens = ours["tokens_per_s"] / best["tokens_per_s"]
    ttft = ours["ttft_s"] / best["ttft_s"]
    points = 100 * (ours.get("tbt_deposit", 1.0) - best.get("tbt_deposit", 1.0))
    behind = tokens < 0.99 or ttft > 1.02 or points < -0.5
    return (
        f"{ours['regime']}: {tokens:.3f} x the tokens/s of {best['policy']}, {ttft:.3f} x its "
        f"TTFT, {points:+.2f} points in time{': behind' if behind else ''}"
    )


def table(rows: Sequence[Row]) -> list[list[str]]:
    """Return the rows' cells below their columns; a dash where a row has nothing to say."""
    cells = [dict(_cells(row)) for row in rows]
    columns = list(dict.fromkeys(name for row in cells for name in row))
    return [columns, *([row.get(name, "-") for name in columns] for row in cells)]


def _cells(row: Row) -> Iterator[tuple[str, str]]:
    """Yield a row's columns and cells."""
    yield "regime", row["regime"]
    yield "lambda", f"{100 * row['lambda']:.1f} %"
    yield "policy", row["policy"]
    yield "tokens/s", f"{row['tokens_per_s']:.1f}"
    yield "effective", f"{row['effective_tokens_per_s']:.1f}"
    yield "QoS", f"{row['qos']:.1f}"
    for column, name, decimals in SHARES:
        yield column, f"{100 * row[name]:.{decimals}f} %" if name in row else "-"
    yield TTFT, _ttfts(row)
    yield "cached", f"{row['cached']:.0%}"
    yield "parks", f"{row['parks']:.0f}"
    yield "refused", f"{row['rejected']:.1f}"
    if "unread" in row:
        yield "never read", f"{100 * row['unread']:.1f} %"
        yield "never made", f"{100 * row['unmade']:.1f} %"
        yield "read tokens/s", f"{row['read_tokens_per_s']:.1f}"
    yield from _cells_of_kinds(row)
    if "fluid_ttft_s" in row:
        yield f"fluid {TTFT}", _ttfts(row, "fluid_")


def _cells_of_kinds(row: Row) -> Iterator[tuple[str, str]]:
    if "people_ttft_s" in row:
        yield f"people {TTFT}", _ttfts(row, "people_")
        yield "within SLO", f"{row['people_within_slo']:.0%}"
        yield f"agents {TTFT}", _ttfts(row, "agents_")
        yield "agents' end", f"{row['agents_e2e_s']:.1f}"


def _ttfts(row: Row, whose: str = "") -> str:
    soon = [f"{row[whose + name]:.2f}" for name in ("ttft_s", "ttft_p50_s")]
    late = [f"{row[whose + name]:.1f}" for name in ("ttft_p95_s", "ttft_p99_s")]
    return " / ".join([*soon, *late])


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--set", choices=SETS, default="links", help="of regimes")
    parser.add_argument("--only", nargs="*", help="parts of regimes' names")
    parser.add_argument("--policies", nargs="*", help="names, or name@alpha")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--host-frac", type=float, help="room on the host, of the pool")
    parser.add_argument("--drafts", type=int, default=0, help="tokens drafted per request and step")
    parser.add_argument("--acceptance", type=float, default=0.7, help="share that is right")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--out", type=Path, default=Path(".cache/bench/who-runs.json"))
    return parser.parse_args()


if __name__ == "__main__":
    main()
