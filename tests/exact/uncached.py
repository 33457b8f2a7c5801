"""Runs in which leading KV of requests is not kept but computed anew, and what they must show."""

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from lab.engine.step_runner import Arrival, EngineCase, Outcome, StepRunner
from services.control.options import ControllerOptions
from services.control.run_director import Policy, RunDirector
from services.placement.run.papers.ellm import EllmRules
from services.placement.run.types import RunDecision, RunSnapshot
from tests.exact.cases import make_case
from tests.exact.evidence import assert_pool_is_whole, assert_tokens

ELLM = ControllerOptions(policy="ellm")
ROOMY_FRAC = 1.2  # of full residency: nothing is offloaded for want of room
MIN_ROWS = 100  # of requests and steps
MIN_ROWS_WITH_OFFLOADED = 20
MIN_MOVED_BLOCKS = 50
BEST = EllmRules()
CHANGED = 0.2  # of the requests that run get another prefix before each step


def uncached_case(**options: Any) -> EngineCase:
    return make_case(controller=ELLM, **options)


def at_random(seed: int) -> Policy:
    """Return a policy under which everybody runs, with uncached prefixes of random lengths."""
    rng = random.Random(seed)
    wanted: dict[str, int] = {}

    def decide(snapshot: RunSnapshot) -> RunDecision:
        for request in snapshot.requests:
            if request.runs and rng.random() < CHANGED:
                num_full = request.num_tokens // snapshot.engine.block_size
                wanted[request.request_id] = rng.randint(0, num_full)
        names = tuple(request.request_id for request in snapshot.requests)
        return RunDecision(run=names, offloads=True, uncached_blocks=dict(wanted))

    return decide


def half_of_everybody(snapshot: RunSnapshot) -> RunDecision:
    """Let everybody run, each with half of its KV uncached."""
    names = tuple(request.request_id for request in snapshot.requests)
    halves = {
        request.request_id: request.num_tokens // snapshot.engine.block_size // 2
        for request in snapshot.requests
    }
    return RunDecision(run=names, offloads=True, uncached_blocks=halves)


@dataclass(kw_only=True)
class Recomputed:
    """What a run computed anew, step by step."""

    num_rows: int = 0
    num_dropped_blocks: int = 0
    num_kept_blocks: int = 0
    num_with_offloaded: int = 0  # rows of requests with layer groups on the host
    lengths: set[int] = field(default_factory=set)  # of uncached prefixes, in blocks


@contextmanager
def deciding(
    runner: StepRunner, policy: Policy | None = None, *, rules: EllmRules = BEST
) -> Iterator[Recomputed]:
    """Let a policy decide in a run, or the product's own by `rules`.

    Afterwards tell what was computed anew, and see the pool whole.
    """
    scheduler, found = runner.scheduler, Recomputed()
    scheduler.set_up(replace(ELLM, ellm=rules), None)
    shadows, uncached = scheduler.shadows, scheduler.block_owner.uncached
    before = shadows.num_rows, uncached.num_dropped_blocks, uncached.num_kept_blocks
    loop, controller, add_to = scheduler.loop, scheduler.controller, shadows.add_to

    def watch(output: Any) -> Any:
        for kv in uncached.requests:
            found.lengths.add(len(kv.uncached))
            found.num_with_offloaded += (
                bool(kv.offloaded) and kv.request_id in output.num_scheduled_tokens
            )
        return add_to(output)

    if policy is not None:
        loop.director = RunDirector(policy, loop.line, controller, controller._now_s)
    shadows.add_to = watch
    try:
        yield found
    finally:
        del shadows.add_to  # the class's own shows again
        scheduler.set_up(ELLM, None)
    after = shadows.num_rows, uncached.num_dropped_blocks, uncached.num_kept_blocks
    found.num_rows, found.num_dropped_blocks, found.num_kept_blocks = (
        now - then for now, then in zip(after, before, strict=True)
    )
    assert not uncached.requests
    assert_pool_is_whole(runner)


def assert_right_and_recomputed(
    runner: StepRunner,
    expected: Outcome,
    outcome: Outcome,
    workload: Sequence[Arrival],
    found: Recomputed,
) -> None:
    """Assert equal tokens, from a run that dropped KV and kept it again.

    Requests with layers on the host were among those whose KV was dropped.
    """
    assert_tokens(expected, outcome, workload)
    assert found.num_rows >= MIN_ROWS
    assert min(found.num_dropped_blocks, found.num_kept_blocks) >= MIN_MOVED_BLOCKS
    assert len(found.lengths) >= min(6, num_most_blocks(runner.case))
    assert found.num_with_offloaded >= MIN_ROWS_WITH_OFFLOADED


def num_most_blocks(case: EngineCase) -> int:
    """Return how many blocks of all requests a step can compute anew beside their tokens."""
    return (case.max_num_batched_tokens - case.max_num_seqs) // case.block_size
