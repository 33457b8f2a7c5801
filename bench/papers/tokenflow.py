"""TokenFlow's Table 1 with Fig. 12 to 20, 22 and 23 as cells of the simulator.

Its controlled workloads (section 7.3): Llama-3-8B on an RTX 4090, and on an H200 of whose memory
30 % are weights and KV; prompts of 512 or 1,024 tokens, answers of 2,048 (4,096 on the H200),
normally distributed; all at once, or Poisson. Readers read 20 tokens/s. KV moves in whole requests,
so that all layers are one group here. The paper does not state the spread of lengths (25 % here),
nor how much room SGLang reserves (0.3 of each answer's limit here).

Fig. 12 to 15 are of recorded traces of which neither lengths nor rates are given, and of a model
that does not exist (Qwen2.5-8B; Qwen2-7B here). Here they are bursts (gamma, CV 3) of prompts of
512 and answers of 2,048 tokens, at a rate a little above what a full pool decodes.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from bench.papers.cells import Found, Point, Simulated, Size, under, with_seeds
from bench.papers.sections import NO_AXIS, Column, Counting, Drawn, Shows, as_number, as_percent
from services.placement.run.papers.tokenflow import TokenflowRules
from simulator.comparison.grid import Arrivals, Cell, Workload
from simulator.deployment import Deployment
from simulator.device.hardware import assumptions, device, model
from simulator.report.charts import Chart, Line
from simulator.workload import Lengths

INTRO = (
    "TokenFlow (EuroSys '26), simulated: Llama-3-8B on an RTX 4090 behind PCI Express 4.0, and on "
    "an H200 of whose memory 30 % are weights and KV. Readers read 20 tokens/s where nothing else "
    "is said. evenflow is this project's own policy, vllm admits whoever's prompt fits."
)
QUICK = Size(num_requests=60, num_seeds=1, quick=True)
FULL = Size(num_requests=120, num_seeds=3)
SPREAD = 0.25  # standard deviation / mean of lengths
SEATS = 512
H200_FRAC = 0.3  # of the memory
SYSTEMS = ("sglang", "fcfs-chunked", "andes", "vllm", "tokenflow", "evenflow")
MAIN = ("sglang", "tokenflow", "evenflow")
RATE_TPS = 20.0
RATES_TPS = (20.0, 25.0, 30.0)  # of Fig. 20
MIXED_TPS = (15.0, 20.0, 15.0, 20.0, 20.0)  # of Fig. 19, in turn
NUM_TIMELINES = 6  # of Fig. 18 and 19
INTERVALS_S = (0.5, 1.0, 1.5)  # of Fig. 22
MUS = (1.0, 2.0, 20.0)  # of Fig. 23
COLUMNS: tuple[Column, ...] = (
    ("effective_tokens_per_s", "effective tokens/s", as_number),
    ("tokens_per_s", "tokens/s", as_number),
    ("qos", "QoS", as_number),
    ("ttft_s", "TTFT s", as_number),
    ("ttft_p99_s", "P99 TTFT s", as_number),
    ("rebuffering", "rebuffering %", as_percent),
    ("tbt_deposit", "TBT+D %", as_percent),
    ("tpot_deposit", "TPOT+D %", as_percent),
    ("preemptions", "preemptions", as_number),
)
BY_RATE: tuple[Column, ...] = tuple(
    (f"{name} at {rate:g}/s", f"{heading} at {rate:g}/s", as_percent)
    for rate in sorted(set(MIXED_TPS))
    for name, heading in (
        ("tbt_deposit", "TBT+D %"),
        ("tpot_deposit", "TPOT+D %"),
        ("rebuffering", "rebuffering %"),
    )
)
COUNTING = Counting(
    theirs=frozenset({"effective_tokens_per_s", "qos"}),
    alike=frozenset({"tokens_per_s", "ttft_s", "ttft_p99_s", "preemptions"}),
)
DRAWN = (
    Drawn(figure="effective_tokens_per_s", title="Effective throughput", unit="tokens/s"),
    Drawn(figure="ttft_s", title="TTFT", unit="s"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """One cell of Table 1. Either a burst of so many at once, or Poisson arrivals per second."""

    gpu: str
    prompt: int
    answer: int
    burst: int = 0
    rate_per_s: float = 0.0
    cv: float = 1.0  # of the gaps; 1: Poisson
    model: str = "llama-3-8b"
    times: int = 1  # as many requests as `Size` says

    @property
    def title(self) -> str:
        process = "Poisson" if self.cv == 1.0 else f"gamma with CV {self.cv:g},"
        how = f"burst of {self.burst}" if self.burst else f"{process} {self.rate_per_s:g}/s"
        return f"{self.model}, {self.gpu}, {how}, {self.prompt} + {self.answer}"


SETUPS = {
    "4090 (a)": Setup(gpu="rtx-4090", prompt=512, answer=2_048, burst=60),
    "4090 (b)": Setup(gpu="rtx-4090", prompt=1_024, answer=2_048, burst=80),
    "4090 (c)": Setup(gpu="rtx-4090", prompt=512, answer=2_048, rate_per_s=2.0),
    "4090 (d)": Setup(gpu="rtx-4090", prompt=512, answer=2_048, rate_per_s=4.0),
    "H200 (a)": Setup(gpu="h200", prompt=512, answer=4_096, burst=400),
    "H200 (b)": Setup(gpu="h200", prompt=1_024, answer=4_096, burst=200),
    "H200 (c)": Setup(gpu="h200", prompt=512, answer=4_096, rate_per_s=5.0),
    "H200 (d)": Setup(gpu="h200", prompt=512, answer=4_096, rate_per_s=10.0),
}
BURSTY = {
    "12": Setup(gpu="h200", prompt=512, answer=2_048, rate_per_s=8.0, cv=3.0, times=3),
    "13": Setup(
        gpu="a6000", prompt=512, answer=2_048, rate_per_s=3.5, cv=3.0, model="qwen2-7b", times=3
    ),
    "14": Setup(
        gpu="h200", prompt=512, answer=2_048, rate_per_s=3.5, cv=3.0, model="qwen2_5-32b", times=3
    ),
}
CONCURRENT = ("sglang", "andes", "tokenflow", "evenflow")  # of Fig. 14 and 15
SENSITIVE = SETUPS["4090 (b)"]  # of Table 2; the paper does not say it of Fig. 18 to 23


def deployment(gpu: str, name: str = "llama-3-8b") -> Deployment:
    """Return a model on one GPU, all layers in one group."""
    shape, on = model(name), device(gpu)
    given = Deployment(
        model=shape,
        device=on,
        assumptions=assumptions(),
        layers_per_group=shape.num_hidden_layers,
        max_num_seqs=SEATS,
    )
    if (gpu, name) != ("h200", "llama-3-8b"):
        return given
    kv_bytes = H200_FRAC * on.memory_bytes - 2 * shape.num_parameters
    token_bytes = shape.num_hidden_layers * shape.kv_bytes_per_token
    return replace(given, pool_tokens=int(kv_bytes / token_bytes))


def figures(size: Size) -> dict[str, list[Point]]:
    """Return the cells of every figure."""
    setups = {name: one for name, one in SETUPS.items() if one.gpu != "h200" or not size.quick}
    made = {
        name: [Point(x=0.0, cell=_cell(setup, size, policy)) for policy in SYSTEMS]
        for name, setup in setups.items()
    }
    if not size.quick:
        for name, setup in BURSTY.items():
            systems = CONCURRENT if name == "14" else SYSTEMS
            made[name] = [Point(x=0.0, cell=_cell(setup, size, policy)) for policy in systems]
    made["19"] = [
        Point(x=0.0, cell=replace(_drawn(policy, size), rates_tps=MIXED_TPS)) for policy in MAIN
    ]
    made["20"] = [
        Point(x=rate, cell=_cell(SENSITIVE, size, policy, rate_tps=rate))
        for rate in RATES_TPS
        for policy in MAIN
    ]
    made["22"] = [
        Point(x=interval_s, cell=_cell(SENSITIVE, size, "tokenflow", interval_s=interval_s))
        for interval_s in INTERVALS_S
    ]
    made["23"] = [Point(x=mu, cell=_cell(SENSITIVE, size, "tokenflow", mu=mu)) for mu in MUS]
    once = {"18": [Point(x=0.0, cell=_drawn(policy, size)) for policy in MAIN]}
    return {name: with_seeds(points, size) for name, points in made.items()} | once


def _drawn(policy: str, size: Size) -> Cell:
    """Return a cell that keeps when tokens of some requests came."""
    return replace(_cell(SENSITIVE, size, policy), num_timelines=NUM_TIMELINES)


def _cell(
    setup: Setup, size: Size, policy: str, *, rate_tps: float = RATE_TPS, **rules: float
) -> Cell:
    cell = Cell(
        deployment=deployment(setup.gpu, setup.model),
        workload=Workload(
            lengths=(_lengths(setup.prompt), _lengths(setup.answer)),
            num_requests=setup.burst or setup.times * size.num_requests,
            arrivals=Arrivals(burst=setup.burst, cv=setup.cv),
        ),
        policy="",
        rate_per_s=setup.rate_per_s or 1.0,
        slo_tbt_s=1.0 / rate_tps,
        tokenflow=TokenflowRules(**rules),
    )
    return under(policy, cell)


def _lengths(mean: int) -> Lengths:
    """Return a lognormal length of this mean and spread: nearly a normal one."""
    return Lengths(mean=mean, median=mean / math.sqrt(1.0 + SPREAD * SPREAD), smallest=8)


def shows(found: Found) -> list[Shows]:
    """Return the tables."""
    made = [
        _table(f"Table 1, {name}: {SETUPS[name].title}", found[name])
        for name in found
        if name in SETUPS
    ]
    titles = {"12": "Fig. 12", "13": "Fig. 13", "14": "Fig. 14 and 15"}
    made += [
        _table(
            f"{titles[name]}: {BURSTY[name].title}",
            found[name],
            charts=over_time(found[name]) if name == "14" else (),
        )
        for name in titles
        if name in found
    ]
    reading = f"Fig. 18: when tokens come, {SENSITIVE.title}"
    made.append(_table(reading, found["18"], charts=token_timelines(found["18"])))
    mixed = _table("Fig. 19: 40 % read 15 tokens/s, 60 % read 20", found["19"])
    drawn = token_timelines(found["19"])
    made.append(replace(mixed, columns=(*COLUMNS[:5], *BY_RATE), charts=drawn))
    axes = {
        "20": ("Fig. 20: reading rates", "tokens/s read"),
        "22": ("Fig. 22: interval between decisions", "interval s"),
        "23": ("Fig. 23: buffer conservativeness", "mu"),
    }
    return made + [
        replace(_table(title, found[name]), x_label=x_label, drawn=DRAWN)
        for name, (title, x_label) in axes.items()
    ]


def _table(title: str, points: Sequence[Simulated], *, charts: Sequence[Chart] = ()) -> Shows:
    return Shows(
        title=title,
        x_label=NO_AXIS,
        columns=COLUMNS,
        counting=COUNTING,
        points=points,
        charts=charts,
    )


Count: TypeAlias = Callable[[Sequence[float]], float]  # of a sample of `view_of`'s residency
OVER_TIME: Mapping[str, Count] = {
    "Queued requests": lambda sample: sample[6],
    "Running requests": lambda sample: sample[4] - sample[5],  # paused ones are not counted
}


def over_time(points: Sequence[Simulated]) -> list[Chart]:
    """Return how many requests wait and run, of the first seed of each policy."""
    first = [(point.cell.name, result) for point, result in points if not point.cell.seed]
    return [
        Chart(
            title=title,
            x_label="s",
            y_label="requests",
            lines=[
                Line(
                    name=name,
                    points=[(sample[0], count(sample)) for sample in result.view["residency"]],
                    colour=colour,
                    stepped=True,
                )
                for colour, (name, result) in enumerate(first)
            ],
        )
        for title, count in OVER_TIME.items()
    ]


def token_timelines(points: Sequence[Simulated]) -> list[Chart]:
    """Return one chart per policy: tokens of some requests as generated, and as read (dashed)."""
    return [
        Chart(
            title=point.cell.name,
            x_label="s",
            y_label="tokens",
            lines=[
                Line(
                    name=f"{given['request_id']}{suffix}",
                    points=list(zip(given[instants], given["token"], strict=True)),
                    colour=colour,
                    dashed=bool(suffix),
                )
                for colour, given in enumerate(result.view["timelines"])
                for instants, suffix in (("generated_s", ""), ("delivered_s", ", read"))
            ],
        )
        for point, result in points
        if not point.cell.seed
    ]
