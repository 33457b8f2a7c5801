"""Laws of every rule that places."""

import pytest

from lab.planning.snapshots import make_prefix, make_request, make_snapshot
from services.placement.place.all_resident import all_resident
from services.placement.step_time.batch import capacity_blocks
from services.placement.types import Placement, PlanStatus, PrefixPlacement, RequestPhase
from tests.plans import offloaded, used_blocks
from tests.policies import RULES

OFFLOADING = [placing.rule for placing in RULES.values() if placing.rule is not all_resident]


def test_vllm_keeps_everything_resident_and_pauses_nobody_even_beyond_the_pool() -> None:
    held = make_request("held", phase=RequestPhase.PAUSED, paused_age_s=1.0)
    long = make_request("long", 9_000, prefix_ids=("t",))
    trunk = make_prefix("t", offloaded_layers=(1,), num_prefetch_buffers=1)
    plan = all_resident(make_snapshot(long, held, prefixes=(trunk,), num_free_blocks=0))

    assert plan.status is PlanStatus.OPTIMAL
    assert plan.prefixes == (PrefixPlacement(prefix_id=trunk.prefix_id),)
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
@pytest.mark.parametrize("num_free_blocks", [10_000, 3_000, 1_300, 400, 0])
def test_a_prefix_counts_once_beside_what_is_its_users_own(policy, num_free_blocks) -> None:
    # Of the pool "t" takes 8 * 300 blocks, "a" to "c" 8 * 51, 8 * 26 and 8 * 6.
    requests = [
        make_request(name, size, prefix_ids=prefixes)
        for name, size, prefixes in (("a", 800, ("t",)), ("b", 401, ("t", "u")), ("c", 90, ()))
    ]
    prefixes = (make_prefix("t", 4_800), make_prefix("u", 320), make_prefix("nobody", 320))
    snapshot = make_snapshot(*requests, prefixes=prefixes, num_free_blocks=num_free_blocks)

    plan = policy(snapshot)

    assert used_blocks(snapshot, plan) <= capacity_blocks(snapshot)
    assert [placed.prefix_id for placed in plan.prefixes] == ["t", "u", "nobody"]
    assert plan.prefixes[2].offloaded_layers == ()
    paused = [placed.request_id for placed in plan.placements if placed.paused]
    assert paused == ["a", "b", "c"][len("abc") - len(paused) :]  # the newest first
    assert not paused or num_free_blocks < 1_300


@pytest.mark.parametrize("policy", OFFLOADING, ids=lambda policy: policy.__name__)
def test_what_is_not_on_the_host_stays_resident(policy) -> None:
    snapshot = make_snapshot(
        make_request("a", num_host_blocks=()), make_request("b"), num_free_blocks=1_500
    )

    assert offloaded(policy(snapshot))[0] == 0
