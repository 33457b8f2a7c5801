"""Random everything, for long: `python -m tests.exact.soak [--requests 2000] [--seed 1]`.

Each round is another engine. Requests of random lengths arrive all the time; they are paused,
parked, resumed in every way, aborted, and their layers moved, at random. Every token is compared
with stock vLLM's. After each round both pools must be whole, and memory must not have grown since
the round's first third. Ends with status 1 at the first thing that is not so.
"""

import argparse
import json
import os
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from services.executor.kv.options import KVOptions
from services.placement.resume import LinkAndStep, ParkedRequest, ResumeWay
from tests.exact.harness import (
    Arrival,
    EngineCase,
    Outcome,
    StepRunner,
    first_difference,
    make_prompt,
    run_case,
    stock,
)
from tests.exact.workloads import churn, holds, together

LINK = KVOptions(
    host_bytes=256 << 20,
    copy_latency_s=0.2e-3,
    h2d_bytes_per_s=2e9,
    d2h_bytes_per_s=2e8,
    restore_when_free_frac=0.02,
    poison=True,
)
BLOCK_BYTES = 32 * 2 * 2 * 32 * 4  # of one layer: tokens, K and V, heads, head size, float32
ROUNDS = {
    "layers": EngineCase(num_blocks=200, kv=LINK),
    "pairs, asynchronous": EngineCase(
        num_blocks=90, kv=replace(LINK, layers_per_group=2), asynchronous=True
    ),
    "small host pool, small chunks": EngineCase(
        num_blocks=200, kv=replace(LINK, host_bytes=400 * BLOCK_BYTES), max_num_batched_tokens=160
    ),
    "halves, nothing mirrored": EngineCase(
        num_blocks=60, kv=replace(LINK, layers_per_group=4, max_mirrored_blocks_per_step=0)
    ),
}
MAX_GROWTH_BYTES = 48 << 20


def make_workload(num_requests: int, seed: int) -> list[Arrival]:
    """Return requests that arrive about as fast as they end."""
    rng = random.Random(seed)
    step = 0
    arrivals = []
    for number in range(num_requests):
        num_output = rng.randrange(1, 40)
        aborted = rng.random() < 0.08
        arrivals.append(
            Arrival(
                request_id=f"s{seed}-{number}",
                prompt=make_prompt(rng.choice((5, 31, 32, 33, 64, 100, 180, 400)), seed=number),
                num_output_tokens=num_output,
                step=step,
                abort_at=step + rng.randrange(1, 60) if aborted else None,
            )
        )
        step += rng.randrange(0, 6)
    return arrivals


class MemoryWatch:
    """A hook that looks at this process' resident memory now and then."""

    def __init__(self) -> None:
        self.samples_bytes: list[int] = []

    def __call__(self, scheduler: Any, step: int) -> None:
        if step % 50 == 0:
            num_pages = int(Path("/proc/self/statm").read_text().split()[1])
            self.samples_bytes.append(num_pages * os.sysconf("SC_PAGE_SIZE"))

    @property
    def growth_bytes(self) -> int:
        """Return by how much the last third's median exceeds the middle third's."""
        third = len(self.samples_bytes) // 3
        middle = sorted(self.samples_bytes[third : 2 * third])
        last = sorted(self.samples_bytes[2 * third :])
        return last[len(last) // 2] - middle[len(middle) // 2] if middle else 0


def random_way(seed: int) -> Any:
    rng = random.Random(seed)

    def choose(parked: ParkedRequest, engine: LinkAndStep) -> ResumeWay:
        return rng.choice(list(ResumeWay))

    return choose


def soak_round(
    case: EngineCase, workload: Sequence[Arrival], expected: Outcome, seed: int
) -> dict[str, Any]:
    """Run one engine; return what there is to report, `faults` first."""
    memory = MemoryWatch()
    runner = StepRunner(case)
    began_s = time.monotonic()
    try:
        runner.scheduler.control.choose_way = random_way(seed)
        hook = together(churn(seed, share=0.1), holds(seed, begin=0.08), memory)
        outcome = runner.run(workload, hook=hook)
        owner = runner.scheduler.block_owner
        num_lost = owner.pool.num_gpu_blocks - 1 - owner.pool.get_num_free_blocks()
        num_slots_lost = owner.host.num_used
        events = runner.scheduler.transfers.count_events()
    finally:
        runner.close()
    aborted = {arrival.request_id for arrival in workload if arrival.abort_at is not None}
    wrong = first_difference(expected, outcome)
    for request_id in aborted & wrong.keys():
        got = outcome.tokens.get(request_id, [])
        if got == expected.tokens[request_id][: len(got)]:
            del wrong[request_id]
    return {
        "faults": {
            "wrong_tokens": wrong,
            "lost_blocks": num_lost,
            "lost_slots": num_slots_lost,
            "memory_growth_bytes": max(0, memory.growth_bytes - MAX_GROWTH_BYTES),
        },
        "num_requests": len(workload),
        "num_aborted": len(aborted),
        "num_steps": outcome.num_steps,
        "num_preemptions": outcome.num_preemptions,
        "seconds": round(time.monotonic() - began_s, 1),
        "memory_growth_bytes": memory.growth_bytes,
        "events": {name: getattr(events, name) for name in events.__slots__},
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=2_000)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    num_each = -(-arguments.requests // len(ROUNDS))
    workloads = [make_workload(num_each, arguments.seed + n) for n in range(len(ROUNDS))]
    everything = [replace(a, step=0, abort_at=None) for w in workloads for a in w]
    expected = run_case(replace(stock(next(iter(ROUNDS.values()))), max_num_seqs=64), everything)
    print(f"stock: {len(everything)} requests, {expected.num_steps} steps", flush=True)
    for (name, case), workload in zip(ROUNDS.items(), workloads, strict=True):
        mine = {a.request_id: expected.tokens[a.request_id] for a in workload}
        report = soak_round(case, workload, replace(expected, tokens=mine), arguments.seed)
        print(json.dumps({"round": name, **report}), flush=True)
        if any(report["faults"].values()):
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
