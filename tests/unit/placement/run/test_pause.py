"""Whom to pause, and who must run."""

import pytest

from lab.planning.snapshots import make_request, make_snapshot
from services.placement.run.pause import (
    is_protected,
    longest_paused,
    must_stay_paused,
    ranked_victims,
)
from services.placement.types import PolicyParameters, RequestPhase, VictimRule

PARAMETERS = PolicyParameters(min_pause_s=1.0, max_pause_s=5.0)


def held(name: str, age_s: float, **overrides):
    return make_request(name, phase=RequestPhase.PAUSED, paused_age_s=age_s, **overrides)


@pytest.mark.parametrize(
    ("age_s", "completion_s", "expected"),
    [(0.9, None, True), (1.0, None, False), (0.9, 0.8, False), (0.9, 0.9, True)],
)
def test_a_pause_lasts_unless_a_request_completed_since(age_s, completion_s, expected) -> None:
    request = held("a", age_s)
    snapshot = make_snapshot(
        request, last_completion_age_s=completion_s, min_pause_s=1.0, max_pause_s=5.0
    )

    assert must_stay_paused(request, snapshot) is expected
    assert not must_stay_paused(make_request("running"), snapshot)


@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        (held("a", 4.9), False),
        (held("a", 5.0), True),
        (make_request("a"), False),
        (make_request("a", resumed_age_s=0.9), True),
        (make_request("a", resumed_age_s=1.0), False),
        (make_request("a", phase=RequestPhase.PREFILL), True),
    ],
)
def test_who_may_not_be_paused_for_an_slo(request_, expected) -> None:
    assert is_protected(request_, PARAMETERS) is expected


REQUESTS = [
    make_request("large", 3_000),
    make_request("small", 1_000),
    make_request("rich", 2_950, num_output_tokens=60, num_deposited_tokens=60),
]


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        (VictimRule.KV_AND_DEPOSIT, ["rich", "large", "small"]),  # 3010, 3000, 1000
        (VictimRule.LONGEST, ["large", "rich", "small"]),
        (VictimRule.SHORTEST, ["small", "rich", "large"]),
    ],
)
def test_victims_are_ranked_by_the_rule(rule, expected) -> None:
    assert [r.request_id for r in ranked_victims(REQUESTS, rule, seed=0)] == expected
    assert [r.request_id for r in ranked_victims(REQUESTS[::-1], rule, seed=0)] == expected


def test_less_important_requests_come_first_whatever_the_rule() -> None:
    batch = [*REQUESTS, make_request("background", 10, priority=1)]
    for rule in VictimRule:
        assert ranked_victims(batch, rule, seed=0)[0].request_id == "background"


def test_the_random_order_is_the_seeds_and_not_the_batchs() -> None:
    orders = {
        seed: tuple(r.request_id for r in ranked_victims(REQUESTS, VictimRule.RANDOM, seed=seed))
        for seed in range(20)
    }
    again = ranked_victims(REQUESTS[::-1], VictimRule.RANDOM, seed=4)

    assert tuple(r.request_id for r in again) == orders[4]
    assert len(set(orders.values())) > 3


def test_the_longest_paused_resumes_first_among_equals() -> None:
    assert longest_paused([held("a", 1.0), held("b", 3.0)]).request_id == "b"
    assert longest_paused([held("a", 1.0), held("b", 3.0, priority=1)]).request_id == "a"
