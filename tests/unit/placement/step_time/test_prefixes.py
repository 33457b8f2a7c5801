"""What requests share is read by each of them, loaded once, and held once."""

from dataclasses import replace

import pytest

from lab.planning.snapshots import (
    make_engine,
    make_prefill,
    make_prefix,
    make_request,
    make_snapshot,
)
from services.placement.mirror import mirror_of
from services.placement.step_time.batch import (
    capacity_blocks,
    demand_of,
    holders_of,
    pool_need,
    predicted_step_s,
)
from services.placement.step_time.patterns import RESIDENT, Pattern
from services.placement.step_time.prefill import Progress, progress_of
from services.placement.types import Link, Profile, RequestPhase, RequestState, Snapshot

ENGINE = make_engine(max_num_batched_tokens=302)
LAST = Pattern((7,), 1)


def prompt(name: str, num_computed: int, *prefixes: str) -> RequestState:
    return make_prefill(name, 900, num_computed, prefix_ids=prefixes)


def batch_of(number: int) -> Snapshot:
    """Return users of one prefix on a link that takes 1 ms for 100 blocks."""
    users = [make_request(f"r{n}", 400, prefix_ids=("t",)) for n in range(number)]
    return make_snapshot(
        *users,
        prefixes=(make_prefix("t", 3_200), make_prefix("nobody")),
        h2d=Link(bytes_per_s=100 * 65_536 / 1e-3, chunk_bytes=1 << 40),
        profile=Profile(layer_base_s=1e-5, layer_s_per_token=1e-6, layer_s_per_context_token=1e-9),
    )


def test_a_prefix_stands_before_its_first_user_and_once() -> None:
    snapshot = make_snapshot(
        make_request("a", prefix_ids=("t", "u")),
        make_request("b"),
        make_request("c", prefix_ids=("t", "v")),
        prefixes=tuple(make_prefix(name) for name in "utvw"),
    )

    names = [one.holder_id for one in holders_of(snapshot, snapshot.requests)]
    assert names == ["t", "u", "a", "b", "v", "c"]
    assert [one.holder_id for one in holders_of(snapshot, snapshot.requests[1:2])] == ["b"]


@pytest.mark.parametrize("number", [1, 2, 9])
def test_a_step_loads_a_prefix_once_and_reads_it_for_each_user(number: int) -> None:
    snapshot = batch_of(number)
    placed = [
        (one, LAST if one.holder_id == "t" else RESIDENT)
        for one in holders_of(snapshot, snapshot.requests)
    ]
    layer_s = 1e-5 + number * 1e-6 + number * (400 + 3_200) * 1e-9

    # 200 blocks need 2 ms, of which 7 layers hide what they take.
    expected_s = 8 * layer_s + max(0.0, 2e-3 - 7 * layer_s)
    assert predicted_step_s(snapshot, placed) == pytest.approx(expected_s)


def test_what_no_request_of_a_step_begins_with_is_not_read() -> None:
    batch = [
        make_prefix("t", 320),
        prompt("p", 160, "t"),
        make_prefix("u", 640),
        prompt("waits", 0, "t", "u"),
        make_request("d", prefix_ids=("t",)),
        make_prefix("v", 320),
    ]

    # 1 for the decode; all that is left for "p"; nothing for the prompt behind it.
    assert progress_of(batch, ENGINE) == [
        Progress(num_tokens=320, is_prefix=True),
        Progress(num_tokens=160, num_left=740, chunk=301, num_shared=320),
        Progress(num_tokens=0, is_prefix=True),
        Progress(num_tokens=0, num_left=900, chunk=0, num_shared=960),
        Progress(num_tokens=1_600, num_shared=320),
        Progress(num_tokens=0, is_prefix=True),
    ]


def test_a_prefix_is_read_whole_in_each_step_and_computes_nothing() -> None:
    one = Progress(num_tokens=320, is_prefix=True)

    assert [one.tokens_read_at(step) for step in range(3)] == [320, 320, 320]
    assert not any(one.decodes_at(step) or one.chunk_at(step) for step in range(3))


def test_a_request_attends_to_its_own_and_to_what_it_shares() -> None:
    decodes = Progress(num_tokens=100, num_shared=320)
    waits = Progress(num_tokens=100, num_left=7, num_shared=320)

    assert [decodes.context_at(step) for step in (0, 1)] == [420, 421]
    assert decodes.tokens_read_at(1) == 101  # what it loads is its own
    assert waits.context_at(0) == 0


@pytest.mark.parametrize("growth", [0, 1, 100])
def test_a_prefix_holds_whole_blocks_however_many_steps_go_by(growth: int) -> None:
    demand = demand_of(make_prefix("t", 320), ENGINE, growth=growth)

    assert pool_need(demand, RESIDENT) == 8 * 20
    assert pool_need(demand, LAST) == 7 * 20 + 20
    assert pool_need(demand, Pattern(tuple(range(8)), 2)) == 2 * 20


def test_the_pool_is_what_is_free_and_what_those_hold_that_take_part_in_it() -> None:
    begun = make_request("a", prefix_ids=("t", "u"), num_blocks=(1,) * 8)
    returning = make_request(
        "w", phase=RequestPhase.WAITING, prefix_ids=("v",), num_blocks=(), on_hold=False
    )
    prefixes = tuple(make_prefix(name, num_blocks=(10,) * 8) for name in "tuv")
    snapshot = make_snapshot(begun, returning, prefixes=prefixes, num_free_blocks=5)

    assert capacity_blocks(snapshot) == 5 + 8 + 80 + 80
    held = replace(snapshot, requests=(replace(begun, on_hold=True),))
    assert capacity_blocks(held) == 5 + 8 + 80 + 80  # it gives them up


def test_a_prefix_without_a_copy_may_not_leave() -> None:
    request = make_request("a", prefix_ids=("t", "u"))
    half = make_prefix("u", num_host_blocks=(100,) * 4 + (0,) * 4)
    prefixes = (make_prefix("t", num_host_blocks=()), half)
    mirror = mirror_of(make_snapshot(request, prefixes=prefixes))

    assert not mirror.possible(prefixes[0], LAST)
    assert mirror.offloadable(half) == (0, 1, 2, 3)
    assert mirror.allows(half, Pattern((0, 3), 1))
    assert not mirror.allows(half, LAST)
