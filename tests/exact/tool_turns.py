"""An agent whose tool takes long finds its KV on the host, though others have gone through it.

Runs on the engines of `test_layerwise_exact.py`, which imports it.
"""

from dataclasses import replace
from typing import Any

import pytest

from lab.engine.conversations import STEPS_PER_TURN, SYSTEM
from lab.engine.step_runner import Arrival, Outcome, StepRunner
from lab.engine.workloads import together
from services.executor.request_tag import ToolTurn, with_tool_turn
from services.placement.run.resume import ResumeWay
from tests.exact import faults
from tests.exact.cached_prefixes import LAYERS_ONLY, Hits, copied_at_once, room_for
from tests.exact.evidence import assert_pool_is_whole

CALLS, COMES_BACK = "c0.0", "c0.1"  # the agent's turns, before and behind its tool's time
OTHERS = ("c1.", "c2.", "c3.", "c4.")
CALLED_AT, COMES_BACK_AT = STEPS_PER_TURN - 10, 3 * STEPS_PER_TURN
NUM_COLUMNS = 20  # of the host; what others leave meanwhile is more


@LAYERS_ONLY
@pytest.mark.parametrize("keeps", [True, False], ids=["kept", "not kept"])
def test_a_turn_that_ended_with_a_tool_call_comes_back_to_its_kv(
    runner: StepRunner,
    expected_turns: Outcome,
    turns: list[Arrival],
    hits: Hits,
    monkeypatch: pytest.MonkeyPatch,
    keeps: bool,
) -> None:
    cache, block_size = runner.scheduler.block_owner.host.cache, runner.case.block_size
    by_name = {turn.request_id: turn for turn in turns}
    others = [
        replace(by_name[name], step=STEPS_PER_TURN * number)
        for number, name in enumerate(filter(is_other, sorted(by_name)), 1)
    ]
    comes_back = replace(by_name[COMES_BACK], step=others[-1].step + STEPS_PER_TURN)
    calls = by_name[CALLS]
    tag = with_tool_turn(None, ToolTurn("agent", "session", 0))
    calls = replace(calls, sampling=calls.sampling | {"extra_args": tag})

    def front(scheduler: Any, step: int) -> None:
        if step == CALLED_AT and keeps:
            assert CALLS not in scheduler.requests
            scheduler.keep_turns({CALLS: 3_600.0})

    with room_for(runner, NUM_COLUMNS):
        hook = together(front, copied_at_once(runner, monkeypatch))
        outcome = runner.run([calls, *others, comes_back], hook=hook)

        num_left = (len(calls.prompt) + calls.num_output_tokens - 1) // block_size
        num_found = hits.num_blocks[COMES_BACK] // runner.case.model.num_layers
        if keeps:
            assert num_found == num_left
            assert cache.num_awaited_columns == num_left
            assert runner.scheduler.release_session("agent", "session") == num_left * block_size
        else:
            assert num_found <= len(SYSTEM) // block_size  # others begin with that, too
        assert cache.num_awaited_columns == 0
    assert outcome.tokens.items() <= expected_turns.tokens.items()
    assert_pool_is_whole(runner)


def turns_of_an_agent(turns: list[Arrival]) -> list[Arrival]:
    """Return a turn that calls a tool and, long after it, the next one."""
    by_name = {turn.request_id: turn for turn in turns}
    calls = by_name[CALLS]
    tag = with_tool_turn(None, ToolTurn("agent", "session", 0))
    calls = replace(calls, sampling=calls.sampling | {"extra_args": tag})
    return [calls, replace(by_name[COMES_BACK], step=COMES_BACK_AT)]


def loses_its_blocks(scheduler: Any, step: int) -> None:
    """Say that the turn has called a tool; by then others have had its blocks."""
    if step == CALLED_AT:
        scheduler.block_owner.blocks.forget_left()
        scheduler.keep_turns({CALLS: 3_600.0})


@LAYERS_ONLY
def test_what_waits_for_its_tool_is_in_the_pool_again_before_it_is_asked_for(
    runner: StepRunner, expected_turns: Outcome, turns: list[Arrival], hits: Hits,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    workload, counters = turns_of_an_agent(turns), runner.scheduler.block_owner.counters
    monkeypatch.setattr(runner.scheduler.control.resumes, "choose_way", lambda *_: ResumeWay.LOAD)
    before = counters.copy()

    hook = together(loses_its_blocks, copied_at_once(runner, monkeypatch))
    outcome = runner.run(workload, hook=hook)

    num_blocks = hits.num_blocks[COMES_BACK]
    assert num_blocks > 0
    assert counters.num_returned_blocks - before.num_returned_blocks == num_blocks
    assert counters.num_loaded_blocks - before.num_loaded_blocks == num_blocks  # the same
    assert counters.num_found_blocks - before.num_found_blocks == num_blocks
    assert outcome.tokens.items() <= expected_turns.tokens.items()
    runner.scheduler.release_session("agent", "session")
    assert_pool_is_whole(runner)


@LAYERS_ONLY
def test_what_is_left_before_its_copy_has_come_is_noticed(
    runner: StepRunner, expected_turns: Outcome, turns: list[Arrival], hits: Hits,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    workload, owner = turns_of_an_agent(turns), runner.scheduler.block_owner
    monkeypatch.setattr(runner.scheduler.control.resumes, "choose_way", lambda *_: ResumeWay.LOAD)
    begin = owner.returns._begin

    def as_if_it_were_there(columns: Any) -> None:
        begin(columns)
        for restore_id in list(owner.returns._returning.under_way):
            owner.orders.cancel_restore(restore_id)
            owner.returns.arrive([restore_id])

    monkeypatch.setattr(owner.returns, "_begin", as_if_it_were_there)
    hook = together(loses_its_blocks, copied_at_once(runner, monkeypatch))
    with faults.spoiling(faults.FaultyEngine):  # the guard is not asked
        outcome = runner.run(workload, hook=hook, check=False)

    assert outcome.tokens[CALLS] == expected_turns.tokens[CALLS]
    assert outcome.tokens[COMES_BACK] != expected_turns.tokens[COMES_BACK]
    runner.scheduler.release_session("agent", "session")


def is_other(name: str) -> bool:
    return name.startswith(OTHERS)
