"""What layer-wise block tables cost while nothing is offloaded, against stock vLLM.

CPU time per decode step outside the model's layers, which are the same on both sides. Engines of
one depth stand side by side and take turns, so that the machine's moods reach all of them. Weights
are not loaded: time does not depend on them.
"""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from bench.document import Benchmark, Row
from bench.layerwise._common import batch, decode_times, median_of
from bench.layerwise._engines import EngineProcess, engines
from lab.engine.step_runner import EngineCase, StepRunner
from services.executor.kv_options import KVOptions

LAYERS = (8, 32)
BATCHES = (1, 8, 32)
LAYERS_PER_GROUP = (1, 4, 8)
NUM_ROUNDS = 5
NUM_PROMPT_TOKENS = 200
NUM_OUTPUT_TOKENS = 60
STEP_S = 10e-3  # what the bar is a share of
MAX_GROUPS_OF_BAR, BAR_FRAC, AIM_FRAC = 8, 0.05, 0.10
STOCK = "stock"
DEFINITIONS = {
    "CPU": "CPU time per decode step outside the model's layers, hooks between layers included: "
    "of the engine's thread (scheduling, input preparation, metadata, sampling, output), and in "
    "brackets of the whole process, copying threads included; median of the steps of a round, "
    f"median of {NUM_ROUNDS} rounds",
    "cost": "the engine thread's CPU time less stock vLLM's in the same round, median of the "
    f"rounds and in brackets their extremes, as a share of a {STEP_S * 1e3:.0f} ms step; bar "
    f"{BAR_FRAC:.0%} up to {MAX_GROUPS_OF_BAR} groups, aim {AIM_FRAC:.0%} above",
}


def measure() -> list[Row]:
    return [row for num_layers in LAYERS for row in _measure_depth(num_layers)]


def _measure_depth(num_layers: int) -> list[Row]:
    cases = {STOCK: _case(num_layers, None)} | {
        # Stock vLLM caches no prefixes here either.
        f"{layers}": _case(num_layers, KVOptions(layers_per_group=layers, prefix_caching=False))
        for layers in LAYERS_PER_GROUP
    }
    samples: dict[tuple[str, int], list[Row]] = {}
    with engines(cases) as started:
        for _ in range(NUM_ROUNDS):
            for num_requests in BATCHES:
                for name, engine in started.items():
                    times = _round(engine, num_requests)
                    samples.setdefault((name, num_requests), []).append(times)
    return [
        _row(num_layers, layers, num_requests, samples)
        for layers in LAYERS_PER_GROUP
        for num_requests in BATCHES
    ]


def _round(engine: EngineProcess, num_requests: int) -> Row:
    times: Row = engine.measure(decode_batch, num_requests)
    return times


def decode_batch(runner: StepRunner, num_requests: int) -> Row:
    workload = batch(
        num_requests, num_prompt_tokens=NUM_PROMPT_TOKENS, num_output_tokens=NUM_OUTPUT_TOKENS
    )
    return asdict(decode_times(runner, workload))


def _row(
    num_layers: int, layers: int, num_requests: int, samples: dict[tuple[str, int], list[Row]]
) -> Row:
    ours, stock = samples[f"{layers}", num_requests], samples[STOCK, num_requests]
    costs = sorted(
        (a["thread_cpu_s"] - b["thread_cpu_s"]) / STEP_S for a, b in zip(ours, stock, strict=True)
    )
    row: dict[str, Any] = {
        "num_layers": num_layers,
        "layers_per_group": layers,
        "num_groups": num_layers // layers,
        "batch": num_requests,
        "cost_frac": costs[len(costs) // 2],
        "cost_frac_least": costs[0],
        "cost_frac_most": costs[-1],
    }
    for name in ("thread_cpu_s", "process_cpu_s", "wall_s"):
        row[name], row[f"stock_{name}"] = median_of(ours, name), median_of(stock, name)
    return row


def _case(num_layers: int, kv: KVOptions | None) -> EngineCase:
    return EngineCase(
        num_blocks=1_000 * (num_layers // kv.layers_per_group if kv else 1),
        kv=kv,
        max_num_seqs=max(BATCHES),
        max_num_batched_tokens=8_192,
        num_layers=num_layers,
    )


def table(rows: Sequence[Row]) -> list[list[str]]:
    lines = [["layers", "groups", "batch", "stock CPU ms", "CPU ms", "cost"]]
    for row in rows:
        stock = f"{row['stock_thread_cpu_s'] * 1e3:.2f} ({row['stock_process_cpu_s'] * 1e3:.2f})"
        ours = f"{row['thread_cpu_s'] * 1e3:.2f} ({row['process_cpu_s'] * 1e3:.2f})"
        cost = (
            f"{row['cost_frac']:.1%} ({row['cost_frac_least']:.1%} to {row['cost_frac_most']:.1%})"
        )
        numbers = (row["num_layers"], row["num_groups"], row["batch"])
        lines.append([*map(str, numbers), stock, ours, cost])
    return lines


BENCHMARK = Benchmark(
    name="overhead",
    title="Cost while nothing is offloaded",
    definitions=DEFINITIONS,
    measure=measure,
    table=table,
)
