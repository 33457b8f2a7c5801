"""OrbitFlow's Fig. 8, 9, 12 and 14 as cells of the simulator.

Its setting (section 5.1): Llama-3-8B on one RTX A5000 behind PCI Express 3.0, four requests at a
time, a pool of 611 blocks of 16 tokens as in the artefact's trace at 2x. Rates are given as in the
artefact, by offered concurrency: at 1x as many output tokens arrive as one request alone would
decode at the base SLO.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from services.placement.types import PolicyParameters, VictimRule
from simulator.deployment import Deployment
from simulator.grid import Arrivals, Cell, Workload
from simulator.hardware import assumptions, device, link_rates, model
from simulator.traces import read_orbitflow
from simulator.workload import published_lengths

BLOCK_SIZE = 16
POOL_BLOCKS = 611  # per layer
BATCH_SIZE = 4
SCALES = (1.0, 1.5, 2.5)
SCALE = 1.5  # of everything but Fig. 8 and 14
LOADS = (1.0, 3.0, 5.0)
LOAD = 3.0  # of Fig. 9, 12a and 14a: the pool is felt here, which at the paper's 2x it hardly is
STRESS_LOAD = 5.0  # of Fig. 12b and 14c
LENGTHS = "orbitflow-b"
STRESS_LENGTHS = "orbitflow-c"  # of Fig. 14c
CVS = (1.0, 3.0, 6.0)
BATCH_SIZES = (2, 4, 8)
BASELINES = ("deepspeed", "flexgen", "flexgen-plus", "slo-aware", "dynamic-heuristic")
STRONGEST = ("flexgen-plus", "dynamic-heuristic", "orbitflow")  # Fig. 12
COMPONENTS = ("batch-uniform", "request-wise", "request-wise-pause", "orbitflow")  # Fig. 14a
VICTIMS = (VictimRule.LONGEST, VictimRule.SHORTEST, VictimRule.RANDOM)  # Fig. 14c


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One cell and where it stands on its figure's x axis."""

    x: float
    cell: Cell


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How much is simulated."""

    num_requests: int
    num_seeds: int
    loads: tuple[float, ...] = LOADS  # of Fig. 8


def deployment() -> Deployment:
    """Return OrbitFlow's default setting."""
    return Deployment(
        model=model("llama-3-8b"),
        device=device("a5000"),
        assumptions=assumptions(),
        pool_tokens=POOL_BLOCKS * BLOCK_SIZE,
        max_num_seqs=BATCH_SIZE,
    ).with_link(link_rates()["pcie3x16"])


def figures(size: Size) -> dict[str, list[Point]]:
    """Return the cells of every figure on generated requests."""
    seeds = range(size.num_seeds)
    return {
        name: [
            replace(point, cell=replace(point.cell, seed=seed))
            for seed in seeds
            for point in points
        ]
        for name, points in {
            "8": _figure_8(size),
            "12a": _figure_12a(size),
            "12b": _figure_12b(size),
            "14a": _figure_14a(size),
            "14c": _figure_14c(size),
        }.items()
    }


def _figure_8(size: Size) -> list[Point]:
    return [
        Point(x=load, cell=_cell(policy, size, load=load, scale=scale))
        for scale in SCALES
        for load in size.loads
        for policy in ("vllm", *BASELINES, "orbitflow")
    ]


def _figure_12a(size: Size) -> list[Point]:
    points = []
    for cv in CVS:
        for policy in STRONGEST:
            cell = _cell(policy, size)
            workload = replace(cell.workload, arrivals=Arrivals(cv=cv))
            points.append(Point(x=cv, cell=replace(cell, workload=workload)))
    return points


def _figure_12b(size: Size) -> list[Point]:
    """Return cells in which more and more requests share one pool, under one load."""
    points = []
    for batch_size in BATCH_SIZES:
        for policy in STRONGEST:
            cell = _cell(policy, size, load=STRESS_LOAD)
            wide = replace(deployment(), max_num_seqs=batch_size)
            points.append(Point(x=batch_size, cell=replace(cell, deployment=wide)))
    return points


def _figure_14a(size: Size) -> list[Point]:
    return [
        Point(x=scale, cell=_cell(policy, size, scale=scale))
        for scale in SCALES
        for policy in COMPONENTS
    ]


def _figure_14c(size: Size) -> list[Point]:
    """Return the victim rules on longer requests, so that somebody has to pause often."""
    points = []
    for rule in VICTIMS:
        cell = _cell("orbitflow", size, load=STRESS_LOAD, scale=1.0, lengths=STRESS_LENGTHS)
        points.append(
            Point(
                x=0.0,
                cell=replace(
                    cell,
                    parameters=PolicyParameters(victim_rule=rule),
                    label=f"pause the {rule.value}",
                ),
            )
        )
    return points


def _cell(
    policy: str,
    size: Size,
    *,
    load: float = LOAD,
    scale: float = SCALE,
    lengths: str = LENGTHS,
) -> Cell:
    drawn = published_lengths(lengths)
    given = deployment()
    base_s = given.base_tbt_s()
    return Cell(
        deployment=given,
        workload=Workload(lengths=drawn, num_requests=size.num_requests),
        policy=policy,
        rate_per_s=load / (drawn[1].mean * base_s),
        slo_tbt_s=scale * base_s,
        slo_scale=scale,
    )


def recorded(path: Path, size: Size) -> list[Point]:
    """Return the cells of one recorded trace, with the pool and the batch that it names.

    Raises KeyError or ValueError if the file is no trace of OrbitFlow's.
    """
    header: Mapping[str, int] = json.loads(path.read_text())
    given = replace(
        deployment(),
        max_num_seqs=header["batch_size"],
        pool_tokens=header["num_gpu_blocks_override"] * BLOCK_SIZE,
        max_model_len=header["max_model_len"],
    )
    base_s = given.base_tbt_s()
    requests = read_orbitflow(path, step_s=base_s)[: size.num_requests]
    span_s = requests[-1].arrival_s or base_s
    cell = Cell(
        deployment=given,
        workload=Workload(trace=tuple(requests)),
        policy="",
        rate_per_s=(len(requests) - 1) / span_s,
        slo_tbt_s=SCALE * base_s,
        slo_scale=SCALE,
    )
    return [
        Point(x=0.0, cell=replace(cell, policy=policy))
        for policy in ("vllm", *BASELINES, "orbitflow")
    ]
