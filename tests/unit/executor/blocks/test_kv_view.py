"""One request's blocks as the planner counts them."""

from types import SimpleNamespace
from typing import Any, cast

from services.executor.blocks.holder import GroupKV, Restore
from services.executor.blocks.residency import RequestKV
from tests.unit.records import make_record


def block(number: int) -> Any:
    return SimpleNamespace(block_id=number)


def make_kv(*groups: GroupKV, staging: int = 0) -> RequestKV:
    return RequestKV(
        record=make_record("a"),
        groups=list(groups),
        mirrored=True,
        block_size=16,
        staging=[[block(90), block(91)] for _ in range(staging)],
        num_tokens=70,
    )


RESIDENT = GroupKV(
    row=[block(1), block(2), block(3)], host_slots=[1, 2], num_saves_sent=2, num_host_blocks=1
)
OFFLOADED = GroupKV(
    row=[block(90), block(91), block(4)],
    offloaded=True,
    own={2: cast(Any, block(4))},
    host_slots=[3, 4],
    num_saves_sent=2,
    num_host_blocks=2,
)


def test_every_block_of_the_request_is_counted_once() -> None:
    kv = make_kv(RESIDENT, OFFLOADED, OFFLOADED, staging=1)
    view = kv.view

    assert view.offloaded == (1, 2)
    assert view.num_buffers == 1
    assert view.num_blocks == (3, 1 + 2, 1)  # the staging buffer counts with the first it serves
    assert view.num_host_blocks == (1, 2, 2)


def test_a_request_that_is_asleep_shows_the_buffer_it_wakes_up_with() -> None:
    assert make_kv(RESIDENT, OFFLOADED).view.num_buffers == 1
    assert make_kv(RESIDENT, RESIDENT).view.num_buffers == 0


def test_targets_of_a_restore_are_held() -> None:
    restoring = GroupKV(
        row=OFFLOADED.row,
        offloaded=True,
        own=OFFLOADED.own,
        restore=Restore(
            targets={0: cast(Any, block(5)), 1: cast(Any, block(6))},
            under_way={7: [block(6)]},
        ),
    )

    kv = make_kv(restoring, staging=1)

    assert kv.view.num_blocks == (1 + 2 + 2,)
