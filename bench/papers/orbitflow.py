"""OrbitFlow's Fig. 8 to 14 and the shares of section 5.4 as cells of the simulator.

Its setting (section 5.1): Llama-3-8B on one RTX A5000 behind PCI Express 3.0, four requests at a
time, a pool of 611 blocks of 16 tokens as in the artefact's trace at 2x. Fig. 10 is Llama-3-70B on
four A6000: its weights do not fit two in 16 bits. Fig. 11 is the 8B model on two and four A6000
whose all-reduces take the link of the copies. Fig. 14b's pairs are the columns TBT and TBT+D of
Fig. 8. Fig. 2, 7 and 15 are in `orbitflow_stated.py`. Rates are given as in the artefact, by
offered concurrency: at 1x as many output tokens arrive as one request alone would decode at the
base SLO.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

from bench.e2e.systems import BASELINES, ORBITFLOW, ORBITFLOW_ALPHA
from bench.papers.cells import Found, Point, Size, under, with_seeds
from bench.papers.sections import (
    NO_AXIS,
    Column,
    Counting,
    Drawn,
    Shows,
    as_ms,
    as_number,
    as_percent,
)
from services.placement.types import PolicyParameters, VictimRule
from simulator.comparison.grid import Arrivals, Cell, Workload
from simulator.deployment import Deployment
from simulator.device.hardware import assumptions, device, link_rates, model
from simulator.traces import read_orbitflow
from simulator.workload import Lengths, published_lengths

BLOCK_SIZE = 16
POOL_BLOCKS = 611  # per layer
POOL_TOKENS = POOL_BLOCKS * BLOCK_SIZE
LARGE_GROUP = 5  # layers of the 70B model that move together
BATCH_SIZE = 4
SCALES = (1.0, 1.5, 2.5)
SCALE = 1.5  # of everything but Fig. 8 and 14
LOADS = (1.0, 3.0, 5.0)
QUICK_LOADS = (3.0, 5.0)
LOAD = 3.0  # of Fig. 9, 12a and 14a: the pool is felt here, which at the paper's 2x it hardly is
STRESS_LOAD = 5.0  # of Fig. 12b and 14c
LENGTHS = "orbitflow-b"
STRESS_LENGTHS = "orbitflow-c"  # of Fig. 14c
CONTEXTS = (8_192, 32_768, 131_072)  # of Fig. 10: LENGTHS are of 32,768
DEGREES = (2, 4)  # tensor parallel, of Fig. 11
DEGREE_SCALES = (1.0, 1.5, 2.5)
DEGREE_SYSTEMS = ("flexgen-plus", "slo-aware", "dynamic-heuristic", "orbitflow")
CVS = (1.0, 3.0, 6.0)
BATCH_SIZES = (2, 4, 8)
STRONGEST = ("flexgen-plus", "dynamic-heuristic", "orbitflow")  # Fig. 12
INTRO = (
    "OrbitFlow (PVLDB 19(5), 2026), simulated: Llama-3-8B on one RTX A5000 behind PCI Express 3.0, "
    "four requests at a time, a pool of 9,776 tokens. Load 1 offers as many output tokens as one "
    "request alone decodes at the base SLO; lengths are drawn by the statistics of the artefact's "
    "traces. Absolute times are those of the assumptions in docs/simulator.md."
)
QUICK = Size(num_requests=16, num_seeds=1, quick=True)
FULL = Size(num_requests=60, num_seeds=3)
AS_PRINTED = PolicyParameters(alpha=ORBITFLOW_ALPHA)
VICTIMS = (VictimRule.LONGEST, VictimRule.SHORTEST, VictimRule.RANDOM)  # Fig. 14c


Setup: TypeAlias = tuple[Deployment, tuple[Lengths, Lengths]]

# Ours: as generated and behind Token-Deposit; "artefact": as OrbitFlow's scripts count.
ATTAINMENT: Sequence[Column] = (
    ("tbt", "TBT %", as_percent),
    ("tbt_deposit", "TBT+D %", as_percent),
    ("step_tbt", "artefact TBT %", as_percent),
    ("step_tbt_deposit", "artefact TBT+D %", as_percent),
    ("tpot", "TPOT %", as_percent),
    ("tpot_deposit", "TPOT+D %", as_percent),
    ("step_tpot", "artefact TPOT %", as_percent),
)
LATENCY: Sequence[Column] = (
    ("p95_s", "P95 TBT ms", as_ms),
    ("e2e_s", "E2E s", as_number),
)
FIGURE_9: Sequence[Column] = (
    ("p99_s", "P99 TBT ms", as_ms),
    ("tpot_p99_s", "P99 TPOT ms", as_ms),
    ("requests_per_min", "requests/min", as_number),
    ("tokens_per_s", "tokens/s", as_number),
    ("pool", "pool %", as_percent),
    ("ttft_s", "TTFT s", as_number),
)
FIGURE_13: Sequence[Column] = (
    ("ttft_s", "TTFT s", as_number),
    ("ttft_p95_s", "P95 TTFT s", as_number),
    ("tpot_p95_s", "P95 TPOT ms", as_ms),
    ("tpot_deposit", "TPOT+D %", as_percent),
    ("step_tpot", "artefact TPOT %", as_percent),
    ("tokens_per_s", "tokens/s", as_number),
)
SHARES: Sequence[Column] = (
    ("prefill", "steps with a prompt %", as_percent),
    ("stall", "waiting for copies %", as_percent),
    ("plans_per_request", "plans / request", as_number),
)
PAUSES: Sequence[Column] = (
    ("pauses", "pauses", as_number),
    ("preemptions", "preemptions", as_number),
)


def deployment() -> Deployment:
    """Return OrbitFlow's default setting."""
    return Deployment(
        model=model("llama-3-8b"),
        device=device("a5000"),
        assumptions=assumptions(),
        pool_tokens=POOL_TOKENS,
        max_num_seqs=BATCH_SIZE,
    ).with_link(link_rates()["pcie3x16"])


