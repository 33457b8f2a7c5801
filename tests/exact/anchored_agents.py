"""Agents whose models have windows and states: where their prompts ended, and while tools run.

The tests run on the engines of `test_kinds.py`, which imports them; stock vLLM answers without any
prefix caching.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from lab.engine.conversations import NUM_ANSWER_TOKENS, NUM_CONVERSATIONS, STEPS_PER_TURN
from lab.engine.step_runner import Arrival, first_difference
from lab.engine.workloads import churn, together
from services.executor.blocks.transfers import transfers
from services.executor.request_tag import ToolTurn, with_tool_turn
from tests.exact.anchored_turns import (
    SPREAD,
    TWO_KINDS,
    Begun,
    Named,
    expected_of,
    follow_ups,
)
from tests.exact.cached_prefixes import room_for
from tests.exact.evidence import assert_pool_is_whole
from tests.exact.scenes import copies_complete, readings

ANCHOR_METRICS = frozenset(  # which an engine without windows and states never moves
    f"kv_num_{name}" for name in ("anchors", "published_anchors", "anchor_hits", "evicted_anchors")
)
CALLS, COMES_BACK = "c0.0", "c0.1"  # an agent's turns, before and behind its tool's time
OTHERS = tuple(f"c{number}." for number in range(1, NUM_CONVERSATIONS))
NUM_COLUMNS = 40  # of the host; what others leave meanwhile is more


def of_agents(turns: Sequence[Arrival]) -> list[Arrival]:
    """Return turns that may end with tool calls, each long after the one before it."""
    extra_args = with_tool_turn({}, ToolTurn("alice", "", 0))
    spread = [replace(turn, step=SPREAD * turn.step) for turn in turns]
    return [replace(turn, sampling={"extra_args": extra_args}) for turn in spread]


def prompts_before(turns: Sequence[Arrival]) -> dict[str, int]:
    """Return the tokens of the prompt of the turn before each one behind a first one."""
    return {name: number - NUM_ANSWER_TOKENS for name, number in follow_ups(turns).items()}


def test_turns_of_agents_begin_where_the_last_prompt_ended_if_its_answer_is_not_theirs(
    named: Named, begun: Begun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it is not where a template writes it anew: here nothing is left of answers."""
    _, runner = named
    expected, turns = expected_of(named)
    turns = of_agents(turns)
    monkeypatch.setattr(runner.scheduler.transfers.turn_ends, "end", lambda *_: None)

    outcome = runner.run(turns, hook=together(churn(1, share=0.2), copies_complete))

    assert first_difference(expected, outcome) == {}
    found, lengths = begun.num_tokens, {turn.request_id: len(turn.prompt) for turn in turns}
    befores = prompts_before(turns)
    # One that is preempted finds what it has left itself.
    assert found == {name: befores.get(name, lengths[name]) for name in found}
    assert befores.keys() <= found.keys()
    assert_pool_is_whole(runner)


@TWO_KINDS
def test_turns_of_agents_begin_where_the_last_one_ended_if_they_can(
    named: Named, begun: Begun
) -> None:
    """An answer leaves its anchor, too, which is further on; copies take their time."""
    _, runner = named
    expected, turns = expected_of(named)
    turns = of_agents(turns)

    outcome = runner.run(turns, hook=churn(1, share=0.2))

    assert first_difference(expected, outcome) == {}
    ends = {name: number - 1 for name, number in follow_ups(turns).items()}
    further_on = {name for name in ends if begun.num_tokens.get(name) == ends[name]}
    assert len(further_on) >= len(ends) // 2
    assert_pool_is_whole(runner)


@pytest.mark.parametrize("named", ["granite4"], indirect=True)
def test_anchors_are_counted(named: Named, begun: Begun, monkeypatch: pytest.MonkeyPatch) -> None:
    _, runner = named
    monkeypatch.setattr(transfers, "STEPS_PER_STATS", 1)
    _, turns = expected_of(named)
    with room_for(runner, 60), readings(runner) as taken:
        runner.run(of_agents(turns), hook=copies_complete)

    for name in ANCHOR_METRICS:
        assert len({reading.get(name, 0.0) for reading in taken}) > 1, name


@TWO_KINDS
@pytest.mark.parametrize("keeps", [True, False], ids=["kept", "not kept"])
def test_a_turn_that_waits_for_its_tool_comes_back_to_its_anchor(
    named: Named, begun: Begun, keeps: bool
) -> None:
    """Others go through a small host meanwhile."""
    _, runner = named
    expected, turns = expected_of(named)
    by_name = {turn.request_id: turn for turn in turns}
    names = [name for name in sorted(by_name) if name.startswith(OTHERS)]
    others = [replace(by_name[one], step=STEPS_PER_TURN * n) for n, one in enumerate(names, 1)]
    extra_args = with_tool_turn(None, ToolTurn("agent", "session", 0))
    workload = [
        replace(by_name[CALLS], sampling={"extra_args": extra_args}),
        *others,
        replace(by_name[COMES_BACK], step=others[-1].step + STEPS_PER_TURN),
    ]
    kept: list[int] = []

    def front(scheduler: Any, step: int) -> None:
        if keeps and step and not kept and CALLS not in scheduler.requests:
            scheduler.keep_turns({CALLS: 3_600.0})
            kept.append(step)

    with room_for(runner, NUM_COLUMNS):
        outcome = runner.run(workload, hook=together(front, copies_complete))
        runner.scheduler.release_session("agent", "session")

    assert (begun.num_tokens.get(COMES_BACK) == follow_ups(turns)[COMES_BACK] - 1) == keeps
    assert outcome.tokens.items() <= expected.tokens.items()
    assert_pool_is_whole(runner)
