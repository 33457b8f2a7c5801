"""LayerKV's Fig. 1 and 4 to 8 as cells of the simulator.

Its setting (section 5.1): NVIDIA L20 with 48 GB; Llama-2-7B on one, Yi-34B-200K on two, Llama-3-70B
in place of 3.1 (the same shape) on four; answers of 512 tokens at one request per second for fixed
prompts, ShareGPT's lengths for varied rates; TTFT SLO 3 s, TPOT SLO 200 ms. There, two GPUs share
one PCI Express link; here each has its own.
"""

from dataclasses import replace

from bench.papers.cells import Found, Point, Size, under, with_seeds
from bench.papers.sections import Column, Counting, Drawn, Shows, as_ms, as_number, as_percent
from simulator.comparison.grid import Cell, Workload
from simulator.deployment import Deployment
from simulator.device.hardware import assumptions, device, model
from simulator.workload import constant_length, published_lengths

INTRO = (
    "LayerKV (arXiv 2410.00428), simulated on NVIDIA L20. layerkv is the paper's text: offloaded "
    "layers are copied back in every decode step. layerkv-park lets layers leave for prompts only, "
    "and decodes when all has room. Both with Algorithm 1, and without. evenflow is this project's "
    "own policy."
)
QUICK = Size(num_requests=30, num_seeds=1, quick=True)
FULL = Size(num_requests=100, num_seeds=3)
SEATS = 256
NUM_GROUPS = 8
ANSWER = 512
TTFT_S, TPOT_S = 3.0, 0.2
CONTEXTS = (128, 512, 1_024, 2_048, 4_096, 8_192, 16_000)
QUICK_CONTEXTS = (1_024, 4_096)
MODELS = {"llama-2-7b": 1, "yi-34b": 2, "llama-3-70b": 4}  # tensor parallel
DEGREES = (2, 4, 8)  # of Fig. 5
DEGREE_CONTEXT = 8_192
RATES = (4.0, 5.0, 5.5, 6.0, 7.0, 9.0)  # per second, of Fig. 6 to 8
QUICK_RATES = (7.0, 9.0)
LARGEST = 2_300  # tokens of a ShareGPT prompt or answer, section 5.1
SHAREGPT_TIMES = 8  # as many requests as with fixed contexts
SYSTEMS = ("vllm", "layerkv", "layerkv-park", "evenflow")
COLUMNS: tuple[Column, ...] = (
    ("ttft_s", "TTFT s", as_number),
    ("ttft_p99_s", "P99 TTFT s", as_number),
    ("p50_s", "P50 TBT ms", as_ms),
    ("tpot_p95_s", "P95 TPOT ms", as_ms),
    ("tokens_per_s", "tokens/s", as_number),
    ("violations", "violations %", as_percent),
    ("rebuffering", "rebuffering %", as_percent),
    ("stall", "stall %", as_percent),
    ("rejected", "refused", as_number),
)
COUNTING = Counting(
    theirs=frozenset({"violations"}),
    alike=frozenset({"ttft_s", "ttft_p99_s", "tpot_p95_s", "tokens_per_s", "rejected"}),
)
DRAWN = (
    Drawn(figure="ttft_s", title="TTFT", unit="s"),
    Drawn(figure="tokens_per_s", title="Throughput", unit="tokens/s"),
    Drawn(figure="violations", title="SLO violations"),
)


def deployment(name: str, num_devices: int) -> Deployment:
    """Return a model on so many L20."""
    shape = model(name)
    return Deployment(
        model=shape,
        device=device("l20"),
        assumptions=assumptions(),
        num_devices=num_devices,
        layers_per_group=-(-shape.num_hidden_layers // NUM_GROUPS),
        max_num_seqs=SEATS,
        host_memory_bytes=2_048_000_000_000,
    )


def figures(size: Size) -> dict[str, list[Point]]:
    """Return the cells of every figure."""
    contexts = QUICK_CONTEXTS if size.quick else CONTEXTS
    made = {
        f"4 {name}": [
            Point(x=context, cell=_fixed(deployment(name, degree), context, policy, size))
            for context in contexts
            for policy in SYSTEMS
        ]
        for name, degree in MODELS.items()
        if name == "llama-2-7b" or not size.quick
    }
    if not size.quick:
        made["5"] = [
            Point(
                x=degree,
                cell=_fixed(deployment("yi-34b", degree), DEGREE_CONTEXT, policy, size),
            )
            for degree in DEGREES
            for policy in SYSTEMS
        ]
    made["6"] = [
        Point(x=rate, cell=cell)
        for rate in (QUICK_RATES if size.quick else RATES)
        for cell in _sharegpt(rate, size)
    ]
    return {name: with_seeds(points, size) for name, points in made.items()}


def _fixed(on: Deployment, context: int, policy: str, size: Size) -> Cell:
    workload = Workload(
        lengths=(constant_length(context), constant_length(ANSWER)), num_requests=size.num_requests
    )
    return _cell(on, workload, policy, rate_per_s=1.0)


def _sharegpt(rate_per_s: float, size: Size) -> list[Cell]:
    prompt, answer = (replace(one, largest=LARGEST) for one in published_lengths("sharegpt"))
    workload = Workload(
        lengths=(replace(prompt, smallest=4), replace(answer, smallest=4)),
        num_requests=SHAREGPT_TIMES * size.num_requests,
    )
    on = deployment("llama-2-7b", 1)
    cells = [_cell(on, workload, policy, rate_per_s=rate_per_s) for policy in SYSTEMS]
    return cells + [
        replace(
            _cell(on, workload, f"{policy}-fcfs", rate_per_s=rate_per_s),
            label=f"{policy} without Alg. 1",
        )
        for policy in ("layerkv", "layerkv-park")
    ]


def _cell(on: Deployment, workload: Workload, policy: str, *, rate_per_s: float) -> Cell:
    cell = Cell(
        deployment=on,
        workload=workload,
        policy="",
        rate_per_s=rate_per_s,
        slo_tbt_s=TPOT_S,
        slo_ttft_s=TTFT_S,
    )
    return under(policy, cell)


def shows(found: Found) -> list[Shows]:
    """Return the tables. Fig. 1 is vllm's rows of Fig. 4; Fig. 7 and 8 are columns of Fig. 6."""
    titles = {name: f"Fig. 1 and 4: {name.removeprefix('4 ')}, prompt" for name in found}
    titles |= {"5": "Fig. 5: yi-34b on more GPUs", "6": "Fig. 6 to 8: ShareGPT"}
    axes = {"5": "GPUs", "6": "requests/s"}
    return [
        Shows(
            title=titles[name],
            x_label=axes.get(name, "prompt"),
            columns=COLUMNS,
            counting=COUNTING,
            points=points,
            drawn=DRAWN,
        )
        for name, points in found.items()
    ]