def figures(size: Size) -> dict[str, list[Point]]:
    """Return the cells of every figure on generated requests."""
    made = {
        "8": _figure_8(size),
        "10": _figure_10(size),
        "11": _figure_11(size),
        "12a": _figure_12a(size),
        "12b": _figure_12b(size),
        "13": _figure_13(size),
        "14a": _figure_14a(size),
        "14c": _figure_14c(size),
    }
    return {name: with_seeds(points, size) for name, points in made.items()}


def _figure_8(size: Size) -> list[Point]:
    return [
        Point(x=load, cell=_cell(policy, size, load=load, scale=scale))
        for scale in SCALES
        for load in (QUICK_LOADS if size.quick else LOADS)
        for policy in ("vllm", *BASELINES, "orbitflow")
    ]


def _figure_10(size: Size) -> list[Point]:
    """Return cells of 70B whose contexts are up to so long, four of which share one pool."""
    on = replace(
        deployment(),
        model=model("llama-3-70b"),
        device=device("a6000"),
        num_devices=4,
        layers_per_group=LARGE_GROUP,
        pool_tokens=None,
    )
    points = []
    for context in CONTEXTS[:1] if size.quick else CONTEXTS:
        factor = context / 32_768
        prompt, answer = published_lengths(LENGTHS)
        lengths = (_stretched(prompt, factor), _stretched(answer, factor))
        given = replace(on, max_model_len=context, pool_tokens=int(factor * POOL_TOKENS))
        points += [
            Point(x=context, cell=_cell(policy, size, scale=2.5, setup=(given, lengths)))
            for policy in STRONGEST
        ]
    return points


def _stretched(lengths: Lengths, factor: float) -> Lengths:
    return replace(
        lengths,
        mean=factor * lengths.mean,
        median=lengths.median and factor * lengths.median,
        largest=int(factor * lengths.largest),
    )


def _figure_11(size: Size) -> list[Point]:
    """Return cells on GPUs without NVLink that share one request's KV, at a pool of one size."""
    points = []
    for scale in (SCALE,) if size.quick else DEGREE_SCALES:
        for degree in DEGREES:
            on = replace(deployment(), device=device("a6000"), num_devices=degree)
            setup = on, published_lengths(LENGTHS)
            points += [
                Point(x=degree, cell=_cell(policy, size, scale=scale, setup=setup))
                for policy in DEGREE_SYSTEMS
            ]
    return points


