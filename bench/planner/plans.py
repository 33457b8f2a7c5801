"""Whole plans: window, SLO and pauses included, from snapshot to answer."""

import dataclasses
import time
from typing import Any

import numpy as np

from bench.planner.cells import quantiles, timed
from lab.planning.snapshots import make_engine, make_request, make_snapshot
from services.placement.types import Snapshot
from services.planner.policy.orbitflow import OrbitFlow
from services.planner.policy.policies import make_plan
from services.planner.solver.budget import DeadlineBudget
from services.planner.solver.solver import warm_solver

BUDGET_S = 0.02  # CPU time: the machine is shared
IMPOSSIBLE_S = 1e-4  # an SLO that no plan can keep
TIGHT_FRAC = 0.7  # of the step without SLO: some have to pause


def plan_times(num_layers: int, num_requests: int, count: int, seed: int) -> list[dict[str, Any]]:
    """Return figures of plans without an SLO, with a tight one, and with an impossible one."""
    random = np.random.default_rng([seed, num_layers, num_requests])
    optimiser = OrbitFlow(warm_solver)
    snapshots = [_snapshot(random, num_layers, num_requests) for _ in range(count)]
    _measured(snapshots[0], optimiser)  # builds the solver
    rows: dict[str, list[dict[str, float]]] = {"none": [], "tight": [], "impossible": []}
    for snapshot in snapshots:
        free = _measured(snapshot, optimiser)
        rows["none"].append(free)
        tight_s = TIGHT_FRAC * free["latency_s"]
        rows["tight"].append(_measured(_with_slo(snapshot, tight_s), optimiser))
        rows["impossible"].append(_measured(_with_slo(snapshot, IMPOSSIBLE_S), optimiser))
    return [
        {"num_layers": num_layers, "num_requests": num_requests, "num_instances": count}
        | {"slo": slo, "budget_s": BUDGET_S}
        | {name: quantiles(np.array([row[name] for row in found])) for name in found[0]}
        for slo, found in rows.items()
    ]


def _measured(snapshot: Snapshot, optimiser: OrbitFlow) -> dict[str, float]:
    deadline_s = time.process_time() + BUDGET_S
    budget = DeadlineBudget(time.process_time, deadline_s)
    wall_s, cpu_s, plan = timed(lambda: make_plan(snapshot, budget, optimiser))
    return {
        "cpu_s": cpu_s,
        "wall_s": wall_s,
        "latency_s": plan.quality.latency_s,
        "undecided": float(plan.status.value == "undecided"),
        "paused": float(sum(placement.paused for placement in plan.placements)),
    }


def _snapshot(random: np.random.Generator, num_layers: int, num_requests: int) -> Snapshot:
    sizes = [int(size) for size in random.integers(1_000, 12_000, num_requests)]
    requests = [make_request(f"r{i}", size, num_groups=num_layers) for i, size in enumerate(sizes)]
    engine = make_engine(num_layers=num_layers, num_blocks=2**40, max_num_seqs=num_requests)
    free = sum(sizes) // engine.block_size * num_layers * random.uniform(0.5, 0.9)
    return make_snapshot(*requests, engine=engine, num_free_blocks=int(free))


def _with_slo(snapshot: Snapshot, slo_s: float) -> Snapshot:
    requests = tuple(dataclasses.replace(r, slo_tbt_s=slo_s) for r in snapshot.requests)
    return dataclasses.replace(snapshot, requests=requests)
