"""eLLM's Fig. 10 to 12 and 14 as cells of the simulator.

Its setting (section 6.1): NVIDIA A100 without NVLink; Llama-2-13B on one, Llama-2-70B on four;
answers and prompts of the published mean lengths. The published loads are 10 to 50 times what the
GPUs decode, so that loads are given as a share of it here: at 1 as many answers are asked for as
the best batch of Eq. 5 generates. L-Eval's prompts do not fit Llama 2's context, and one request
fits the memory of 13B's GPU: 70B only.
"""

from collections.abc import Sequence
from dataclasses import replace

from bench.papers.cells import Found, Point, Size, under, with_seeds
from bench.papers.ellm_equations import Consistent, Setting, chosen, largest_batch, settings
from bench.papers.sections import Column, Counting, Drawn, Shows, as_ms, as_number, as_percent
from services.placement.run.papers.ellm import EllmRules
from simulator.comparison.grid import Cell, Workload
from simulator.workload import constant_length

INTRO = (
    "eLLM (EuroSys '26), simulated on A100s without NVLink. ellm chooses batch and ratio by the "
    "consistent form of its Eq. 5; r = ... is a ratio that is given. All but vllm and evenflow let "
    "nobody in who breaks the TPOT SLO. Load 1 asks for as many tokens as the best batch decodes."
)
QUICK = Size(num_requests=120, num_seeds=1, quick=True)
FULL = Size(num_requests=200, num_seeds=3)
SYSTEMS = ("vllm", "vllm-recompute", "vllm-swap", "hcache", "ellm", "evenflow")
RATIOS = (0.02, 0.05)
LOADS = (0.5, 0.8, 1.2, 2.0)
QUICK_LOADS = (2.0,)
CROWDED_LOADS = (1.2, 2.0)  # of 70B on ShareGPT: below 1 its pool of 511 requests is never full
NUM_GROUPS = 8
FULL_POOLS = 2  # a figure has so many times the requests that its pool holds, at least
COLUMNS: tuple[Column, ...] = (
    ("tokens_per_s", "tokens/s", as_number),
    ("ttft_s", "TTFT s", as_number),
    ("ttft_p95_s", "P95 TTFT s", as_number),
    ("tpot", "TPOT %", as_percent),
    ("tbt_deposit", "TBT+D %", as_percent),
    ("rebuffering", "rebuffering %", as_percent),
    ("tpot_p95_s", "P95 TPOT ms", as_ms),
    ("recomputed", "recomputed per step", as_number),
    ("preemptions", "preemptions", as_number),
    ("pool", "pool %", as_percent),
)
COUNTING = Counting(
    alike=frozenset(
        {"tokens_per_s", "ttft_s", "ttft_p95_s", "tpot", "tpot_p95_s", "recomputed", "preemptions"}
    ),
)
DRAWN = (
    Drawn(figure="tokens_per_s", title="Throughput", unit="tokens/s"),
    Drawn(figure="ttft_s", title="TTFT", unit="s"),
)
FIGURES = {
    "13B, ShareGPT": "Fig. 10: Llama-2-13B, ShareGPT",
    "70B, ShareGPT": "Fig. 10 and 11: Llama-2-70B, ShareGPT",
    "70B, L-Eval": "Fig. 12, 14 and 15: Llama-2-70B, L-Eval",
}


def figures(size: Size) -> dict[str, list[Point]]:
    """Return the cells of every figure."""
    names = list(FIGURES)[:1] if size.quick else list(FIGURES)
    given = settings()
    made = {
        name: [
            Point(x=load, cell=cell)
            for load in _loads(name, size)
            for cell in _cells(given[name], load, size, with_ratios=name == names[0])
        ]
        for name in names
    }
    return {name: with_seeds(points, size) for name, points in made.items()}


def _loads(name: str, size: Size) -> Sequence[float]:
    if size.quick:
        return QUICK_LOADS
    return CROWDED_LOADS if name == "70B, ShareGPT" else LOADS


def _cells(setting: Setting, load: float, size: Size, *, with_ratios: bool) -> list[Cell]:
    best = chosen(setting, Consistent(setting=setting))
    assert best is not None
    num_full = FULL_POOLS * largest_batch(setting, Consistent(setting=setting), 0.0)
    layers = setting.deployment.model.num_hidden_layers
    cell = Cell(
        deployment=replace(setting.deployment, layers_per_group=layers // NUM_GROUPS),
        workload=Workload(
            lengths=(constant_length(setting.prompt), constant_length(setting.answer)),
            num_requests=size.num_requests if size.quick else max(size.num_requests, num_full),
        ),
        policy="",
        rate_per_s=load * best.tokens_per_s / setting.answer,
        slo_tbt_s=setting.slo_s,
    )
    cells = [under(policy, cell) for policy in SYSTEMS]
    ratios = (*RATIOS, setting.paper_frac) if with_ratios else ()
    return cells + [
        replace(cell, policy="ellm", ellm=EllmRules(uncached_frac=r), label=f"ellm, r = {r:g}")
        for r in ratios
    ]


def shows(found: Found) -> list[Shows]:
    """Return the tables."""
    return [
        Shows(
            title=FIGURES[name],
            x_label="load",
            columns=COLUMNS,
            counting=COUNTING,
            points=points,
            drawn=DRAWN,
        )
        for name, points in found.items()
    ]
