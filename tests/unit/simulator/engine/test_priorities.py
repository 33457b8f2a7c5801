"""Requests of several priorities over a whole run: which wait, for how long, and at what cost."""

import random
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from services.placement.run.evenflow import decide
from services.placement.run.evenflow_rules import EvenflowRules
from services.placement.run.types import RunDecision, RunSnapshot
from services.placement.types import EngineShape, RequestId
from simulator.compose import make_engine
from simulator.device.costs import LinearCosts
from simulator.engine.engine import Machine
from simulator.engine.planning import PlanningOptions
from simulator.engine.records import Outcome, RunRecord
from simulator.engine.simulation import simulate
from simulator.workload import ArrivingRequest
from tests.fuzz import examples

RULES = EvenflowRules(raised_after_s=12.0, raised_turn_s=3.0)
SHAPE = EngineShape(
    num_layers=4,
    layers_per_group=4,
    block_size=16,
    num_blocks=24,  # 384 tokens
    block_bytes=1_000,
    max_num_seqs=8,
    max_num_batched_tokens=512,
    num_host_blocks=2_000,
)
STEP_S = 0.1
MACHINE = Machine(
    costs=LinearCosts(layer_base_s=STEP_S / 4, per_token_s=2.5e-4), link_bytes_per_s=1e9
)
WAY_S = 10.0  # most of what a turn takes beside itself: others leave, the request comes back


def asked(name: str, at_s: float, *, output: int, priority: int, prompt: int) -> ArrivingRequest:
    return ArrivingRequest(
        request_id=RequestId(name),
        arrival_s=at_s,
        num_prompt_tokens=prompt,
        num_output_tokens=output,
        priority=priority,
    )


def run(
    requests: list[ArrivingRequest],
    rules: EvenflowRules = RULES,
    *,
    num_blocks: int = SHAPE.num_blocks,
) -> RunRecord:
    """Return what happens; no less urgent request may leave without its full blocks on the host."""

    def noting_losses(snapshot: RunSnapshot) -> RunDecision:
        decision = decide(snapshot, rules)
        for one in snapshot.requests:
            if one.request_id in decision.park and one.priority:
                assert one.num_computed_tokens - one.num_host_tokens <= SHAPE.block_size
        return decision

    shape = replace(SHAPE, num_blocks=num_blocks)
    engine = make_engine(shape, MACHINE, PlanningOptions(policy="evenflow"))
    assert engine.loop.admission is not None
    engine.loop.admission._policy = noting_losses
    return simulate(engine, requests)


def longest_wait_s(outcome: Outcome) -> float:
    instants = (outcome.arrival_s, *outcome.generated_s)
    return max(b - a for a, b in pairwise(instants))


def urgent_stream(gap_s: float, num: int, *, prompt: int = 100) -> list[ArrivingRequest]:
    return [
        asked(f"u{n}", gap_s * n, output=25, priority=0, prompt=prompt + 7 * (n % 5))
        for n in range(num)
    ]


def busy_until(record: RunRecord) -> float:
    """Return until when some urgent request waits or runs."""
    return max(o.generated_s[-1] for o in record.outcomes if o.request_id.startswith("u"))


@pytest.mark.parametrize("seed", range(3))
def test_a_less_urgent_request_waits_no_longer_than_is_said(seed: int) -> None:
    """More urgent ones come than the pool holds, all the time."""
    rng = random.Random(seed)
    gap_s = rng.uniform(0.4, 0.8)
    low = [
        asked(f"low{n}", 2.0 * n, output=25, priority=n + 1, prompt=rng.randint(20, 120))
        for n in range(1 + seed)
    ]
    record = run([*urgent_stream(gap_s, 60), *low], num_blocks=rng.randint(20, 30))
    ended = {outcome.request_id: outcome for outcome in record.outcomes}

    bound_s = RULES.raised_after_s + len(low) * (RULES.raised_turn_s + WAY_S)
    assert max(longest_wait_s(ended[one.request_id]) for one in low) <= bound_s
    assert all(len(o.generated_s) == o.num_output_tokens for o in record.outcomes)


