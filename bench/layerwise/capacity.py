"""What fits in one pool, with and without layer-wise KV, and what it costs in speed.

Both sides have the same bytes of pool. Longest context: one request; largest batch: requests of
512 prompt tokens that decode together. Link speeds from slow PCIe to memory, all in one run.
"""

import time
from dataclasses import replace
from typing import Any

from bench.layerwise._common import batch, report
from services.executor.kv.options import KVOptions
from services.placement.blocks import BlockGeometry, max_tokens_in
from tests.exact.harness import Arrival, EngineCase, StepRunner, make_prompt

NUM_LAYERS = 8
BLOCK_SIZE = 32
POOL_BLOCKS = 40  # of all layers: 1,280 tokens resident
LINKS_BYTES_PER_S = {"1 GB/s": 1e9, "4 GB/s": 4e9, "16 GB/s": 16e9, "memory": 0.0}
NUM_OUTPUT_TOKENS = 48
DEFINITIONS = {
    "longest_context_tokens": "prompt + output of the longest request that was answered",
    "largest_batch": "most requests (512 prompt tokens each) that ran in one step",
    "tokens_per_s": "output tokens of that run / its wall time",
}


def main() -> None:
    rows = [measure("stock vLLM", None)]
    for name, bytes_per_s in LINKS_BYTES_PER_S.items():
        options = KVOptions(h2d_bytes_per_s=bytes_per_s, d2h_bytes_per_s=bytes_per_s)
        rows.append(measure(name, options))
    report("layerwise_capacity", DEFINITIONS, rows)


def measure(name: str, kv: KVOptions | None) -> dict[str, Any]:
    resident_tokens = (POOL_BLOCKS - 1) * BLOCK_SIZE
    case = EngineCase(
        num_blocks=POOL_BLOCKS, block_size=BLOCK_SIZE, max_model_len=resident_tokens, kv=kv
    )
    if kv is not None:
        geometry = BlockGeometry(num_groups=NUM_LAYERS, block_size=BLOCK_SIZE)
        longest = max_tokens_in(geometry, num_blocks=POOL_BLOCKS * NUM_LAYERS - 1 - NUM_LAYERS)
        case = replace(case, num_blocks=POOL_BLOCKS * NUM_LAYERS, max_model_len=min(longest, 8_192))
    runner = StepRunner(case)
    try:
        return {
            "link": name,
            "longest_context_tokens": case.max_model_len,
            "longest_context_tokens_per_s": longest_context(runner, case.max_model_len),
            **largest_batch(runner),
        }
    finally:
        runner.close()


def longest_context(runner: StepRunner, num_tokens: int) -> float:
    """Answer one request of the greatest length; return its output tokens per second."""
    prompt = make_prompt(num_tokens - NUM_OUTPUT_TOKENS, seed=1)
    arrival = Arrival(request_id="long", prompt=prompt, num_output_tokens=NUM_OUTPUT_TOKENS)
    begin_s = time.perf_counter()
    outcome = runner.run([arrival], check=False)
    assert len(outcome.tokens["long"]) == NUM_OUTPUT_TOKENS
    return NUM_OUTPUT_TOKENS / (time.perf_counter() - begin_s)


def largest_batch(runner: StepRunner) -> dict[str, Any]:
    workload = batch(16, num_prompt_tokens=512, num_output_tokens=NUM_OUTPUT_TOKENS)
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
        "stall_s": outcome.sums.get("stall_s", 0.0),
        "h2d_bytes": outcome.sums.get("h2d_bytes", 0),
    }


if __name__ == "__main__":
    main()
