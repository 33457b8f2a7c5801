"""`python -m bench.who_runs`: who should run? Policies over regimes of the link, simulated."""

import argparse
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from pathlib import Path
from statistics import fmean

from bench.document import Benchmark, Row, document, markdown, save
from bench.who_runs.regimes import Case, all_regimes
from simulator.compose import make_engine
from simulator.engine import Engine
from simulator.figures import promptness, quantile, rebuffering
from simulator.planning import PlanningOptions
from simulator.records import Outcome, RunRecord
from simulator.simulation import simulate

POLICIES = ("vllm", "evenflow")
DEFINITIONS = {
    "lambda": "bytes that the link moves in a resident decode step / bytes of the KV pool",
    "tokens/s": "of complete requests, from the first arrival to the last token",
    "in time": "tokens after the first that are there 5 ms after they are due at the latest, "
    "behind Token-Deposit",
    "TPOT": "requests whose mean time per token is met, behind Token-Deposit",
    "rebuffering": "seconds that readers wait beyond their pace / seconds that they read",
    "TTFT": "from the arrival to the first token, in seconds; of requests that were served",
    "refused": "requests larger than the engine can ever hold, per run",
}
COLUMNS = (
    *("regime", "lambda", "policy", "tokens/s", "in time", "TPOT", "rebuffering"),
    *("TTFT mean / P50 / P95", "parks", "refused"),
)


def main() -> None:
    options = _options()
    load, regimes = os.getloadavg(), all_regimes()
    chosen = [name for name in regimes if any(part in name for part in options.only or [""])]
    cells = list(product(chosen, options.policies, range(1, options.seeds + 1)))
    with ProcessPoolExecutor(options.jobs) as pool:
        runs = list(pool.map(measured, *zip(*cells, strict=True)))
    rows = [
        mean_of([run for cell, run in zip(cells, runs, strict=True) if cell[:2] == (name, policy)])
        for name, policy in product(chosen, options.policies)
    ]
    benchmark = Benchmark(
        name="who_runs",
        title=f"Who runs: means of {options.seeds} seeds, simulated",
        definitions=DEFINITIONS,
        measure=lambda: rows,
        table=table,
    )
    content = document(benchmark, rows, load)
    save(content, options.out)
    print(markdown(benchmark, content))


def measured(regime: str, policy: str, seed: int) -> Row:
    """Return the figures of one run."""
    case = all_regimes()[regime](seed)
    record, engine = run(case, policy)
    counted = [one for one in record.outcomes if one.arrival_s >= case.counted_from_s]
    return {
        "regime": regime,
        "policy": policy,
        "seed": seed,
        "link_ratio": case.link_ratio,
        "parks": float(engine.scheduler.counters.num_parks),
        **figures_of(counted),
    }


def run(case: Case, policy: str) -> tuple[RunRecord, Engine]:
    options = PlanningOptions(policy=policy, report_interval_s=case.report_interval_s)
    engine = make_engine(case.shape, case.machine, options)
    return simulate(engine, case.requests), engine


def figures_of(outcomes: Sequence[Outcome]) -> dict[str, float]:
    """Return the figures of merit of requests that were served."""
    served = [one for one in outcomes if one.generated_s]
    prompt = [found for one in outcomes if (found := promptness(one)) is not None]
    met = [one.tpot_met_deposit for one in prompt if one.tpot_met_deposit is not None]
    ttft = sorted(one.generated_s[0] - one.arrival_s for one in served)
    span_s = max(o.generated_s[-1] for o in served) - min(o.arrival_s for o in served)
    waited_s, reading_s = (sum(part) for part in zip(*map(rebuffering, served), strict=True))
    num_gaps = sum(one.num_gaps for one in prompt)
    return {
        "tokens_per_s": sum(len(one.generated_s) for one in served) / span_s,
        "in_time": sum(p.num_in_time_deposit for p in prompt) / num_gaps if num_gaps else 1.0,
        "tpot_met": fmean(met) if met else 1.0,
        "rebuffering": waited_s / reading_s if reading_s else 0.0,
        "ttft": fmean(ttft),
        "ttft_p50": quantile(ttft, 0.5),
        "ttft_p95": quantile(ttft, 0.95),
        "refused": float(len(outcomes) - len(served)),
    }


def mean_of(runs: Sequence[Row]) -> Row:
    """Return one row of the seeds' means; the seeds' own figures stay beside them."""
    numbers = [name for name, value in runs[0].items() if isinstance(value, float)]
    row = {name: fmean(run[name] for run in runs) for name in numbers}
    return {"regime": runs[0]["regime"], "policy": runs[0]["policy"], **row, "runs": list(runs)}


def table(rows: Sequence[Row]) -> list[list[str]]:
    header = (
        "regime|lambda|policy|tokens/s|in time|TPOT|rebuffering|TTFT mean / P50 / P95|parks|refused"
    )
    return [
        header.split("|"),
        *(
            [
                row["regime"],
                f"{100 * row['link_ratio']:.1f} %",
                row["policy"],
                f"{row['tokens_per_s']:.1f}",
                f"{100 * row['in_time']:.2f} %",
                f"{100 * row['tpot_met']:.0f} %",
                f"{100 * row['rebuffering']:.2f} %",
                f"{row['ttft']:.2f} / {row['ttft_p50']:.2f} / {row['ttft_p95']:.1f}",
                f"{row['parks']:.0f}",
                f"{row['refused']:.1f}",
            ]
            for row in rows
        ),
    ]


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", help="parts of regimes' names")
    parser.add_argument("--policies", nargs="*", default=POLICIES)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--out", type=Path, default=Path(".cache/bench/who-runs.json"))
    return parser.parse_args()


if __name__ == "__main__":
    main()