LOW = st.fixed_dictionaries(
    {
        "at_s": st.floats(0.0, 5.0),
        "output": st.integers(1, 40),
        "priority": st.integers(1, 3),
        "prompt": st.integers(1, 100),
    }
)


ONE_LOW = {"at_s": 1.0, "output": 20, "priority": 1, "prompt": 50}


@settings(max_examples=examples(1))
@example(gap_s=0.7, prompt=120, low=[ONE_LOW], num_blocks=22)  # it waits for the end, unraised
@given(
    gap_s=st.floats(0.5, 0.9),
    prompt=st.integers(90, 150),
    low=st.lists(LOW, min_size=1, max_size=2),
    num_blocks=st.integers(20, 26),  # two or three of the urgent
)
def test_over_any_history_a_less_urgent_request_is_raised_in_time_and_ends(
    gap_s: float, prompt: int, low: list[dict[str, Any]], num_blocks: int
) -> None:
    """Its bound has what an urgent one of its age would wait: what it waits if all are alike."""
    urgent = urgent_stream(gap_s, 40, prompt=prompt)
    requests = [*urgent, *(asked(f"low{n}", **one) for n, one in enumerate(low))]
    record = run(requests, num_blocks=num_blocks)
    alike = run([replace(one, priority=0) for one in requests], num_blocks=num_blocks)

    assert all(len(o.generated_s) == o.num_output_tokens for o in record.outcomes)
    of_its_age_s = {o.request_id: longest_wait_s(o) for o in alike.outcomes}
    turns_s = RULES.raised_after_s + len(low) * (RULES.raised_turn_s + WAY_S)
    for outcome in record.outcomes:
        if outcome.request_id.startswith("low"):
            assert longest_wait_s(outcome) <= turns_s + of_its_age_s[outcome.request_id]


def test_a_low_answer_yields_and_ends_under_a_stream_and_without_turns_only_after_it() -> None:
    low = asked("low", 0.0, output=90, priority=1, prompt=60)
    requests = [*urgent_stream(0.5, 80), low]
    with_turns = run(requests)
    without = run(requests, EvenflowRules(raised_after_s=1e9))

    def end_of_low(record: RunRecord) -> float:
        (outcome,) = [o for o in record.outcomes if o.request_id == "low"]
        return outcome.generated_s[-1]

    (yields,) = [o for o in with_turns.outcomes if o.request_id == "low"]
    assert yields.num_preemptions >= 2
    assert end_of_low(with_turns) < busy_until(with_turns)
    assert end_of_low(without) > busy_until(without)


def test_urgent_requests_wait_no_longer_for_those_that_are_less_urgent() -> None:
    urgent = urgent_stream(2.0, 40)
    low = [asked(f"low{n}", 0.0, output=40, priority=1, prompt=80) for n in range(12)]

    def first_s(requests: list[ArrivingRequest]) -> float:
        waits = [
            o.generated_s[0] - o.arrival_s
            for o in run(requests).outcomes
            if o.request_id.startswith("u")
        ]
        return sum(waits) / len(waits)

    alone_s, beside_s = first_s(urgent), first_s([*urgent, *low])
    alike = [asked(r.request_id, 0.0, output=40, priority=0, prompt=80) for r in low]
    assert beside_s <= alone_s + 5 * STEP_S
    assert first_s([*urgent, *alike]) > 2 * beside_s


@pytest.mark.parametrize("priority", [-3, 7])
def test_where_all_are_alike_a_run_is_the_same(priority: int) -> None:
    requests = urgent_stream(0.5, 30)
    others = [
        asked(
            r.request_id,
            r.arrival_s,
            output=r.num_output_tokens,
            priority=priority,
            prompt=r.num_prompt_tokens,
        )
        for r in requests
    ]
    assert run(others) == run(requests)
