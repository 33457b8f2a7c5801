"""The integrity guard on a CPU's copies: what comes back wrong is known before a step ends.

Classes are those in which offloading has gone wrong elsewhere: (1) a copy that does not wait for
the computation, (2) a source that is reused before its copy has ended, (3) hooks that a replayed
graph skips, (4) another layer's memory, (5) a failed copy that counts as done, (6) ranks that act
differently, (7) a key that is stale or somebody else's.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from services.executor.copies.copy_engine import (
    Copy,
    CopyEngine,
    Direction,
    Identity,
)
from services.executor.copies.device.cpu_device import CpuDevice
from services.executor.copies.device.integrity_guard import (
    IntegrityGuard,
    identities,
    uids_and_groups,
)
from services.executor.copies.device.pool_sums import PoolSums
from services.executor.copies.device.stream_copy_engine import StreamCopyEngine
from services.executor.copies.pages import GroupPages
from services.executor.kv_options import GuardMode
from tests.exact import faults
from tests.link_gate import LinkGate

pytestmark = pytest.mark.filterwarnings("default")

NUM_BLOCKS = 40
PAGE_BYTES = 512
MINE = Identity(request_id="mine", uids=(30, 31, 32))


@pytest.fixture
def pages() -> list[GroupPages]:
    """Two groups of two layers, full of random bytes."""
    generator = torch.Generator().manual_seed(1)

    def memory() -> torch.Tensor:
        return torch.randint(
            0, 256, (NUM_BLOCKS, PAGE_BYTES), dtype=torch.uint8, generator=generator
        )

    pool, host = (memory(), memory()), (memory(), memory())
    return [GroupPages(pool=pool, host=host) for _ in range(2)]


Guard = Callable[..., IntegrityGuard]


@pytest.fixture
def guard(pages: list[GroupPages]) -> Iterator[Guard]:
    """Return a maker of guards over an engine that `spoil` may wrap."""
    engine = StreamCopyEngine(pages, CpuDevice())

    def make(
        spoil: Callable[[CopyEngine], CopyEngine] = lambda engine: engine,
        mode: GuardMode = GuardMode.ALL,
    ) -> IntegrityGuard:
        guard = IntegrityGuard(engine, pages, num_slots=NUM_BLOCKS, mode=mode)
        guard.engine = spoil(engine)
        return guard

    yield make
    engine.close()


def copy_of(
    direction: Direction,
    slots: Sequence[int],
    blocks: Sequence[int],
    identity: Identity = MINE,
    group: int = 0,
) -> Copy:
    """Return a copy of as many of the identity's blocks as there are slots."""
    identity = replace(identity, uids=identity.uids[: len(slots)])
    return Copy(
        direction=direction, group=group, slots=slots, block_ids=blocks, identities=(identity,)
    )


def save(engine: CopyEngine, *args: Any, **kwargs: Any) -> None:
    engine.wait(engine.submit(copy_of(Direction.D2H, *args, **kwargs)))


def load(guard: IntegrityGuard, *args: Any, **kwargs: Any) -> list[int]:
    """Return the uids of what came back wrong."""
    guard.wait(guard.submit(copy_of(Direction.H2D, *args, **kwargs)))
    return guard.take_wrong()


def test_what_was_saved_comes_back_unharmed_wherever_it_is_put(guard: Guard) -> None:
    engine = guard()

    save(engine, [7, 8, 9], [1, 2, 3])
    assert load(engine, [7, 8, 9], [11, 12, 13]) == []
    # Any order, and some of it.
    assert load(engine, [9, 7], [1, 2], replace(MINE, uids=(32, 30))) == []

    assert engine.totals().num_checked_blocks == 5


def test_blocks_that_nobody_copied_are_held_against_what_was_saved(
    guard: Guard, pages: list[GroupPages]
) -> None:
    engine = guard()
    save(engine, [7, 8, 9], [1, 2, 3])
    engine.check(copy_of(Direction.H2D, [7, 8, 9], [1, 2, 3]))
    assert engine.take_wrong() == []

    pages[0].pool[1][2, 8] ^= 1
    engine.check(copy_of(Direction.H2D, [7, 8, 9], [1, 2, 3]))
    assert engine.take_wrong() == [MINE.uids[1]]
    assert engine.take_wrong() == []

    engine.check(copy_of(Direction.H2D, [7], [1], replace(MINE, uids=(50,))))
    assert engine.take_wrong() == [50]
    assert engine.totals().num_checked_blocks == 6


@pytest.mark.parametrize("byte", [0, 8, PAGE_BYTES - 1])
def test_any_single_byte_that_changes_at_rest_is_noticed(
    guard: Guard, pages: list[GroupPages], byte: int
) -> None:
    engine = guard()
    save(engine, [7, 8, 9], [1, 2, 3])

    pages[0].host[1][8, byte] ^= 1

    assert load(engine, [7, 8, 9], [11, 12, 13]) == [31]


def test_words_that_change_places_are_noticed(guard: Guard, pages: list[GroupPages]) -> None:
    sums, pool = PoolSums(pages, CpuDevice(), num_slots=2), pages[0].pool[0]
    sums.note(0, np.array([5]), np.array([0]))
    pool[5] = pool[5].view(-1, 8).flip(0).reshape(-1)
    sums.note(0, np.array([5]), np.array([1]))

    assert not torch.equal(sums.table[0], sums.table[1])


