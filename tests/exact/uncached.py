"""Runs in which leading KV of requests is not kept but computed anew, and what they must show."""

import random
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from vllm.v1.request import RequestStatus

from lab.engine.orders import park, pause, resume
from lab.engine.step_runner import Arrival, EngineCase, Hook, Outcome, StepRunner
from lab.engine.workloads import together
from services.control.options import ControllerOptions
from services.control.requests.life import State
from services.placement.presets import Run
from services.placement.run.papers.ellm import EllmRules
from services.placement.run.types import RunDecision, RunSnapshot
from tests.exact.cases import make_case, num_groups
from tests.exact.evidence import assert_pool_is_whole, assert_tokens

ELLM = ControllerOptions(policy="ellm")
ROOMY_FRAC = 1.2  # of full residency: nothing is offloaded for want of room
MIN_ROWS = 100  # of requests and steps
MIN_ROWS_WITH_OFFLOADED = 20
MIN_MOVED_POSITIONS = 4  # dropped, and kept again
# Preempted: sent to the queue by a decision, or for want of blocks.
INTERRUPTIONS = ("paused", "parked", "preempted", "aborted")
MIN_INTERRUPTIONS = 2  # of each
BEST = EllmRules()
CHANGED = 0.2  # of the requests that run get another prefix before each step


def uncached_case(**options: Any) -> EngineCase:
    return make_case(controller=ELLM, **options)


# One with room for everything, and one whose requests have layers on the host: on every commit.
STANDING = {
    "roomy-pairs": uncached_case(layers_per_group=2, share=ROOMY_FRAC),
    "scarce-asynchronous": uncached_case(asynchronous=True),
}


def at_random(seed: int, away: Collection[str] = ()) -> Run:
    """Return a policy under which everybody runs, with uncached prefixes of random lengths.

    But for those that are in `away` at the moment: they are sent to the queue, and stay there.
    """
    rng = random.Random(seed)
    wanted: dict[str, int] = {}

    def decide(snapshot: RunSnapshot) -> RunDecision:
        for request in snapshot.requests:
            if request.runs and rng.random() < CHANGED:
                num_full = request.num_tokens // snapshot.engine.block_size
                wanted[request.request_id] = rng.randint(0, num_full)
        names = [request.request_id for request in snapshot.requests]
        return RunDecision(
            run=tuple(name for name in names if name not in away),
            park=frozenset(name for name in names if name in away),
            offloads=True,
            uncached_blocks=dict(wanted),
        )

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
    # Rows of requests with layers on the host.
    with_offloaded: Counter[str] = field(default_factory=Counter)
    lengths: set[int] = field(default_factory=set)  # of uncached prefixes, in blocks
    # What befell requests that had an uncached prefix at that moment; a pause counts in each step.
    interrupted: Counter[str] = field(default_factory=Counter)


@contextmanager
def deciding(
    runner: StepRunner, policy: Run | None = None, *, rules: EllmRules = BEST
) -> Iterator[Recomputed]:
    """Let a policy decide in a run, or the product's own by `rules`.

    Afterwards tell what was computed anew, and see the pool whole.
    """
    scheduler, found = runner.scheduler, Recomputed()
    scheduler.set_up(replace(ELLM, ellm=rules), None, policy)
    shadows, uncached = scheduler.shadows, scheduler.block_owner.uncached
    before = shadows.num_rows, uncached.num_dropped_blocks, uncached.num_kept_blocks
    add_to, forget = shadows.add_to, uncached.forget

    def watch_step(output: Any) -> Any:
        for kv in uncached.kvs:
            found.lengths.add(len(kv.uncached))
            if kv.request_id in output.num_scheduled_tokens:
                found.with_offloaded[kv.request_id] += bool(kv.offloaded)
            elif kv.uncached and kv.record.state is State.PAUSED:
                found.interrupted["paused"] += 1
        return add_to(output)

    def watch_end(kv: Any) -> None:
        if kv.uncached:
            found.interrupted[_why_it_ends(scheduler.requests[kv.request_id], kv.record)] += 1
        forget(kv)

    shadows.add_to, uncached.forget = watch_step, watch_end
    try:
        yield found
    finally:
        del shadows.add_to, uncached.forget  # the classes' own show again
        scheduler.set_up(ELLM, None)
    after = shadows.num_rows, uncached.num_dropped_blocks, uncached.num_kept_blocks
    found.num_rows, found.num_dropped_blocks, found.num_kept_blocks = (
        now - then for now, then in zip(after, before, strict=True)
    )
    assert not uncached.kvs
    assert_pool_is_whole(runner)


