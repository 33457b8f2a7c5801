"""Laws of every rule that places."""

import pytest

from lab.planning.snapshots import make_request, make_snapshot
from services.placement.place.all_resident import all_resident
from services.placement.step_time.batch import capacity_blocks
from services.placement.types import Placement, PlanStatus, RequestPhase
from tests.plans import offloaded, used_blocks
from tests.policies import RULES

OFFLOADING = [placing.rule for placing in RULES.values() if placing.rule is not all_resident]


def test_vllm_keeps_everything_resident_and_pauses_nobody_even_beyond_the_pool() -> None:
    held = make_request("held", phase=RequestPhase.PAUSED, paused_age_s=1.0)
    plan = all_resident(make_snapshot(make_request("long", 9_000), held, num_free_blocks=0))

    assert plan.status is PlanStatus.OPTIMAL
    assert plan.placements == (
        Placement(request_id=plan.placements[0].request_id),
        Placement(request_id=held.request_id),
    )


@pytest.mark.parametrize("policy", OFFLOADING, ids=lambda policy: policy.__name__)
@pytest.mark.parametrize("num_free_blocks", [10_000, 3_000, 1_300, 400, 0])
def test_no_baseline_exceeds_the_pool(policy, num_free_blocks) -> None:
    requests = [make_request(name, size) for name, size in (("a", 6_400), ("b", 3_201), ("c", 90))]
    snapshot = make_snapshot(*requests, num_free_blocks=num_free_blocks)

    plan = policy(snapshot)

    assert used_blocks(snapshot, plan) <= capacity_blocks(snapshot)
    paused = [placed.request_id for placed in plan.placements if placed.paused]
    assert paused == ["a", "b", "c"][len("abc") - len(paused) :]  # the newest first
    assert (plan.status is PlanStatus.INFEASIBLE) == bool(paused)


@pytest.mark.parametrize("policy", OFFLOADING, ids=lambda policy: policy.__name__)
def test_what_is_not_on_the_host_stays_resident(policy) -> None:
    snapshot = make_snapshot(
        make_request("a", num_host_blocks=()), make_request("b"), num_free_blocks=1_500
    )

    assert offloaded(policy(snapshot))[0] == 0
