"""Who is paused, why, and for how long."""

import dataclasses

import pytest

from lab.planning.snapshots import make_request, make_snapshot
from services.placement.types import (
    PlanStatus,
    RequestPhase,
    Snapshot,
    VictimRule,
)
from services.planner.policy.problem import without_hopeless
from tests.planning import GOOD, paused, plan_of

pytestmark = pytest.mark.timeout(3_600)  # the first run compiles the kernels


def tight_pair(**overrides: object) -> Snapshot:
    """Two requests that meet 40 ms together only if everything were resident."""
    requests = [
        make_request("long", 24_000, slo_tbt_s=0.04, **overrides),
        make_request("short", 8_000, slo_tbt_s=0.04, **overrides),
    ]
    return make_snapshot(*requests, num_free_blocks=9_000, alpha=0.0)


def test_an_slo_that_all_cannot_keep_pauses_the_largest() -> None:
    plan = plan_of(tight_pair())

    assert paused(plan) == ["long"]
    assert plan.status in GOOD
    assert plan.quality is not None
    assert plan.quality.serve_all is PlanStatus.INFEASIBLE
    assert plan.quality.latency_s <= 0.04


def test_without_pause_the_slo_yields_and_the_plan_says_so() -> None:
    snapshot = tight_pair()
    open_ended = dataclasses.replace(snapshot.parameters, pause=False)

    plan = plan_of(dataclasses.replace(snapshot, parameters=open_ended))

    assert (paused(plan), plan.status) == ([], PlanStatus.INFEASIBLE)


def test_a_request_without_an_slo_adds_no_bound() -> None:
    snapshot = tight_pair()
    free = tuple(dataclasses.replace(r, slo_tbt_s=None) for r in snapshot.requests)

    plan = plan_of(dataclasses.replace(snapshot, requests=free))

    assert (paused(plan), plan.status in GOOD) == ([], True)


def test_tpot_stands_in_where_tbt_is_absent() -> None:
    snapshot = tight_pair()
    tpot = tuple(dataclasses.replace(r, slo_tbt_s=None, slo_tpot_s=0.04) for r in snapshot.requests)

    assert paused(plan_of(dataclasses.replace(snapshot, requests=tpot))) == ["long"]


def test_deposited_tokens_back_a_slower_step_unless_deposit_is_off() -> None:
    # Each has 60 deposited tokens * 40 ms = 2.4 s of cover.
    backed = tight_pair(num_deposited_tokens=60)
    off = dataclasses.replace(backed.parameters, deposit=False)

    assert paused(plan_of(backed)) == []
    assert paused(plan_of(dataclasses.replace(backed, parameters=off))) == ["long"]


@pytest.mark.parametrize(("num_requests", "expected"), [(4, True), (1, False)])
def test_alpha_lets_one_reader_miss_only_in_a_batch_larger_than_it(num_requests, expected) -> None:
    # r0 asks for a step as it has with all in the pool, of which there is no room for four layers;
    # the others ask for nothing.
    requests = [make_request(f"r{i}", 24_000) for i in range(num_requests)]
    requests[0] = dataclasses.replace(requests[0], slo_tbt_s=0.0115)
    snapshot = make_snapshot(*requests, num_free_blocks=num_requests * 8_000, alpha=1.0)

    assert (plan_of(snapshot).status in GOOD) == expected


@pytest.mark.parametrize("alpha", [0.0, 1.0])
@pytest.mark.parametrize("num_claims", [1, 2])
def test_a_promise_that_nothing_could_keep_binds_nobody(alpha: float, num_claims: int) -> None:
    honest = [make_request(f"h{i}", slo_tbt_s=0.1) for i in range(6)]
    claims = [make_request(f"c{i}", 4_050, slo_tbt_s=1e-6) for i in range(num_claims)]

    plan = plan_of(make_snapshot(*honest, *claims, num_free_blocks=20_000, alpha=alpha))

    assert paused(plan) == []
    assert plan.status in GOOD


def test_a_promise_that_could_be_kept_alone_binds_others() -> None:
    # Alone and resident: 2 ms + 8 * (1 ms + 1,600 * 7 ns).
    alone_s = 2e-3 + 8 * (1e-3 + 1_600 * 7e-9)
    for slo_tbt_s, binds in [(alone_s * 1.001, True), (alone_s * 0.999, False)]:
        snapshot = make_snapshot(make_request("a", slo_tbt_s=slo_tbt_s))
        kept = without_hopeless(snapshot).requests[0].slo_tbt_s
        assert (kept == slo_tbt_s) == binds


