"""Steps that verify drafts: what they bring, take and leave room for."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.placement.types import EngineShape, RequestId
from simulator.compose import make_engine
from simulator.device.costs import LinearCosts
from simulator.device.drafts import Drafts
from simulator.engine.engine import Engine
from simulator.engine.events import Event
from simulator.engine.machine import Machine
from simulator.engine.planning import PlanningOptions
from simulator.engine.records import RunRecord
from simulator.engine.simulation import simulate
from simulator.workload import ArrivingRequest
from tests.fuzz import examples

POLICIES = ("vllm", "evenflow", "orbitflow", "tokenflow", "layerkv")
SHAPE = EngineShape(
    num_layers=4,
    layers_per_group=1,
    block_size=4,
    num_blocks=400,
    block_bytes=1_000,
    max_num_seqs=4,
    max_num_batched_tokens=64,
    num_host_blocks=4_000,
    max_model_len=400,
)
STEP_S = 4.5  # of four layers, and half a second beside them


def asked(name: str, *, at_s: float = 0.0, prompt: int, output: int, **more: Any):
    return ArrivingRequest(
        request_id=RequestId(name),
        arrival_s=at_s,
        num_prompt_tokens=prompt,
        num_output_tokens=output,
        **more,
    )


def drafting(
    drafts: Drafts | None, *, policy: str = "vllm", token_s: float = 0.0, **shape: int
) -> Engine:
    ahead = drafts.max_ahead_tokens if drafts else 0
    costs = LinearCosts(layer_base_s=1.0, per_token_s=token_s, outside_step_s=0.5)
    return make_engine(
        replace(SHAPE, **({"max_ahead_tokens": ahead} | shape)),
        Machine(costs=costs, link_bytes_per_s=10_000.0, chunk_bytes=1_000, drafts=drafts),
        PlanningOptions(policy=policy),
    )


def run(engine: Engine, requests: Sequence[ArrivingRequest]) -> RunRecord:
    def check(event: Event) -> None:
        engine.check_integrity()

    return simulate(engine, requests, after_event=check)


def three(acceptance: float, **more: float) -> Drafts:
    return Drafts(num_drafts=3, acceptance=acceptance, **more)


def test_a_step_brings_what_is_drafted_right_and_one_more() -> None:
    (all_right,) = run(drafting(three(1.0)), [asked("a", prompt=4, output=7)]).outcomes
    (none_right,) = run(drafting(three(0.0)), [asked("a", prompt=4, output=7)]).outcomes

    # The prompt's token, which nothing drafts; four of a step; the answer ends within the next.
    assert all_right.generated_s == (STEP_S, *[2 * STEP_S] * 4, *[3 * STEP_S] * 2)
    assert none_right.generated_s == tuple(step * STEP_S for step in range(1, 8))


def test_drafts_are_computed_and_made() -> None:
    # A step that decodes has 4 rows of 0.1 s in each of 4 layers; drafting takes a tenth of them.
    requests = [asked("a", prompt=1, output=5)]
    (plain,) = run(drafting(three(1.0), token_s=0.1), requests).outcomes
    (dear,) = run(drafting(three(1.0, cost_frac=0.1), token_s=0.1), requests).outcomes

    prompt_s, decode_s = 4 * 1.1 + 0.5, 4 * 1.4 + 0.5
    assert plain.generated_s[-1] == pytest.approx(prompt_s + decode_s)
    assert dear.generated_s[-1] == pytest.approx(prompt_s + decode_s + 0.1 * 4 * (1.1 + 1.4))


def test_a_step_has_as_many_drafts_as_its_tokens_allow() -> None:
    # Of 6 tokens "a" takes 4, its drafts included, so that "b" has 2: of its prompt, the prompt's
    # last one, its next one and a draft; then "a" has ended.
    requests = [asked("a", prompt=3, output=13), asked("b", prompt=3, output=9)]
    record = run(drafting(three(1.0), max_num_batched_tokens=6), requests)
    first, second = (
        [one.generated_s.count(step * STEP_S) for step in range(1, 7)]
        for one in sorted(record.outcomes, key=lambda one: one.request_id)
    )

    assert first == [1, 4, 4, 4, 0, 0]
    assert second == [0, 0, 1, 2, 4, 2]


def test_a_reader_leaves_with_a_token_in_the_middle_of_a_burst() -> None:
    engine = drafting(three(1.0))
    (left,) = run(engine, [asked("a", prompt=4, output=40, leaves_after=7)]).outcomes

    assert len(left.read_s) == 7
    assert len(left.generated_s) == 13  # its request goes after the step that was under way


def test_policies_see_the_tokens_per_step_that_were_measured() -> None:
    drafts = three(0.7)
    engine = drafting(drafts)
    run(engine, [asked(str(n), at_s=n, prompt=5, output=300) for n in range(4)])
    ledger = engine.loop.ledger.tokens_per_step

    assert drafts.tokens_per_step == pytest.approx(1 + 0.7 + 0.49 + 0.343)
    assert ledger.mean == pytest.approx(drafts.tokens_per_step, rel=0.15)


def test_an_answer_is_drafted_alike_under_every_policy() -> None:
    requests = [asked(str(n), at_s=3.0 * n, prompt=9, output=60) for n in range(3)]

    def bursts(policy: str) -> dict[str, list[int]]:
        record = run(drafting(three(0.6), policy=policy), requests)
        return {
            one.request_id: [one.generated_s.count(t) for t in dict.fromkeys(one.generated_s)]
            for one in record.outcomes
        }

    assert bursts("vllm") == bursts("evenflow") == bursts("orbitflow")


def test_requests_that_only_fit_without_room_for_drafts_are_rejected() -> None:
    # 16 tokens fill 4 blocks in each of 4 groups; drafts need another one.
    requests = [asked("a", prompt=10, output=6)]
    fits = run(drafting(None, num_blocks=16, num_host_blocks=0), requests)
    lacks = run(drafting(three(1.0), num_blocks=16, num_host_blocks=0), requests)

    assert [one.rejected for one in (*fits.outcomes, *lacks.outcomes)] == [False, True]


WORKLOADS = st.lists(
    st.tuples(st.floats(0.0, 60.0), st.integers(1, 90), st.integers(1, 60)), min_size=1, max_size=7
)


def requests_of(workload: list[tuple[float, int, int]]) -> list[ArrivingRequest]:
    return [
        asked(f"r{number}", at_s=at_s, prompt=prompt, output=output)
        for number, (at_s, prompt, output) in enumerate(workload)
    ]


@settings(max_examples=examples(15))
@given(
    WORKLOADS,
    st.sampled_from(POLICIES),
    st.sampled_from([0.0, 0.5, 0.8, 1.0]),
    st.sampled_from([1, 3, 5]),
    st.integers(30, 100),
)
def test_nothing_is_lost_whatever_is_drafted(
    workload, policy, acceptance, num_drafts, num_rows
) -> None:
    drafts = Drafts(num_drafts=num_drafts, acceptance=acceptance)
    requests = requests_of(workload)
    record = run(drafting(drafts, policy=policy, num_blocks=4 * num_rows), requests)

    assert len(record.outcomes) == len(requests)
    for one in record.outcomes:
        assert one.rejected or len(one.generated_s) == one.num_output_tokens
        assert list(one.generated_s) == sorted(one.generated_s)


@settings(max_examples=examples(15))
@given(WORKLOADS, st.integers(30, 100))
def test_drafts_that_are_never_right_and_cost_nothing_change_nothing(workload, num_rows) -> None:
    """With no room of their own, to the bit."""
    shape = {"num_blocks": 4 * num_rows, "max_num_batched_tokens": 512, "max_ahead_tokens": 0}
    without, wrong = (
        run(drafting(drafts, **shape), requests_of(workload)) for drafts in (None, three(0.0))
    )

    assert wrong.outcomes == without.outcomes
    assert wrong.totals == without.totals
