"""What offload, write-through and load-evict overlap are worth: TokenFlow's Table 2, here.

A burst of requests shares room for three; every few
tokens the one that is furthest ahead is parked and the one that is furthest behind resumed, as a
buffer-aware scheduler does. Every variant has the same rotation; the row is the median of its runs.
"""

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from bench.document import Benchmark, Row
from lab.engine.orders import held, park, resume
from lab.engine.step_runner import Arrival, EngineCase, StepRunner, make_prompt
from services.executor.kv_options import KVOptions

LINK_BYTES_PER_S = 5e7
NUM_REQUESTS = 9
NUM_PLACES = 3
NUM_PROMPT_TOKENS = 320
NUM_OUTPUT_TOKENS = 48
ROTATE_EVERY = 18  # output tokens of all requests together
REPETITIONS = 9
KV = KVOptions(
    prefix_caching=False,  # the same prompts come again and again
    host_bytes=64 << 20,
    h2d_bytes_per_s=LINK_BYTES_PER_S,
    d2h_bytes_per_s=LINK_BYTES_PER_S,
    restore_when_free_frac=0.02,
)
# 368 tokens are 12 blocks of 32 in each of 8 layers: 96, of which three fit.
FULL = EngineCase(num_blocks=3 * 96 + 8, kv=KV, max_num_seqs=NUM_PLACES, max_model_len=512)
VARIANTS = {
    "all of it": FULL,
    "without load-evict overlap": replace(FULL, kv=replace(KV, overlap_load_evict=False)),
    "without write-through": replace(FULL, kv=replace(KV, max_mirrored_blocks_per_step=0)),
    "without offload (recompute)": replace(FULL, kv=replace(KV, host_bytes=0)),
}


class Rotation:
    """Parks requests that are ahead, resumes those that are behind."""

    def __init__(self) -> None:
        self.num_parks = 0
        self._next_at = ROTATE_EVERY

    def __call__(self, scheduler: Any, num_tokens: int) -> None:
        """Fill free places; take a turn if enough tokens were answered since the last one."""
        parked = [scheduler.requests[name] for name in held(scheduler)]
        others = [r for r in scheduler.requests.values() if r.request_id not in held(scheduler)]
        runs = [r for r in others if r in scheduler.running]
        if (
            num_tokens >= self._next_at
            and len(runs) == NUM_PLACES
            and len(others + parked) > NUM_PLACES
        ):
            self._next_at = num_tokens + ROTATE_EVERY
            ahead = max(runs, key=lambda r: r.num_output_tokens)
            park(scheduler, ahead.request_id)
            others.remove(ahead)
            self.num_parks += 1
        if len(others) < NUM_PLACES and parked:
            behind = min(parked, key=lambda r: r.num_output_tokens)
            resume(scheduler, behind.request_id)


def run_variant(runner: StepRunner, number: int) -> Row:
    scheduler, rotation = runner.scheduler, Rotation()
    names = [f"v{number}-{n}" for n in range(NUM_REQUESTS)]
    for n, name in enumerate(names):
        runner.add(
            Arrival(
                request_id=name,
                prompt=make_prompt(NUM_PROMPT_TOKENS, seed=n),
                num_output_tokens=NUM_OUTPUT_TOKENS,
            )
        )
    first_s: dict[str, float] = {}
    began_s = time.perf_counter()
    num_steps = 0
    answered: dict[str, int] = {}
    while runner.engine.has_unfinished_requests():
        rotation(scheduler, sum(answered.values()))
        for output in runner.engine.step():
            answered[output.request_id] = len(output.outputs[0].token_ids)
            if answered[output.request_id]:
                first_s.setdefault(output.request_id, time.perf_counter() - began_s)
        num_steps += 1
    seconds = time.perf_counter() - began_s
    return {
        "seconds_s": seconds,
        "tokens_per_s": NUM_REQUESTS * NUM_OUTPUT_TOKENS / seconds,
        "mean_ttft_s": sum(first_s.values()) / len(first_s),
        "num_steps": num_steps,
        "num_parks": rotation.num_parks,
    }


def measure() -> list[Row]:
    rows: list[Row] = []
    for name, case in VARIANTS.items():
        runner = StepRunner(case)
        run_variant(runner, 0)  # warm-up: rates are measured, memory is touched
        done = [run_variant(runner, 1 + n) for n in range(REPETITIONS)]
        runner.close()
        done.sort(key=lambda row: float(row["seconds_s"]))
        rows.append({"variant": name, **done[len(done) // 2]})  # the median run
    return rows


def table(rows: Sequence[Row]) -> list[list[str]]:
    header = ["variant", "seconds", "tokens/s", "mean TTFT (ms)", "steps", "parks"]
    return [header] + [
        [
            row["variant"],
            f"{row['seconds_s']:.2f}",
            f"{row['tokens_per_s']:.0f}",
            f"{1e3 * row['mean_ttft_s']:.0f}",
            str(row["num_steps"]),
            str(row["num_parks"]),
        ]
        for row in rows
    ]


BENCHMARK = Benchmark(
    name="ablation",
    title="Without offload, write-through, load-evict overlap (TokenFlow, Table 2)",
    definitions={
        "seconds": "from the burst to the last token",
        "tokens/s": "output tokens per second of that time",
        "steps": "of the engine, those included in which everybody waits for copies",
    },
    measure=measure,
    table=table,
)
