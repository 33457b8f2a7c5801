"""Random everything, for long: `python -m tests.exact.soak [--requests 2000] [--seed 1]`.

Each round is another engine. Requests of random lengths arrive all the time; they are paused,
parked, resumed in every way, aborted, and their layers moved, at random; in one round copies go
wrong too. Now and then everybody is let go at once. Every token is compared with stock vLLM's.
After each round both pools must be whole, every way to resume must have been taken often, and
memory must not have grown since the round's first third. Ends with status 1 at the first thing
that is not so.
"""

import argparse
import json
import os
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from lab.engine.orders import held, resume
from lab.engine.step_runner import (
    Arrival,
    EngineCase,
    Hook,
    Outcome,
    StepRunner,
    first_difference,
    make_prompt,
    run_case,
    stock,
)
from lab.engine.workloads import churn, holds, random_way, together
from services.executor.kv_options import GuardMode, KVOptions
from services.placement.run.resume import ResumeWay
from tests.exact.failing_engine import FaultRates
from tests.exact.failure_cases import run_with_faults

LINK = KVOptions(
    host_bytes=64 << 20,  # full of cached columns by the middle of a round: it is touched late
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
    "tensor parallel": EngineCase(num_blocks=200, kv=LINK, tensor_parallel_size=2),
    "pipeline parallel": EngineCase(num_blocks=110, kv=LINK, pipeline_parallel_size=2),
    "copies go wrong": EngineCase(
        num_blocks=200, kv=replace(LINK, integrity_guard=GuardMode.ALL), asynchronous=True
    ),
}
FAULTS = {
    "copies go wrong": FaultRates(
        load_fails=2e-4,
        load_hangs=2e-4,
        load_changes=2e-4,
        save_fails=1e-3,
        save_hangs=1e-3,
        save_changes=1e-3,
    )
}
MAX_GROWTH_BYTES = 48 << 20
# A load that waits too long for blocks is put back and decided anew, so that few end as one.
WAYS = (*ResumeWay, ResumeWay.LOAD, ResumeWay.LOAD)
MIN_RESUMES = 3  # of a round, by each way
REST_PERIOD, REST_LENGTH = 200, 50  # steps; nobody is held during the last ones of each period


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


def with_rests(hook: Hook) -> Hook:
    """Return the hook with times in which it is not called, and everybody may run."""

    def rest_or_call(scheduler: Any, step: int) -> None:
        if step % REST_PERIOD < REST_PERIOD - REST_LENGTH:
            hook(scheduler, step)
            return
        for request_id in held(scheduler):
            resume(scheduler, request_id)

    return rest_or_call


class Round:
    """One engine, one workload, and what is found wrong."""

    def __init__(self, name: str, seed: int) -> None:
        self._faults = FAULTS.get(name)
        self._seed = seed
        self._memory = MemoryWatch()
        self._runner = StepRunner(ROUNDS[name])
        self._control = self._runner.scheduler.control

    def run(self, workload: Sequence[Arrival], expected: Outcome) -> dict[str, Any]:
        """Return what there is to report, `faults` first."""
        began_s = time.monotonic()
        try:
            outcome = self._carry_out(workload)
            lost = self._lost()
            events = self._runner.scheduler.block_owner.counters.copy()
        finally:
            self._runner.close()
        resumes = {way.value: events.num_resumes(way) for way in ResumeWay}
        aborted = {arrival.request_id for arrival in workload if arrival.abort_at is not None}
        ended = {name for name, why in outcome.finish_reasons.items() if why == "error"}
        return {
            "faults": {
                "wrong_tokens": _wrong_tokens(expected, outcome, cut_short=aborted | ended),
                "errors_without_faults": len(ended) if self._faults is None else 0,
                "memory_growth_bytes": max(0, self._memory.growth_bytes - MAX_GROWTH_BYTES),
                "rare_ways": {way: n for way, n in resumes.items() if n < MIN_RESUMES},
                **lost,
            },
            "num_requests": len(workload),
            "num_aborted": len(aborted),
            "num_failed": len(ended),
            "num_steps": outcome.num_steps,
            "num_preemptions": outcome.num_preemptions,
            "resumes": resumes,
            "seconds": round(time.monotonic() - began_s, 1),
            "memory_growth_bytes": self._memory.growth_bytes,
            "events": asdict(events),
        }

    def _carry_out(self, workload: Sequence[Arrival]) -> Outcome:
        self._control.resumes.choose_way = random_way(self._seed, WAYS)
        hook = with_rests(together(churn(self._seed, share=0.1), holds(self._seed, begin=0.08)))
        hook = together(hook, self._memory)
        if self._faults is None:
            return self._runner.run(workload, hook=hook)
        return run_with_faults(self._runner, self._faults, hook=hook, workload=workload).outcome

    def _lost(self) -> dict[str, int]:
        owner = self._runner.scheduler.block_owner
        num_blocks = owner.pool.num_gpu_blocks - 1
        return {
            "lost_blocks": num_blocks - owner.pool.get_num_free_blocks(),
            "lost_slots": owner.host.num_used,
        }


def _wrong_tokens(expected: Outcome, outcome: Outcome, *, cut_short: set[str]) -> dict[str, int]:
    wrong = first_difference(expected, outcome)
    for request_id in cut_short & wrong.keys():
        got = outcome.tokens.get(request_id, [])
        if got == expected.tokens[request_id][: len(got)]:
            del wrong[request_id]
    return wrong


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
    for name, workload in zip(ROUNDS, workloads, strict=True):
        mine = {a.request_id: expected.tokens[a.request_id] for a in workload}
        report = Round(name, arguments.seed).run(workload, replace(expected, tokens=mine))
        print(json.dumps({"round": name, **report}), flush=True)
        if any(report["faults"].values()):
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