@pytest.mark.parametrize(
    ("rule", "victim"),
    [
        (VictimRule.KV_AND_DEPOSIT, "b"),
        (VictimRule.LONGEST, "b"),
        (VictimRule.SHORTEST, "a"),
    ],
)
def test_the_victim_rule_says_who_is_paused(rule, victim) -> None:
    # Fully offloaded each needs one layer's blocks twice over; two of three fit, whoever they are.
    sizes = {"a": 9_600, "b": 12_800, "c": 11_200}
    requests = [make_request(name, size) for name, size in sizes.items()]
    snapshot = make_snapshot(*requests, num_free_blocks=1_650, victim_rule=rule)

    plan = plan_of(snapshot)

    assert paused(plan) == [victim]
    assert plan.quality is not None
    assert plan.quality.serve_all is PlanStatus.INFEASIBLE


def test_the_random_victim_follows_the_seed() -> None:
    requests = [make_request(name, 11_200) for name in "abcd"]
    snapshot = make_snapshot(*requests, num_free_blocks=2_300, victim_rule=VictimRule.RANDOM)
    victims = {seed: paused(plan_of(dataclasses.replace(snapshot, seed=seed))) for seed in range(8)}

    assert victims[3] == paused(plan_of(dataclasses.replace(snapshot, seed=3)))
    assert len({tuple(names) for names in victims.values()}) > 1


def test_a_request_larger_than_the_pool_is_paused_and_the_rest_runs() -> None:
    snapshot = make_snapshot(make_request("huge", 64_000), make_request("a"), num_free_blocks=1_000)

    assert paused(plan_of(snapshot)) == ["huge"]


def test_nothing_runs_where_nothing_fits() -> None:
    plan = plan_of(make_snapshot(make_request("huge", 64_000), num_free_blocks=1_000))

    assert paused(plan) == ["huge"]


def test_a_young_pause_holds_until_a_request_completes() -> None:
    held = make_request("h", phase=RequestPhase.PAUSED, paused_age_s=0.4)
    snapshot = make_snapshot(make_request("a"), held, min_pause_s=1.0)

    assert paused(plan_of(snapshot)) == ["h"]
    assert paused(plan_of(dataclasses.replace(snapshot, last_completion_age_s=0.5))) == ["h"]
    assert paused(plan_of(dataclasses.replace(snapshot, last_completion_age_s=0.3))) == []
    ripe = dataclasses.replace(held, paused_age_s=1.0)
    assert (
        paused(plan_of(dataclasses.replace(snapshot, requests=(snapshot.requests[0], ripe)))) == []
    )


def test_an_only_paused_batch_resumes_its_longest_paused_request() -> None:
    early = make_request("e", phase=RequestPhase.PAUSED, paused_age_s=0.5)
    late = make_request("l", phase=RequestPhase.PAUSED, paused_age_s=0.1)

    assert paused(plan_of(make_snapshot(late, early))) == ["l"]


def test_who_is_on_hold_is_not_resumed_even_where_nobody_else_is_left() -> None:
    held = make_request("h", phase=RequestPhase.PAUSED, paused_age_s=99.0, on_hold=True)
    early = make_request("e", phase=RequestPhase.PAUSED, paused_age_s=0.5)

    assert paused(plan_of(make_snapshot(held, early))) == ["h"]
    assert paused(plan_of(make_snapshot(held))) == ["h"]


@pytest.mark.parametrize(("age_s", "expected"), [(9.9, ["long"]), (10.0, ["short"])])
def test_after_max_pause_another_is_the_victim(age_s, expected) -> None:
    # Each alone keeps 40 ms or is protected; both together do not.
    snapshot = tight_pair()
    long = dataclasses.replace(
        snapshot.requests[0],
        phase=RequestPhase.PAUSED,
        paused_age_s=age_s,
        slo_tbt_s=0.5,
    )
    requests = (long, snapshot.requests[1])

    plan = plan_of(dataclasses.replace(snapshot, requests=requests))

    assert paused(plan) == expected


def test_who_was_just_resumed_is_not_paused_again_for_an_slo() -> None:
    snapshot = tight_pair()
    for age_s, expected in ((0.9, ["short"]), (1.0, ["long"])):
        resumed = dataclasses.replace(snapshot.requests[0], resumed_age_s=age_s, slo_tbt_s=0.5)
        plan = plan_of(dataclasses.replace(snapshot, requests=(resumed, snapshot.requests[1])))
        assert paused(plan) == expected
