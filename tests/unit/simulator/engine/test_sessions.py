"""Sessions in virtual time: steps come as those before them end, and find what was said."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lab.policies.presets import full_name
from services.placement.types import EngineShape, RequestId
from simulator.compose import make_engine
from simulator.device.costs import LinearCosts
from simulator.engine.engine import Engine
from simulator.engine.machine import Machine
from simulator.engine.planning import PlanningOptions
from simulator.engine.simulation import simulate
from simulator.sessions import AgentSessions, Conversation, draw_sessions, num_known_tokens

SHAPE = EngineShape(
    num_layers=4,
    layers_per_group=1,
    block_size=4,
    num_blocks=4 * 2_000,
    block_bytes=1_000,
    max_num_seqs=8,
    max_num_batched_tokens=64,
    num_host_blocks=4 * 4_000,
    max_model_len=2_000,
)
SMALL = AgentSessions(
    num_steps=4,
    mean_prompt_tokens=90.0,
    seen_frac=0.65,
    answer_tokens=6.0,
    shared_tokens=12,
    session_gap_s=20.0,
    pause_s=30.0,
    branch_frac=0.4,
    subagent_frac=0.3,
)


def make(policy: str = "vllm", **shape: int) -> Engine:
    costs = LinearCosts(layer_base_s=0.01, per_token_s=0.001, outside_step_s=0.01)
    machine = Machine(costs=costs, link_bytes_per_s=1e6, chunk_bytes=1_000)
    return make_engine(replace(SHAPE, **shape), machine, PlanningOptions(policy=policy))


@given(
    seed=st.integers(0, 100),
    policy=st.sampled_from(["vllm", "evenflow"]),
    num_rows=st.sampled_from([150, 2_000]),
)
@settings(max_examples=8, deadline=None)
def test_each_step_begins_as_the_last_of_those_before_it_ends(
    seed: int, policy: str, num_rows: int
) -> None:
    steps = draw_sessions(SMALL, 2, seed=seed)
    engine = make(policy, num_blocks=4 * num_rows)

    record = simulate(engine, steps, after_event=lambda event: engine.check_integrity())

    ended = {one.request_id: one for one in record.outcomes}
    assert ended.keys() == {one.request_id for one in steps}
    for one in steps:
        ends_s = [
            ended[other].generated_s[-1] for other in one.follows if not ended[other].rejected
        ]
        if one.follows and len(ends_s) == len(one.follows):
            assert ended[one.request_id].arrival_s == max(ends_s) + one.wait_s


def test_a_pool_that_holds_everything_finds_what_a_plain_account_of_blocks_does() -> None:
    steps = draw_sessions(SMALL, 3, seed=4)
    engine = make()

    record = simulate(engine, steps)

    by_id = {one.request_id: one for one in steps}
    in_order = sorted(record.outcomes, key=lambda one: one.arrival_s)
    known = num_known_tokens([by_id[one.request_id] for one in in_order], SHAPE.block_size)
    assert {one.request_id: one.num_cached_tokens for one in in_order} == known
    assert sum(known.values()) > 1_000
    num_needed = sum(one.num_prompt_tokens + one.num_output_tokens - 1 for one in in_order)
    assert record.totals.num_computed_tokens == num_needed - sum(known.values())


def test_a_request_that_is_refused_ends_too() -> None:
    conversation = Conversation(name="c", begins_s=5.0)
    steps = [conversation.step("c.0", 9_000, 4), conversation.step("c.1", 4, 4, wait_s=2.0)]

    first, second = simulate(make(), [steps[0], replace(steps[1], num_prompt_tokens=8)]).outcomes

    assert first.rejected
    assert (second.arrival_s, second.rejected) == (7.0, False)


def test_a_reader_that_leaves_ends_its_step() -> None:
    conversation = Conversation(name="c")
    first = replace(conversation.step("c.0", 40, 50), leaves_after=3)
    ended, next_one = simulate(make(), [first, conversation.step("c.1", 4, 4)]).outcomes

    assert len(ended.generated_s) < 50
    assert next_one.arrival_s >= ended.generated_s[2]


def test_what_follows_a_request_that_there_is_not_is_named() -> None:
    step = Conversation(name="c", follows=(RequestId("gone"),)).step("c.1", 4, 4)

    with pytest.raises(ValueError, match=r"that there are not: c\.1"):
        simulate(make(), [step])


@pytest.mark.parametrize("policy", ["vllm", "evenflow", full_name("vllm-offloading")])
def test_the_same_sessions_give_the_same_run(policy) -> None:
    steps = draw_sessions(SMALL, 2, seed=7)

    one, other = (simulate(make(policy, num_blocks=4 * 200), steps) for _ in range(2))

    assert one == other