def _why_it_ends(request: Any, record: Any) -> str:
    """Say why a request's KV leaves the pool."""
    if request.is_finished():
        is_aborted = request.status is RequestStatus.FINISHED_ABORTED
        return "aborted" if is_aborted else "finished"
    return "parked" if record.holds else "preempted"


class Interruptions:
    """Pauses, parks, preempts and aborts requests with an uncached prefix, until enough have been.

    A hook, to be called behind all others: an order that they take back is given again, and one
    whose request is none of these any more is given to another.
    """

    def __init__(self, runner: StepRunner, found: Recomputed, away: set[str]) -> None:
        """`away`: whom the policy is to send to the queue."""
        self.aborted: dict[str, int] = {}  # and before which step
        self._found, self._away, self._now = found, away, ("", "")
        self._abort: Callable[[list[str]], None] = runner.engine.abort_request

    def __call__(self, scheduler: Any, step: int) -> None:
        kind = min(INTERRUPTIONS, key=lambda kind: self._found.interrupted[kind])
        if self._found.interrupted[kind] >= MIN_INTERRUPTIONS:
            kind = ""
        names = [
            request.request_id
            for request in scheduler.running
            if (kv := scheduler.records[request.request_id].kv) is not None and kv.uncached
        ]
        before, name = self._now
        if kind != before or name not in names:
            if name in scheduler.requests:
                resume(scheduler, name)
            self._away.clear()
            name = names[0] if kind and names else ""
        self._now = (kind, name)
        if name:
            self._order(scheduler, step, *self._now)

    def _order(self, scheduler: Any, step: int, kind: str, name: str) -> None:
        match kind:
            case "paused":
                pause(scheduler, name)
            case "parked":
                park(scheduler, name)
            case "preempted":
                self._away.add(name)
            case "aborted":
                self.aborted[name] = step
                self._abort([name])


class Interrupted(NamedTuple):
    """A run of `Interruptions`."""

    outcome: Outcome
    workload: Sequence[Arrival]  # with what was aborted
    found: Recomputed


def run_interrupted(
    runner: StepRunner, workload: Sequence[Arrival], hook: Hook, *, seed: int
) -> Interrupted:
    """Run with random prefixes, under another hook, and interrupt requests that have one."""
    away: set[str] = set()
    with deciding(runner, at_random(seed, away)) as found:
        interruptions = Interruptions(runner, found, away)
        outcome = runner.run(workload, hook=together(hook, interruptions))
    aborted = interruptions.aborted
    workload = [
        replace(one, abort_at=aborted.get(one.request_id, one.abort_at)) for one in workload
    ]
    return Interrupted(outcome, workload, found)


def assert_right_and_recomputed(
    runner: StepRunner,
    expected: Outcome,
    outcome: Outcome,
    workload: Sequence[Arrival],
    found: Recomputed,
) -> None:
    """Assert equal tokens, from a run that dropped KV and kept it again.

    Requests with layers on the host were among those whose KV was dropped. So were some that were
    paused, parked, preempted and aborted, at a moment when part of theirs was.
    """
    assert_tokens(expected, outcome, workload)
    assert found.num_rows >= MIN_ROWS
    min_blocks = MIN_MOVED_POSITIONS * num_groups(runner.case)
    assert min(found.num_dropped_blocks, found.num_kept_blocks) >= min_blocks
    assert len(found.lengths) >= min(6, num_most_blocks(runner.case))
    assert found.with_offloaded.total() >= MIN_ROWS_WITH_OFFLOADED
    assert min(found.interrupted[kind] for kind in INTERRUPTIONS) >= MIN_INTERRUPTIONS


def num_most_blocks(case: EngineCase) -> int:
    """Return how many blocks of all requests a step can compute anew beside their tokens."""
    return (case.max_num_batched_tokens - case.max_num_seqs) // case.block_size
