"""Aborts of requests in a given state of their KV: paused, parked, or coming back."""

import random
from collections import Counter
from typing import Any

from lab.engine.step_runner import StepRunner
from services.control.requests.life import State
from services.executor.blocks.residency import RequestKV

STATES = ("paused", "parked", "loading")


class AbortsByState:
    """A hook that aborts, at random, requests that are in one of `STATES`, and counts them."""

    def __init__(self, runner: StepRunner, *, seed: int, share: float = 0.1) -> None:
        self.aborted: set[str] = set()
        self.counts: Counter[str] = Counter()
        self._runner = runner
        self._rng = random.Random(seed)
        self._share = share

    def __call__(self, scheduler: Any, step: int) -> None:
        for kv in list(scheduler.block_owner.kvs):
            request_id, state = kv.request_id, state_of(kv)
            if state and request_id in scheduler.requests and self._rng.random() < self._share:
                self.counts[state] += 1
                self.aborted.add(request_id)
                self._runner.engine.abort_request([request_id])


def state_of(kv: RequestKV) -> str:
    """Return one of `STATES`, or nothing for a request that is in none of them."""
    if any(group.restore is not None and group.restore.under_way for group in kv.groups):
        return "loading" if kv.record.state.is_queued else ""
    if kv.record.state is State.PAUSED:
        return "paused"
    return "parked" if kv.record.holds and kv.is_parked else ""
