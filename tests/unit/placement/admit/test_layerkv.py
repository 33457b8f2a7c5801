"""LayerKV's Algorithm 1 on numbers that can be followed by hand."""

from dataclasses import replace

import pytest

from services.placement.admit.layerkv import (
    AdmissionRules,
    allow_s,
    num_admitted,
    with_slo_aware_admission,
)
from services.placement.run.papers import fcfs
from services.placement.run.types import RunRequest, RunSnapshot, StepCosts
from tests.unit.placement.run.snapshots import ask, make_snapshot, runs

STEP_S = 0.1
# A decode step takes 0.1 s, a prompt's token 1 ms.
COSTS = StepCosts(
    outside_s=0.0,
    base_s=STEP_S,
    token_s=0.0,
    context_s=0.0,
    chunk_base_s=0.0,
    chunk_token_s=1e-3,
)
PROMPTS = [ask(name, 800, age_s=age_s) for name, age_s in (("a", 3.0), ("b", 2.0), ("c", 1.0))]


def decoding(name: str = "d", *, decoding_s: float = 1.0) -> RunRequest:
    """Return one with 11 tokens, of at least 20, that may take 0.2 s each."""
    return runs(
        name,
        100,
        num_output_tokens=11,
        rate_tps=5.0,
        decoding_s=decoding_s,
        least_answer_tokens=20,
        num_computed_tokens=110,
    )


def snapshot(*requests: RunRequest) -> RunSnapshot:
    return make_snapshot(*requests, costs=COSTS)


def test_what_one_can_bear_is_what_is_promised_less_what_it_takes() -> None:
    # N_past = 10 and N_future = 9, T_past = 1 s and T_future = 0.9 s.
    assert allow_s(decoding(), STEP_S) == pytest.approx(0.2 * 19 - 1.9)


def test_prompts_begin_as_long_as_all_of_them_take_less() -> None:
    assert num_admitted(snapshot(decoding(), *PROMPTS)) == 2  # 0.8 and 1.6 of 1.9 s


def test_prompts_under_way_are_charged() -> None:
    under_way = replace(
        runs("u", 1_000), num_output_tokens=0, num_computed_tokens=700, num_host_tokens=0
    )

    assert num_admitted(snapshot(decoding(), under_way, *PROMPTS)) == 1  # 0.3 and 0.8
    assert num_admitted(snapshot(decoding(), replace(under_way, num_computed_tokens=0))) == 0


def test_one_that_is_late_whatever_happens_does_not_stop_the_queue_for_good() -> None:
    late = decoding("late", decoding_s=60.0)

    assert num_admitted(snapshot(decoding(), late, *PROMPTS)) == 1
    assert num_admitted(snapshot(late, *PROMPTS)) == 1


def test_as_printed_it_does() -> None:
    late = decoding("late", decoding_s=60.0)

    assert num_admitted(snapshot(late, *PROMPTS), AdmissionRules(counts_hopeless=True)) == 0


def test_who_states_no_rate_can_bear_anything_and_an_idle_engine_takes_all() -> None:
    assert num_admitted(snapshot(replace(decoding(), rate_tps=0.0), *PROMPTS)) == 3
    assert num_admitted(snapshot(*PROMPTS)) == 3


def test_nobody_is_kept_out_before_a_prompt_was_measured() -> None:
    unmeasured = replace(COSTS, chunk_token_s=0.0)

    assert num_admitted(make_snapshot(decoding(), *PROMPTS, costs=unmeasured)) == 3


def test_a_run_policy_takes_in_no_more_than_that_and_is_asked_again_soon() -> None:
    decide = with_slo_aware_admission(fcfs.streams)

    decision = decide(snapshot(decoding(), *PROMPTS))

    assert decision.run == ("d", "a", "b")
    assert decision.offloads
    assert decision.valid_for_s == AdmissionRules().interval_s
    assert decide(snapshot(decoding(), *PROMPTS[:2])).valid_for_s == float("inf")
