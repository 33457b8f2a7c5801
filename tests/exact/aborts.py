"""Aborts of requests in a given state of their KV: paused, parked, or coming back."""

import random
from collections import Counter
from typing import Any

from lab.step_runner import StepRunner
from services.executor.blocks.residency import RequestKV
from services.executor.scheduler.holds import HoldKind

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
        for request_id, kv in list(scheduler.block_owner.requests.items()):
            state = state_of(scheduler, kv)
            if state and request_id in scheduler.requests and self._rng.random() < self._share:
                self.counts[state] += 1
                self.aborted.add(request_id)
                self._runner.engine.abort_request([request_id])


def state_of(scheduler: Any, kv: RequestKV) -> str:
    """Return one of `STATES`, or nothing for a request that is in none of them."""
    if any(group.restore is not None and group.restore.under_way for group in kv.groups):
        return "loading" if kv.waiting else ""
    held = scheduler.control.holds.kind(kv.request_id)
    if held is HoldKind.PARK:
        return "parked" if kv.is_parked else ""
    return "paused" if held is HoldKind.PAUSE else ""