def _figure_13(size: Size) -> list[Point]:
    """Return cells that order the queue by what is left of answers, beside the order of arrival."""
    shortest = replace(_cell("orbitflow-srtf", size), label="orbitflow, srtf")
    return [Point(x=0.0, cell=_cell("orbitflow", size)), Point(x=0.0, cell=shortest)]


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
        for policy in ORBITFLOW
    ]


def _figure_14c(size: Size) -> list[Point]:
    """Return the victim rules on longer requests, so that some have to pause often."""
    points = []
    for rule in VICTIMS:
        stress = deployment(), published_lengths(STRESS_LENGTHS)
        cell = _cell("orbitflow", size, load=STRESS_LOAD, scale=1.0, setup=stress)
        points.append(
            Point(
                x=0.0,
                cell=replace(
                    cell,
                    parameters=replace(AS_PRINTED, victim_rule=rule),
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
    setup: Setup | None = None,
) -> Cell:
    given, (prompt, answer) = setup or (deployment(), published_lengths(LENGTHS))
    base_s = given.base_tbt_s()
    cell = Cell(
        deployment=given,
        workload=Workload(lengths=(prompt, answer), num_requests=size.num_requests),
        policy="",
        parameters=AS_PRINTED,
        rate_per_s=load / (answer.mean * base_s),
        slo_tbt_s=scale * base_s,
        slo_scale=scale,
    )
    return under(policy, cell)


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
        parameters=AS_PRINTED,
        rate_per_s=(len(requests) - 1) / span_s,
        slo_tbt_s=SCALE * base_s,
        slo_scale=SCALE,
    )
    return [Point(x=0.0, cell=under(policy, cell)) for policy in ("vllm", *BASELINES, "orbitflow")]


COUNTING = Counting(
    theirs=frozenset({"step_tbt", "step_tbt_deposit", "step_tpot"}),
    alike=frozenset(
        {"requests_per_min", "tokens_per_s", "pool", "ttft_s", "ttft_p95_s", "plans_per_request"}
    )
    | {"pauses", "preemptions"},
)
DRAWN = (
    Drawn(figure="tbt_deposit", title="TBT + deposit"),
    Drawn(figure="tbt", title="TBT"),
    Drawn(figure="step_tbt_deposit", title="Artefact's TBT + deposit"),
)


def shows(found: Found) -> list[Shows]:
    """Return the tables of all figures that there are cells of."""
    nine = [
        (point, result)
        for point, result in found["8"]
        if point.x == LOAD and point.cell.slo_scale == SCALE
    ]
    both = (*ATTAINMENT, *LATENCY)
    tables = [
        ("Fig. 8: SLO attainment, P95 and E2E", "load", both, found["8"]),
        ("Fig. 9: tails, throughput, memory", "load", FIGURE_9, nine),
        ("Fig. 10: Llama-3-70B, contexts", "context", ATTAINMENT, found["10"]),
        ("Fig. 11: tensor parallel", "GPUs", ATTAINMENT, found["11"]),
        ("Fig. 12a: bursts", "CV", ATTAINMENT, found["12a"]),
        ("Fig. 12b: batch size", "batch size", ATTAINMENT, found["12b"]),
        ("Fig. 13: shortest remaining first", NO_AXIS, FIGURE_13, found["13"]),
        ("Fig. 14a: components", "SLO scale", ATTAINMENT, found["14a"]),
        ("Fig. 14c: whom to pause", NO_AXIS, (*ATTAINMENT, *PAUSES), found["14c"]),
        ("Section 5.4: shares of the engine's time", NO_AXIS, SHARES, nine),
        *(
            (f"Recorded: {name}", NO_AXIS, (*both, *FIGURE_9), points)
            for name, points in found.items()
            if name.endswith(".json")
        ),
    ]
    return [
        Shows(
            title=title,
            x_label=x_label,
            columns=columns,
            counting=COUNTING,
            points=points,
            drawn=DRAWN if x_label != NO_AXIS else (),
        )
        for title, x_label, columns, points in tables
    ]
