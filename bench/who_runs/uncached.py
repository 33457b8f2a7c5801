"""`python -m bench.who_runs.uncached`: would `evenflow` gain from KV that is computed anew?

Beside `evenflow` runs the same policy which, where no layer leaves and a request waits for room,
lets newcomers in by `ellm`'s rule: with the least share of everybody's KV uncached that makes room,
if tokens come sooner with it. That is what recompute could add to a plan whose layers are resident.
"""

import argparse
import math
import os
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from itertools import product

from bench.document import Row
from bench.who_runs.__main__ import run
from bench.who_runs.cases import Regime, deployed, on_gpu
from bench.who_runs.regimes import arriving, links
from services.placement.run import evenflow
from services.placement.run.papers import ellm
from services.placement.run.types import RunDecision, RunPhase, RunSnapshot
from simulator.comparison.link_ratio import workload_link_ratio
from simulator.compose import make_engine
from simulator.engine.planning import PlanningOptions
from simulator.engine.simulation import simulate
from simulator.report.figures import figures

# Where a step computes most beside what its link carries: no grouped heads, and a fast GPU.
FAST_COMPUTE = (
    ("llama-2-7b", "pcie3x16", 1.0),
    ("llama-2-7b", "pcie5x16", 1.0),
    ("llama-2-13b", "pcie4x16", 0.4),
)
FIGURES = ("tokens_per_s", "ttft_s", "tbt_deposit")


def regimes() -> dict[str, Regime]:
    """Return `links` of `who_runs`, and those in which recompute has the most to give."""
    found = links()
    for name, link, rate in FAST_COMPUTE:
        on = deployed(name, "h100", link=link, max_num_seqs=512)
        found[f"{name}, H100, {link}, 9k + 600, {rate}/s"] = on_gpu(
            on, arriving(rate, 9_000, 600, 60)
        )
    return found


def with_uncached(snapshot: RunSnapshot) -> RunDecision:
    """Return `evenflow`'s decision, and which requests uncached KV makes room for."""
    decision = evenflow.decide(snapshot)
    if decision.offloads or decision.park or snapshot.costs is None:
        return decision
    new = [
        request
        for request in snapshot.requests
        if request.phase is RunPhase.NEW and request.request_id not in decision.run
    ]
    members = [r for r in snapshot.requests if r.request_id in decision.run]
    waits = any(not request.runs for request in members)
    if not new or waits or not members:
        return decision
    batch = ellm.Prefixes(replace(snapshot, requests=(*members, *new)), ellm.EllmRules())
    found = ellm.best_batch(
        range(len(members), batch.most + 1),
        least_frac=batch.least_frac,
        step_s=batch.step_s,
        slo_s=lambda size: batch.slo_s(size) if size > len(members) else math.inf,
    )
    if found is None or not found.uncached_frac:
        return decision
    taken = batch.order[: found.num_requests]
    shares = {r.request_id: batch.num_uncached(r, found.uncached_frac) for r in taken}
    return replace(
        decision,
        run=tuple(request.request_id for request in taken),
        uncached_blocks={name: number for name, number in shares.items() if number},
        valid_for_s=0.0,
    )


def measured(regime: str, seed: int) -> Row:
    """Return the figures of both."""
    case = regimes()[regime](seed)
    plain, _ = run(case, "evenflow")
    options = PlanningOptions(policy="evenflow", report_interval_s=case.report_interval_s)
    engine = make_engine(case.shape, case.machine, options)
    assert engine.loop.admission is not None
    engine.loop.admission._policy = with_uncached
    other = simulate(engine, case.requests)
    found = {
        name: [figures(record).get(name, 1.0) for record in (plain, other)] for name in FIGURES
    }
    num_steps = max(1, other.totals.num_steps)
    anew = other.totals.num_recomputed_tokens / num_steps
    ratio = workload_link_ratio(case.shape, case.machine, case.requests)
    return {"regime": regime, "lambda": ratio, "seed": seed, "recomputed": anew, **found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", default=[""], help="parts of regimes' names")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    options = parser.parse_args()
    names = [name for name in regimes() if any(part in name for part in options.only)]
    cells = list(product(names, range(1, options.seeds + 1)))
    print(
        "| regime (lambda) | seed | tokens/s | gain | TTFT s | in time | computed anew per step |"
    )
    print("|---|---|---|---|---|---|---|")
    with ProcessPoolExecutor(options.jobs) as pool:
        for row in pool.map(measured, *zip(*cells, strict=True)):
            rates, ttfts, shares = (row[name] for name in FIGURES)
            gain = rates[1] / rates[0] - 1.0
            print(
                f"| {row['regime']} ({row['lambda']:.2%}) | {row['seed']} "
                f"| {rates[0]:.1f}, {rates[1]:.1f} | {gain:+.1%} "
                f"| {ttfts[0]:.2f}, {ttfts[1]:.2f} | {shares[0]:.2%}, {shares[1]:.2%} "
                f"| {row['recomputed']:.1f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