class ReadsTooEarly(faults.FaultyEngine):
    """Saves what the source held before the computation wrote it."""

    def __init__(self, engine: CopyEngine, pages: list[GroupPages]) -> None:
        super().__init__(engine)
        self._pages = pages
        self._before = [pool.clone() for pool in pages[0].pool]

    def submit(self, copy: Copy) -> object:
        if copy.direction is Direction.H2D:
            return self.engine.submit(copy)
        now = [pool.clone() for pool in self._pages[0].pool]
        for pool, old in zip(self._pages[0].pool, self._before, strict=True):
            pool.copy_(old)
        ticket = self.engine.submit(copy)
        self.engine.wait(ticket)
        for pool, new in zip(self._pages[0].pool, now, strict=True):
            pool.copy_(new)
        return ticket


def test_class_1_a_copy_that_does_not_wait_for_the_computation(
    guard: Guard, pages: list[GroupPages]
) -> None:
    engine = guard(lambda engine: ReadsTooEarly(engine, pages))
    pages[0].pool[0][1] = 77  # the layer runs

    save(engine, [7, 8, 9], [1, 2, 3])

    assert load(engine, [7, 8, 9], [11, 12, 13]) == [30]


def test_class_2_a_source_that_is_reused_before_its_copy_has_ended(
    guard: Guard, pages: list[GroupPages], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, gate = guard(), LinkGate(monkeypatch)
    ticket = engine.submit(copy_of(Direction.D2H, [7], [1]))
    pages[0].pool[1][1] = 0  # somebody else's tokens
    gate.open()
    engine.wait(ticket)

    assert load(engine, [7], [11]) == [30]


class SwapsLayers(faults.FaultyEngine):
    """Loads each layer from the memory of the next one."""

    def __init__(self, engine: CopyEngine, pages: list[GroupPages]) -> None:
        super().__init__(engine)
        swapped = [replace(group, host=group.host[::-1]) for group in pages]
        self._wrong = StreamCopyEngine(swapped, CpuDevice())

    def submit(self, copy: Copy) -> object:
        if copy.direction is Direction.D2H:
            return self.engine.submit(copy)
        ticket = self._wrong.submit(copy)
        self._wrong.wait(ticket)
        self._wrong.close()
        return ticket


def test_class_4_another_layers_memory(guard: Guard, pages: list[GroupPages]) -> None:
    engine = guard(lambda engine: SwapsLayers(engine, pages))
    save(engine, [7, 8, 9], [1, 2, 3])

    assert load(engine, [7, 8, 9], [11, 12, 13]) == [30, 31, 32]


def test_class_4_another_groups_block(guard: Guard) -> None:
    engine = guard()
    save(engine, [7, 8, 9], [1, 2, 3])

    assert load(engine, [7, 8, 9], [11, 12, 13], group=1) == [30, 31, 32]


class MovesNothing(faults.FaultyEngine):
    """Ends some loads without a byte."""

    def submit(self, copy: Copy) -> object:
        if self._spoils(copy):
            return self.engine.submit(replace(copy, slots=[], block_ids=[]))
        return self.engine.submit(copy)


def test_class_5_a_copy_that_moved_nothing_and_says_that_it_is_done(guard: Guard) -> None:
    engine = guard(lambda engine: MovesNothing(engine, first_fault=5))
    save(engine, [7, 8, 9], [1, 2, 3])
    for _ in range(4):
        assert load(engine, [7, 8, 9], [11, 12, 13]) == []

    assert load(engine, [7, 8, 9], [14, 15, 16]) == [30, 31, 32]


@pytest.mark.parametrize(
    ("asked", "wrong"),
    [((40, 41, 42), [40, 41, 42]), ((30, 32, 31), [32, 31])],
    ids=["another-beginning", "another-position"],
)
def test_class_7_a_key_that_is_stale_or_another_requests(
    guard: Guard, asked: tuple[int, ...], wrong: list[int]
) -> None:
    engine = guard()
    save(engine, [7, 8, 9], [1, 2, 3])

    assert load(engine, [7, 8, 9], [11, 12, 13], replace(MINE, uids=asked)) == wrong


def test_class_7_a_slot_that_nothing_was_saved_to(guard: Guard) -> None:
    assert load(guard(), [20], [1]) == [30]


def test_class_7_a_slot_whose_new_owner_has_the_same_bytes(guard: Guard) -> None:
    engine = guard()
    save(engine, [7], [1])
    save(engine, [7], [1], replace(MINE, uids=(40,)))

    assert load(engine, [7], [11]) == [30]


def test_a_cancelled_load_is_not_checked(guard: Guard) -> None:
    engine = guard()
    save(engine, [20], [1])
    ticket = engine.submit(copy_of(Direction.H2D, [20], [1]))
    engine.cancel(ticket)

    engine.wait(ticket)

    assert engine.totals().num_checked_blocks == 0


def test_what_stands_for_blocks_of_a_shared_copy_is_each_ones_own() -> None:
    shared = Copy(
        direction=Direction.H2D,
        group=1,
        slots=range(5),
        block_ids=range(5),
        identities=(
            Identity(request_id="a", uids=(1, 2)),
            Identity(request_id="b", uids=(100, 101, 102)),
        ),
    )

    found = identities(shared)

    assert uids_and_groups(found) == ([1, 2, 100, 101, 102], [1] * 5)
    assert 0 not in found  # which is an empty slot
