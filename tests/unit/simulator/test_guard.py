"""The guard before every step: who leaves the pool, who comes back, and what a plan may say."""

from services.pacing.types import ServiceLevel
from services.placement.blocks import BlockGeometry
from services.placement.layer_placement import LayerPlacement
from services.placement.types import RequestId
from simulator.blocks import BlockLedger
from simulator.copies import Lane
from simulator.guard import Guard
from simulator.requests import LiveRequest, live_request
from simulator.workload import ArrivingRequest

GEOMETRY = BlockGeometry(num_groups=4, block_size=4)


def running(pool: BlockLedger, name: str, *, num_tokens: int) -> LiveRequest:
    """Return a request that decodes, all of it resident and mirrored."""
    spec = ArrivingRequest(
        request_id=RequestId(name),
        arrival_s=0.0,
        num_prompt_tokens=num_tokens,
        num_output_tokens=8,
        level=ServiceLevel(),
    )
    request = live_request(spec, GEOMETRY)
    request.kv.mirrored = True
    request.kv.grow(num_tokens)
    request.kv.num_sent_blocks = request.kv.num_host_blocks = request.kv.num_full_blocks
    request.num_computed_tokens = num_tokens
    assert pool.set_owned(spec.request_id, request.kv.num_owned)
    return request


def make(*, num_blocks: int, num_spare: int = 0) -> tuple[Guard, BlockLedger, Lane]:
    pool = BlockLedger(num_blocks=num_blocks)
    return (
        Guard(pool, GEOMETRY, block_bytes=1, num_spare=num_spare),
        pool,
        Lane(bytes_per_s=1.0),
    )


def test_what_fits_stays() -> None:
    guard, pool, h2d = make(num_blocks=100)
    a = running(pool, "a", num_tokens=20)
    guard.adjust([a], [], [], h2d)

    assert a.kv.offloaded == ()
    assert pool.num_free == 100 - 4 * 5


def test_the_newest_gives_way_to_the_first_in_line() -> None:
    # Two of 4 x 6 blocks fit 50 with their next tokens; a third needs 5 + 4 at least.
    guard, pool, h2d = make(num_blocks=50)
    a, b = running(pool, "a", num_tokens=20), running(pool, "b", num_tokens=20)
    waiting = running(BlockLedger(num_blocks=100), "c", num_tokens=20)
    waiting.kv.offloaded = ()
    guard.adjust([a, b], [waiting], [], h2d)

    assert a.kv.offloaded == ()
    assert b.kv.offloaded
    assert pool.num_free >= 5 + 4


def test_a_plans_placement_is_a_floor_and_what_is_beyond_it_comes_back() -> None:
    guard, pool, h2d = make(num_blocks=200)
    a = running(pool, "a", num_tokens=20)
    guard.given[a.request_id] = LayerPlacement(offloaded=frozenset({1, 2}), num_staging=1)
    guard.adjust([a], [], [], h2d)
    assert a.kv.offloaded == (1, 2)

    guard.given[a.request_id] = LayerPlacement(offloaded=frozenset({1}), num_staging=1)
    guard.adjust([a], [], [], h2d)
    assert set(a.kv.restoring) == {2}
    h2d.advance(100.0)
    assert a.kv.take_in_restores() == 1
    assert a.kv.offloaded == (1,)


def test_nothing_comes_back_into_what_is_kept_free() -> None:
    # 5 blocks of 4 groups and one offloaded: 15 + 5 staged of 25, and 5 are not enough beyond 4.
    guard, pool, h2d = make(num_blocks=25, num_spare=4)
    a = running(pool, "a", num_tokens=20)
    a.kv.offload([3], num_free=0)
    guard.refresh(a)
    assert pool.num_free == 5
    guard.adjust([a], [], [], h2d)

    assert not a.kv.restoring


def test_paused_requests_lose_theirs_first() -> None:
    guard, pool, h2d = make(num_blocks=50)
    a, b = running(pool, "a", num_tokens=20), running(pool, "b", num_tokens=20)
    b.pause(0.0)
    big = running(BlockLedger(num_blocks=100), "c", num_tokens=28)
    guard.adjust([a], [big], [b], h2d)

    assert a.kv.offloaded == ()
    assert b.kv.asleep
    assert b.kv.offloaded
