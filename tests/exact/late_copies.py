"""What is kept and had no copy when its request ended is found on the host by the next turn.

Runs on the engines of `test_layerwise_exact.py`, which imports it.
"""

from typing import Any

import pytest

from lab.engine.step_runner import Arrival, Hook, Outcome, StepRunner
from lab.engine.workloads import together
from services.control.measures.rates import MAX_MIRRORED_BLOCKS
from services.placement.run.resume import ResumeWay
from tests.exact import faults
from tests.exact.cached_prefixes import LAYERS_ONLY, Hits
from tests.exact.evidence import assert_pool_is_whole
from tests.exact.scenes import copies_complete
from tests.exact.tool_turns import CALLED_AT, CALLS, COMES_BACK, COMES_BACK_AT, turns_of_an_agent


@pytest.fixture
def ended_without_copies(runner: StepRunner, monkeypatch: pytest.MonkeyPatch) -> Hook:
    """Return a hook by which the turn has no copy when it ends, and nothing in the pool when the
    next one comes.
    """
    transfers, may_copy = runner.scheduler.transfers, False
    monkeypatch.setattr(
        transfers.write_through, "_budget", lambda _: MAX_MIRRORED_BLOCKS if may_copy else 0
    )
    monkeypatch.setattr(runner.scheduler.control.resumes, "choose_way", lambda *_: ResumeWay.LOAD)

    def front(scheduler: Any, step: int) -> None:
        nonlocal may_copy
        if step == CALLED_AT:
            assert CALLS not in scheduler.requests
            scheduler.keep_turns({CALLS: 3_600.0})
            may_copy = True
            assert scheduler.has_requests()  # steps follow without any
        if step == COMES_BACK_AT - 2:
            assert not scheduler.has_requests()
            scheduler.block_owner.blocks.forget_left()

    return together(front, copies_complete)


@LAYERS_ONLY
def test_what_had_no_copy_when_its_turn_ended_comes_back_from_the_host(
    runner: StepRunner, expected_turns: Outcome, turns: list[Arrival], hits: Hits,
    ended_without_copies: Hook,
) -> None:  # fmt: skip
    counters = runner.scheduler.block_owner.counters
    before = counters.copy()

    outcome = runner.run(turns_of_an_agent(turns), hook=ended_without_copies)

    num_blocks = hits.num_blocks[COMES_BACK]
    assert num_blocks > 0
    assert counters.num_late_blocks - before.num_late_blocks == num_blocks
    assert counters.num_loaded_blocks - before.num_loaded_blocks == num_blocks
    assert outcome.tokens.items() <= expected_turns.tokens.items()
    runner.scheduler.release_session("agent", "session")
    assert_pool_is_whole(runner)


@LAYERS_ONLY
def test_a_late_copy_that_was_not_made_is_noticed(
    runner: StepRunner, expected_turns: Outcome, turns: list[Arrival], hits: Hits,
    ended_without_copies: Hook, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    late_copies = runner.scheduler.block_owner.late_copies
    plan = late_copies.plan
    monkeypatch.setattr(late_copies, "plan", lambda step: plan(step) and [])

    with faults.spoiling(faults.FaultyEngine):  # the guard is not asked
        outcome = runner.run(turns_of_an_agent(turns), hook=ended_without_copies, check=False)

    assert hits.num_blocks[COMES_BACK] > 0
    assert outcome.tokens[CALLS] == expected_turns.tokens[CALLS]
    assert outcome.tokens[COMES_BACK] != expected_turns.tokens[COMES_BACK]
    runner.scheduler.release_session("agent", "session")
