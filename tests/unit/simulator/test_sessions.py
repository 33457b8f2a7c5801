"""Sessions of agents: what their steps begin with and follow, and what they are drawn by."""

import statistics
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulator.sessions import AgentSessions, Conversation, draw_sessions, num_known_tokens
from simulator.workload import ArrivingRequest

BLOCK = 16
SMALL = AgentSessions(
    num_steps=5,
    mean_prompt_tokens=900.0,
    seen_frac=0.7,
    answer_tokens=40.0,
    shared_tokens=64,
    branch_frac=0.4,
    subagent_frac=0.3,
)


def in_common(one: ArrivingRequest, other: ArrivingRequest) -> int:
    """Return how many leading tokens two requests have alike, in full blocks."""
    pairs = zip(one.block_keys(BLOCK), other.block_keys(BLOCK), strict=False)
    number = 0
    for here, there in pairs:
        if here != there:
            break
        number += BLOCK
    return number


def test_a_step_begins_with_all_that_was_said_and_follows_the_one_before_it() -> None:
    conversation = Conversation(name="c", begins_s=3.0)

    first = conversation.step("c.0", 100, 30)
    second = conversation.step("c.1", 50, 10, wait_s=7.0)

    assert (first.arrival_s, first.follows, first.num_prompt_tokens) == (3.0, (), 100)
    assert (second.follows, second.wait_s) == (("c.0",), 7.0)
    assert second.num_prompt_tokens == 100 + 30 + 50
    assert in_common(first, second) == 128  # of 130


def test_branches_have_what_was_said_before_them_and_no_more() -> None:
    trunk = Conversation(name="c")
    first = trunk.step("c.0", 100, 28)
    left, right = trunk.branch("l"), trunk.branch("r")
    one, other = left.step("l.0", 100, 10), right.step("r.0", 100, 10)
    goes_on = trunk.step("c.1", 100, 10)
    early = left.branch("e", 64).step("e.0", 200, 10)

    assert one.follows == other.follows == goes_on.follows == ("c.0",)
    assert in_common(one, other) == in_common(one, goes_on) == in_common(first, other) == 128
    assert in_common(early, one) == in_common(early, first) == 64
    assert early.branches_off == (("c", 64),)


def test_published_means_give_a_session_its_messages() -> None:
    given = AgentSessions()
    first, later = given.messages()

    prompts = [first + n * (later + given.answer_tokens) for n in range(given.num_steps)]
    assert statistics.fmean(prompts) == pytest.approx(154_000)
    num_new = first + (given.num_steps - 1) * later
    assert 1.0 - num_new / sum(prompts) == pytest.approx(0.96)


@pytest.mark.parametrize("num_steps", [20, 84])
def test_means_that_no_session_has_are_refused(num_steps) -> None:
    with pytest.raises(ValueError, match=f"no session of {num_steps} steps"):
        draw_sessions(replace(AgentSessions(), num_steps=num_steps), 1, seed=0)


def test_drawn_sessions_have_their_means() -> None:
    given = replace(AgentSessions(), tool_wait_s=(2.0, 4.0), pause_s=1e6).scaled(0.1)
    steps = draw_sessions(given, 25, seed=1)

    assert len(steps) == 25 * 40
    prompts = [one.num_prompt_tokens for one in steps]
    assert statistics.fmean(prompts) == pytest.approx(15_400, rel=0.15)
    assert statistics.fmean(one.num_output_tokens for one in steps) == pytest.approx(52, rel=0.1)
    later = [one for one in steps if one.follows]
    by_tool = sum(2.0 <= one.wait_s <= 4.0 for one in later)
    assert by_tool / len(steps) == pytest.approx(0.89, abs=0.03)
    seen = sum(num_known_tokens(steps, 4 * BLOCK).values())
    assert seen / sum(prompts) == pytest.approx(0.96, abs=0.02)


def test_the_step_behind_branches_and_sub_agents_waits_for_all() -> None:
    given = replace(SMALL, branch_frac=1.0, subagent_frac=1.0, num_branches=2)
    steps = {one.request_id: one for one in draw_sessions(given, 1, seed=0)}

    assert steps["s0.1"].follows == ("s0.0b0.1", "s0.0b1.1", "s0.0a.3")
    assert steps["s0.0b1.1"].follows == steps["s0.0a.0"].follows == ("s0.0",)
    assert steps["s0.0a.1"].follows == ("s0.0a.0",)
    assert in_common(steps["s0.0a.0"], steps["s0.0"]) == 64  # what all sessions begin with
    assert in_common(steps["s0.0b0.1"], steps["s0.0b1.1"]) > 64


def tokens_of(one: ArrivingRequest) -> list[object]:
    """Return a request's tokens: two are equal where the texts before them are."""
    bounds = [*one.branches_off, (one.conversation, one.num_prompt_tokens + one.num_output_tokens)]
    tokens: list[object] = []
    for text, end in bounds:
        tokens += [(text, place) for place in range(len(tokens), end)]
    return tokens


@given(
    seed=st.integers(0, 1_000),
    block_size=st.sampled_from([4, 16, 100]),
    branch_frac=st.sampled_from([0.0, 0.5, 1.0]),
    subagent_frac=st.sampled_from([0.0, 0.5]),
)
@settings(max_examples=30, deadline=None)
def test_blocks_are_alike_where_the_tokens_are(
    seed: int, block_size: int, branch_frac: float, subagent_frac: float
) -> None:
    """Two requests have a key in common exactly if they are the same up to the block's end."""
    given = replace(SMALL, branch_frac=branch_frac, subagent_frac=subagent_frac, num_steps=4)
    steps = draw_sessions(given.scaled(0.2), 2, seed=seed)

    by_key: dict[object, tuple[object, ...]] = {}
    for one in steps:
        tokens = tokens_of(one)
        assert len(tokens) == one.num_prompt_tokens + one.num_output_tokens
        for number, key in enumerate(one.block_keys(block_size)):
            before = tuple(tokens[: (number + 1) * block_size])
            assert by_key.setdefault(key, before) == before
    assert len(set(by_key.values())) == len(by_key)
