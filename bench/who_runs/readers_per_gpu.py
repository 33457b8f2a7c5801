"""How many readers of one rate a GPU holds, as `evenflow size` finds it."""

import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import product

from bench.document import Row
from simulator.comparison.sizing import Readers, largest_held
from simulator.compose import run_policy
from simulator.deployment import Deployment
from simulator.description import full_link_ratio
from simulator.device.hardware import assumptions, device, model
from simulator.engine.planning import PlanningOptions
from simulator.engine.records import RunRecord
from simulator.workload import ArrivingRequest

MODEL = "llama-3-8b"
GPUS = ("a5000", "rtx-4090", "l4", "h100")
CONTEXTS = (8_192, 32_768)  # tokens of each prompt
POLICIES = ("vllm", "evenflow")
RATE_TPS = 20.0
MAX_READERS = 256
HOST_BYTES = 256 * 10**9
DEFINITIONS = {
    "held": "95 % of tokens in time, and 95 % of first tokens within 30 s; readers ask, read an "
    "answer of 1,024 tokens and ask again",
    "lambda": "bytes that the link moves in a decode step of all requests that the pool holds / "
    "bytes of those",
}


def measured() -> list[Row]:
    """Return a row for each GPU and length of prompts."""
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(row, *zip(*product(GPUS, CONTEXTS), strict=True)))


def row(gpu: str, num_prompt_tokens: int) -> Row:
    """Return how many readers a GPU holds under each policy."""
    readers = Readers(num_prompt_tokens=num_prompt_tokens, consumption_rate_tps=RATE_TPS)
    num_tokens = readers.num_prompt_tokens + readers.num_output_tokens
    deployment = Deployment(
        model=model(MODEL),
        device=device(gpu),
        assumptions=assumptions(),
        host_memory_bytes=HOST_BYTES,
        max_num_seqs=MAX_READERS,
        max_model_len=num_tokens,
    )

    def held(policy: str) -> int:
        def run(requests: list[ArrivingRequest]) -> RunRecord:
            return run_policy(deployment, requests, PlanningOptions(policy=policy))

        return largest_held(run, readers, max_readers=MAX_READERS, tried=lambda _: None)

    return {
        "gpu": deployment.device.title,
        "num_prompt_tokens": num_prompt_tokens,
        "lambda": full_link_ratio(deployment, num_tokens),
        "held": {policy: held(policy) for policy in POLICIES},
    }


def table(rows: Sequence[Row]) -> list[list[str]]:
    """Return a line for each GPU, and a column for each length of prompts."""
    titles = [f"prompts of {context:,} tokens" for context in CONTEXTS]
    lines = [["GPU", *titles]]
    for gpu in dict.fromkeys(one["gpu"] for one in rows):
        lines.append([gpu, *(_cell(one) for one in rows if one["gpu"] == gpu)])
    return lines


def _cell(one: Row) -> str:
    held = ", ".join(f"`{policy}` {most}" for policy, most in one["held"].items())
    return f"{held} ({100 * one['lambda']:.1f} %)"
