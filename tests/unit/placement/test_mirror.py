"""Only what is on the host, or is about to be, may leave the pool."""

import dataclasses

import pytest

from lab.planning.snapshots import make_engine, make_request, make_snapshot
from services.placement.mirror import blocks_with_mirror, mirror_of
from services.placement.step_time.batch import demand_of, pool_need
from services.placement.step_time.patterns import RESIDENT, Pattern
from services.placement.types import RequestPhase
from tests.policies import RULES

SECOND = Pattern((1, 3, 5, 7), 1)
FIRST = Pattern((0, 2, 4, 6), 1)


def test_a_half_mirrored_request_may_offload_what_is_mirrored() -> None:
    request = make_request("a", 8_000, num_host_blocks=(0, 500) * 4)
    mirror = mirror_of(make_snapshot(request))

    assert mirror.allows(request, SECOND)
    assert not mirror.allows(request, FIRST)
    assert not mirror.allows(request, Pattern((0, 1), 1))
    assert mirror.allows(request, RESIDENT)
    assert mirror.offloadable(request) == (1, 3, 5, 7)


@pytest.mark.parametrize(("mirrored", "allowed"), [(498, True), (497, False)])
def test_two_blocks_are_as_good_as_there(mirrored: int, allowed: bool) -> None:
    request = make_request("a", 8_000, num_host_blocks=(mirrored,) * 8)
    mirror = mirror_of(make_snapshot(request))

    assert mirror.allows(request, FIRST) == allowed
    # They stay in the pool until they are copied: 2 blocks of 4 groups.
    assert not allowed or mirror.late_blocks(request, FIRST) == 8


@pytest.mark.parametrize(("budget", "allowed"), [(0, False), (9, False), (10, True)])
def test_the_budget_of_write_through_says_what_is_there_soon(budget: int, allowed: bool) -> None:
    # 10 of 500 blocks lack in each of 4 groups: 40 blocks, in a shortest window of 4 steps.
    request = make_request("a", 8_000, num_host_blocks=(490,) * 8)
    snapshot = make_snapshot(request, min_window=4, num_write_through_blocks=budget)

    assert mirror_of(snapshot).allows(request, FIRST) == allowed


def test_lagging_requests_share_the_budget_evenly() -> None:
    requests = [make_request(name, 8_000, num_host_blocks=(490,) * 8) for name in "ab"]
    mirrored = make_request("c", 8_000)
    snapshot = make_snapshot(*requests, mirrored, min_window=4, num_write_through_blocks=19)

    assert not mirror_of(snapshot).allows(requests[0], FIRST)
    enough = dataclasses.replace(snapshot, num_write_through_blocks=20)
    assert mirror_of(enough).allows(requests[0], FIRST)


def test_no_budget_mirrors_a_request_without_room_on_the_host() -> None:
    request = make_request("a", 8_000, num_host_blocks=())
    mirror = mirror_of(make_snapshot(request, num_write_through_blocks=10**9, max_window=4_096))

    assert not mirror.allows(request, Pattern((7,), 1))
    assert not mirror.possible(request, Pattern((7,), 1))
    assert mirror.offloadable(request) == ()


def test_what_is_offloaded_may_stay_so_whatever_the_counters_say() -> None:
    request = make_request(
        "a", 8_000, num_host_blocks=(), offloaded_layers=(3, 7), num_prefetch_buffers=1
    )
    mirror = mirror_of(make_snapshot(request))

    assert mirror.allows(request, Pattern((3, 7), 2))
    assert not mirror.allows(request, Pattern((1, 3), 1))


def test_missing_blocks_count_as_pool_blocks_until_they_are_copied() -> None:
    request = make_request("a", 8_000, num_host_blocks=(500,) * 6 + (499, 490))
    mirror = mirror_of(make_snapshot(request, num_write_through_blocks=10))
    last = Pattern((6, 7), 1)
    need = pool_need(demand_of(request, make_engine(), growth=1), last)

    assert blocks_with_mirror(request, last, mirror, make_engine()) == need + 11


@pytest.mark.parametrize("policy", RULES)
def test_no_policy_offloads_a_decoding_request_that_has_no_room_on_the_host(
    policy: str,
) -> None:
    bare = make_request("bare", 3_200, num_host_blocks=())
    prompt = make_request(
        "prompt",
        3_200,
        phase=RequestPhase.PREFILL,
        num_output_tokens=0,
        num_computed_tokens=1_600,
        num_host_blocks=(),
    )
    # All resident they need 8 * 401 blocks; 3000 are there, so somebody waits.
    plan = RULES[policy].rule(make_snapshot(bare, prompt, num_free_blocks=3_000))

    assert [placement.offloaded_layers for placement in plan.placements] == [(), ()]
