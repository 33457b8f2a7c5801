"""Live requests share where the host is small or off: tokens identical to stock vLLM's.

Stock vLLM answers without any prefix caching, from a pool that holds everything. What is freed is
NaN. The tests run on the engines of `test_layerwise_exact.py`, which imports them.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from lab.engine.agents import LONG, SALTED, TWINS, agents
from lab.engine.step_runner import Arrival, Outcome, StepRunner, first_difference
from lab.engine.workloads import together
from services.executor.blocks.pool_blocks import PoolBlocks
from tests.exact import faults
from tests.exact.cached_prefixes import LAYERS_ONLY, TWO_ENGINES, room_for
from tests.exact.evidence import assert_pool_is_whole
from tests.exact.reference import answers_to
from tests.exact.shared_prefixes import Sharing, ends_with_first_user, one_block_off

PREFIX_BLOCKS = len(LONG) // 32
ON_LONG = {f"a1.{number}" for number in range(5)} | {TWINS[0]}


def burst() -> list[Arrival]:
    """Return eight requests at once: six on one prefix, one with its salt, one on another."""
    wanted = {*ON_LONG, SALTED, "a0.0"}
    return [replace(one, step=0) for one in agents() if one.request_id in wanted]


def in_turn() -> list[Arrival]:
    """Return those on one prefix, each when the one before it has ended."""
    return [
        replace(one, step=100 * number)
        for number, one in enumerate(one for one in agents() if one.request_id in ON_LONG)
    ]


class InPool:
    """Watches who is copied, and what is there twice: call it before each step."""

    def __init__(self) -> None:
        self.mirrored: set[str] = set()
        self.unmirrored: set[str] = set()
        self.num_pinned = 0  # trunks that several use and the host has no room for, over steps
        self.num_duplicates = 0  # blocks, over steps

    def __call__(self, scheduler: Any, step: int) -> None:
        owner = scheduler.block_owner
        for kv in owner.kvs:
            if not kv.record.state.is_queued:
                (self.mirrored if kv.mirrored else self.unmirrored).add(kv.request_id)
        for trunk in owner.trunks.all:
            assert trunk.is_copied or not (trunk.offloaded or trunk.num_copied_blocks > trunk.first)
            self.num_pinned += len(trunk.users) > 1 and not trunk.is_copied
        self.num_duplicates += scheduler.transfers.num_duplicate_blocks()


@TWO_ENGINES
@pytest.mark.parametrize("num_columns", [0, 16], ids=["no host", "room for one"])
def test_a_burst_shares_its_prefix_whatever_room_the_host_has(
    runner: StepRunner, expected_agents: Outcome, num_columns: int
) -> None:
    counters, sharing, in_pool = runner.scheduler.block_owner.counters, Sharing(runner), InPool()
    num_before, workload = counters.num_prefix_hit_tokens, burst()
    with room_for(runner, num_columns):
        outcome = runner.run(workload, hook=together(sharing, in_pool))

    assert first_difference(answers_to(workload, expected_agents), outcome) == {}
    assert_pool_is_whole(runner)
    # As in stock vLLM, where five of six find the first one's blocks when they come in.
    num_hits = counters.num_prefix_hit_tokens - num_before
    assert num_hits == (len(ON_LONG) - 1) * PREFIX_BLOCKS * runner.case.block_size
    assert in_pool.num_duplicates == 0
    assert sharing.names >= ON_LONG
    assert SALTED not in sharing.names
    assert in_pool.unmirrored
    assert bool(in_pool.mirrored) == bool(num_columns)
    if not num_columns:
        assert outcome.num_preemptions > 0, "the pool is ample"
        assert in_pool.num_pinned > 20


@TWO_ENGINES
def test_without_a_host_one_after_the_other_begins_with_what_the_pool_still_has(
    runner: StepRunner, expected_agents: Outcome
) -> None:
    counters, workload = runner.scheduler.block_owner.counters, in_turn()
    num_before = counters.num_prefix_hit_tokens
    with room_for(runner, 0):
        outcome = runner.run(workload)

    assert first_difference(answers_to(workload, expected_agents), outcome) == {}
    num_hits = counters.num_prefix_hit_tokens - num_before
    assert num_hits == (len(workload) - 1) * PREFIX_BLOCKS * runner.case.block_size
    assert_pool_is_whole(runner)


# -- negative controls ---------------------------------------------------------------------------


def found_although_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the last block that is found be one that others have had, and freed."""
    find_all = PoolBlocks.find_all

    def finds_others(self: PoolBlocks, uids: Any, group: int) -> Any:
        found = find_all(self, uids, group)
        self.poison(found[-1:])
        return found

    monkeypatch.setattr(PoolBlocks, "find_all", finds_others)


CONTROLS: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], list[Arrival]]] = {
    "a trunk that ends with its first user": (ends_with_first_user, burst()),
    "rows one block off": (one_block_off, burst()),
    "what is found has been others'": (found_although_taken, in_turn()),
}


@LAYERS_ONLY
@pytest.mark.parametrize("name", CONTROLS)
def test_what_is_wrong_without_a_host_is_noticed(
    runner: StepRunner,
    expected_agents: Outcome,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
) -> None:
    breaks, workload = CONTROLS[name]
    with room_for(runner, 0), faults.spoiling(faults.FaultyEngine):
        breaks(monkeypatch)

        outcome = runner.run(workload, check=False)

    assert first_difference(answers_to(workload, expected_agents), outcome)
