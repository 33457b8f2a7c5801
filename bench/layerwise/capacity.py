"""What fits in one pool, with and without layer-wise KV, and at which speed.

All engines have the same bytes of pool. Longest context: one request; largest batch: requests that
decode together. Link speeds from slow PCIe to memory. The engines stand side by side and take
turns.
"""

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

from bench.document import Benchmark, Row
from bench.layerwise._common import batch, median_of
from bench.layerwise._engines import engines
from lab.engine.step_runner import Arrival, EngineCase, StepRunner, make_prompt
from lab.models import MAX_MODEL_LEN, NUM_LAYERS
from services.executor.kv_options import KVOptions
from services.placement.blocks import BlockGeometry, max_tokens_in

BLOCK_SIZE = 32
POOL_BLOCKS = 32  # of all layers, one of them vLLM's own: 992 tokens resident
LINKS_BYTES_PER_S = {"1 GB/s": 1e9, "4 GB/s": 4e9, "16 GB/s": 16e9, "memory": 0.0}
STOCK = "stock"
NUM_OUTPUT_TOKENS = 48
NUM_BATCH_REQUESTS = 16
NUM_BATCH_PROMPT_TOKENS = 512
NUM_ROUNDS = 3
DEFINITIONS = {
    "longest context": "prompt and output tokens of the longest request that the engine takes; "
    f"it was answered with {NUM_OUTPUT_TOKENS} tokens",
    "token ms": "median time between its output tokens",
    "at stock's": "the same for a request of stock vLLM's longest context",
    "largest batch": f"most of {NUM_BATCH_REQUESTS} requests ({NUM_BATCH_PROMPT_TOKENS} prompt "
    f"tokens, {NUM_OUTPUT_TOKENS} output tokens each) that ran in one step",
    "tokens/s": "output tokens of those requests / wall time from the first arrival to the last "
    f"token, prefill included; median of {NUM_ROUNDS} rounds, and in brackets the median of the "
    "ratios to stock vLLM in the same round",
    "waited": "share of that wall time in which layers waited for copies",
}


def measure() -> list[Row]:
    cases = {STOCK: stock_case()} | {
        name: layerwise_case(speed) for name, speed in LINKS_BYTES_PER_S.items()
    }
    rounds: dict[str, list[Row]] = {name: [] for name in cases}
    with engines(cases) as started:
        for _ in range(NUM_ROUNDS):
            for name, engine in started.items():
                rounds[name].append(engine.measure(one_round))
    return [
        {
            "link": name,
            "longest_context_tokens": cases[name].max_model_len,
            "tokens_per_s_ratio": statistics.median(
                ours["tokens_per_s"] / stock["tokens_per_s"]
                for ours, stock in zip(rounds[name], rounds[STOCK], strict=True)
            ),
            **{key: median_of(rounds[name], key) for key in rounds[name][0]},
        }
        for name in cases
    ]


def stock_case() -> EngineCase:
    return EngineCase(num_blocks=POOL_BLOCKS, block_size=BLOCK_SIZE, max_model_len=_stock_length())


def _stock_length() -> int:
    return (POOL_BLOCKS - 1) * BLOCK_SIZE


def layerwise_case(bytes_per_s: float) -> EngineCase:
    geometry = BlockGeometry(num_groups=NUM_LAYERS, block_size=BLOCK_SIZE)
    num_blocks = POOL_BLOCKS * NUM_LAYERS
    # The token that a step makes room for may open a block in every group.
    longest = max_tokens_in(geometry, num_blocks=num_blocks - 1 - NUM_LAYERS)
    return EngineCase(
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        max_model_len=min(longest, MAX_MODEL_LEN),
        kv=KVOptions(h2d_bytes_per_s=bytes_per_s, d2h_bytes_per_s=bytes_per_s),
    )


def one_round(runner: StepRunner) -> Row:
    return {
        "token_s": between_tokens_s(runner, runner.case.max_model_len),
        "token_at_stock_length_s": between_tokens_s(runner, _stock_length()),
        **largest_batch(runner),
    }


def between_tokens_s(runner: StepRunner, num_tokens: int) -> float:
    """Answer one request of a length; return the median time of its steps but the first."""
    prompt = make_prompt(num_tokens - NUM_OUTPUT_TOKENS, seed=1)
    arrival = Arrival(request_id="long", prompt=prompt, num_output_tokens=NUM_OUTPUT_TOKENS)
    step: Callable[..., Any] = runner.engine.step
    ends: list[float] = []

    def timed() -> Any:
        outputs = step()
        if outputs:
            ends.append(time.perf_counter())
        return outputs

    runner.engine.step = timed
    try:
        outcome = runner.run([arrival], check=False)
    finally:
        del runner.engine.step
    assert len(outcome.tokens["long"]) == NUM_OUTPUT_TOKENS
    return statistics.median(b - a for a, b in itertools.pairwise(ends))


def largest_batch(runner: StepRunner) -> Row:
    workload = batch(
        NUM_BATCH_REQUESTS,
        num_prompt_tokens=NUM_BATCH_PROMPT_TOKENS,
        num_output_tokens=NUM_OUTPUT_TOKENS,
    )
    most = 0

    def hook(scheduler: Any, step: int) -> None:
        nonlocal most
        most = max(most, len(scheduler.running))

    begin_s = time.perf_counter()
    outcome = runner.run(workload, hook=hook, check=False)
    seconds = time.perf_counter() - begin_s
    return {
        "largest_batch": most,
        "tokens_per_s": sum(map(len, outcome.tokens.values())) / seconds,
        "num_preemptions": outcome.num_preemptions,
        "stall_frac": outcome.sums.get("stall_s", 0.0) / seconds,
        "h2d_bytes": outcome.sums.get("h2d_bytes", 0),
    }


def table(rows: Sequence[Row]) -> list[list[str]]:
    lines = [
        ["link", "longest context", "token ms", "at stock's", "largest batch", "tokens/s", "waited"]
    ]
    lines.extend(
        [
            row["link"],
            f"{row['longest_context_tokens']:,}",
            f"{row['token_s'] * 1e3:.1f}",
            f"{row['token_at_stock_length_s'] * 1e3:.1f}",
            f"{row['largest_batch']:.0f}",
            f"{row['tokens_per_s']:.0f} ({row['tokens_per_s_ratio']:.2f})",
            f"{row['stall_frac']:.0%}",
        ]
        for row in rows
    )
    return lines


BENCHMARK = Benchmark(
    name="capacity",
    title="Capacity of one pool",
    definitions=DEFINITIONS,
    measure=measure,
    table=table,
)
