"""The integrity guard on streams that run late and in any order."""

import sys
from array import array
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from bench.gpu.costs import IdleDevice
from lab.fake_streams import FakeDevice
from services.executor.copies.backend import make_guard
from services.executor.copies.copy_engine import BACKGROUND, Copy, Direction, Identity
from services.executor.copies.copy_job import CopyJob
from services.executor.copies.device import integrity_guard
from services.executor.copies.device.integrity_guard import SAMPLE_EVERY, IntegrityGuard
from services.executor.copies.device.pool_sums import PoolSums, block_weights
from services.executor.copies.device.stream_copy_engine import StreamCopyEngine
from services.executor.copies.pages import GroupPages
from services.executor.copies.transfer_runner import TransferRunner
from services.executor.kv_options import GuardMode, KVOptions
from services.executor.step_messages import (
    FailureCause,
    LoadTableUpdate,
    SaveOrder,
    StagingUpdate,
    StepTransfers,
)

NUM_BLOCKS = 200
PAGE_BYTES = 64


class Rig:
    """Two groups of two layers that share one pool, and a model that fills blocks."""

    def __init__(self, seed: int = 0, mode: GuardMode = GuardMode.ALL) -> None:
        self.device = FakeDevice(seed)
        self.pool, self.host = (
            tuple(torch.zeros((NUM_BLOCKS, PAGE_BYTES), dtype=torch.uint8) for _ in range(2))
            for _ in range(2)
        )
        pages = [GroupPages(pool=self.pool, host=self.host) for _ in range(2)]
        self.engine = StreamCopyEngine(pages, self.device)
        self.guard = IntegrityGuard(self.engine, pages, num_slots=NUM_BLOCKS, mode=mode)

    def write(self, blocks: list[int], value: int) -> None:
        def fill(pool: torch.Tensor) -> Callable[[], None]:
            return lambda: pool.numpy().__setitem__(blocks, value)

        for pool in self.pool:
            self.device.write(pool, blocks, fill(pool))

    def save(self, uids: list[int], slots: list[int], blocks: list[int], group: int = 0) -> CopyJob:
        return self.guard.submit(copy_of(Direction.D2H, uids, slots, blocks, group))

    def load(self, uids: list[int], slots: list[int], blocks: list[int], group: int = 0) -> CopyJob:
        return self.guard.submit(copy_of(Direction.H2D, uids, slots, blocks, group))

    def wrong(self) -> list[int]:
        """Return what is known to be wrong when everything has run."""
        known = self.guard.take_wrong()  # and verdicts leave
        self.device.finish()
        return known + self.guard.take_wrong()

    @property
    def num_checked(self) -> int:
        return self.guard.totals().num_checked_blocks

    def end(self) -> None:
        self.device.resume()
        self.guard.close()
        self.device.finish()


def copy_of(
    direction: Direction, uids: list[int], slots: list[int], blocks: list[int], group: int
) -> Copy:
    return Copy(
        direction=direction,
        group=group,
        slots=array("q", slots),
        block_ids=array("q", blocks),
        identities=(Identity(request_id="r", uids=uids),),
    )


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    rig.end()


def test_what_comes_back_as_it_left_is_right_wherever_it_is_put() -> None:
    for seed in range(10):
        rig = Rig(seed)
        rig.write([1, 2, 3], 7)
        rig.guard.wait(rig.save([31, 32, 33], [7, 8, 9], [1, 2, 3]))
        rig.write([1, 2, 3], 8)
        rig.guard.wait(rig.load([31, 32, 33], [7, 8, 9], [11, 12, 13]))
        rig.guard.wait(rig.load([33, 31], [9, 7], [1, 2]))

        assert rig.wrong() == []
        assert rig.num_checked == 5
        rig.end()
        assert rig.device.races == []


@pytest.mark.parametrize(("layer", "byte"), [(0, 0), (1, 8), (1, PAGE_BYTES - 1)])
def test_a_byte_that_changes_on_the_host_is_found_and_told_once(
    rig: Rig, layer: int, byte: int
) -> None:
    rig.write([1, 2, 3], 7)
    rig.save([31, 32, 33], [7, 8, 9], [1, 2, 3], group=1)
    rig.device.finish()
    rig.host[layer][8, byte] ^= 1
    rig.guard.wait(rig.load([31, 32, 33], [7, 8, 9], [11, 12, 13], group=1))

    assert rig.wrong() == [32]
    assert rig.wrong() == []


def test_nobody_waits_for_a_verdict(rig: Rig) -> None:
    rig.write([1], 7)
    rig.save([31], [7], [1])
    rig.device.finish()
    rig.host[0][7, 0] ^= 1
    rig.device.stall()
    rig.guard.wait(rig.load([31], [7], [11]))

    assert rig.guard.take_wrong() == []
    assert rig.guard.take_wrong() == []
    rig.device.resume()
    assert rig.wrong() == [31]


def test_a_copy_that_does_not_wait_for_the_layers_is_found_where_its_bytes_are_wrong() -> None:
    outcomes = set()
    for seed in range(20):
        rig = Rig(seed)
        rig.device.forgotten_wait = 1  # of the save for its source
        rig.write([1], 7)
        rig.save([31], [7], [1])
        rig.guard.wait(rig.load([31], [7], [11]))
        found = rig.wrong() == [31]
        assert found == any(pool[11, 0] != 7 for pool in rig.pool)
        outcomes.add(found)
        rig.end()

    assert outcomes == {False, True}


def test_a_load_that_layers_do_not_wait_for_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StreamCopyEngine, "wait", lambda *args: 0.0)
    num_found = 0
    for seed in range(20):
        rig = Rig(seed)
        rig.write([1], 7)
        rig.save([31], [7], [1])
        rig.guard.wait(rig.load([31], [7], [11]))
        num_found += rig.wrong() == [31]
        rig.end()

    assert num_found > 0


def test_blocks_that_nobody_copied_are_held_against_what_was_saved(rig: Rig) -> None:
    rig.write([1, 2, 3], 7)
    rig.save([31, 32, 33], [7, 8, 9], [1, 2, 3])
    rig.guard.check(copy_of(Direction.H2D, [31, 33], [7, 9], [1, 3], 0))
    assert rig.wrong() == []

    rig.write([2], 8)  # somebody else has had it
    rig.guard.check(copy_of(Direction.H2D, [31, 32], [7, 8], [1, 2], 0))
    assert rig.wrong() == [32]

    rig.guard.check(copy_of(Direction.H2D, [41], [9], [3], 0))  # the slot is another one's
    assert rig.wrong() == [41]
    assert rig.num_checked == 4


def test_a_slot_that_holds_other_kv_is_found(rig: Rig) -> None:
    rig.write([1, 2], 7)
    rig.save([31, 32], [7, 8], [1, 2])
    rig.guard.wait(rig.load([41, 32], [7, 8], [11, 12]))
    assert rig.wrong() == [41]

    rig.guard.wait(rig.load([31], [7], [11], group=1))
    assert rig.wrong() == [31]


def test_of_blocks_without_a_sum_only_the_slot_is_looked_at() -> None:
    rig = Rig(mode=GuardMode.SAMPLE)
    rig.save([31, 32], [7, 8], [1, 2])  # the second has no sum
    for _ in range(SAMPLE_EVERY):
        rig.guard.wait(rig.load([32, 41], [8, 8], [12, 13]))
    assert rig.wrong() == [41]
    assert rig.num_checked == 0
    rig.end()


def test_a_slot_that_is_saved_to_before_its_load_was_waited_for_is_not_compared(rig: Rig) -> None:
    rig.write([1], 7)
    rig.save([31], [7], [1])
    loading = rig.load([31], [7], [11])
    rig.write([2], 8)
    rig.save([32], [7], [2])
    rig.guard.wait(loading)

    assert rig.wrong() == []
    assert rig.num_checked == 0


def test_a_cancelled_load_is_not_compared(rig: Rig) -> None:
    rig.write([1], 7)
    rig.save([31], [7], [1])
    loading = rig.load([31], [7], [11])
    rig.guard.cancel(loading)
    rig.guard.wait(loading)

    assert rig.wrong() == []
    assert rig.num_checked == 0


def test_a_sample_is_one_block_in_so_many_in_one_load_of_so_many() -> None:
    rig, uids = Rig(mode=GuardMode.SAMPLE), list(range(2 * SAMPLE_EVERY))
    rig.write(uids, 7)
    rig.save(uids, uids, uids)
    rig.device.finish()
    rig.host[0][:] ^= 1
    targets = [100 + uid for uid in uids]
    found = []
    for _ in range(SAMPLE_EVERY):
        rig.guard.wait(rig.load(uids, uids, targets))
        found += rig.wrong()

    assert found == [0, SAMPLE_EVERY]
    assert rig.num_checked == 2

    rig.guard.wait(rig.save([100], [1], [1]))  # the next of the sample
    rig.guard.wait(rig.save([101], [0], [0]))  # not of it: what is known of the slot is over
    for _ in range(SAMPLE_EVERY):
        rig.guard.wait(rig.load([101], [0], [100]))
    assert rig.wrong() == []
    assert rig.num_checked == 2
    rig.end()


def test_a_sum_is_of_all_words_by_their_weights() -> None:
    generator = torch.Generator().manual_seed(1)
    pool, host = (
        tuple(
            torch.randint(0, 256, (8, size), dtype=torch.uint8, generator=generator)
            for size in (32, 64)
        )
        for _ in range(2)
    )
    pages = [GroupPages(pool=pool, host=host), GroupPages(pool=pool[:1], host=host)]
    device: Any = IdleDevice()
    sums, weights = PoolSums(pages, device, num_slots=9), block_weights(pages)
    for group, layers in enumerate(pages):
        sums.note(group, np.array([3, 5]), np.array([8, 1]))
        words = [pool.numpy().view(np.int64)[[3, 5]] for pool in layers.pool]
        by_hand = sum((w * v).sum(axis=1) for w, v in zip(words, weights, strict=False))
        assert sums.table.view(torch.int64)[[8, 1], 0].tolist() == list(by_hand)


def test_a_guard_is_made_unless_it_is_switched_off() -> None:
    rig = Rig()
    pages = [GroupPages(pool=rig.pool, host=rig.host)]
    backend: Any = SimpleNamespace(engine=rig.engine, pages=pages)
    for mode, is_made in (("off", False), ("sample", True), ("all", True)):
        guard = make_guard(KVOptions(integrity_guard=mode), backend, num_slots=NUM_BLOCKS)
        assert (guard is not None) == is_made
    rig.end()


def test_groups_take_turns_in_being_checked() -> None:
    rig = Rig(mode=GuardMode.SAMPLE)
    uids = list(range(SAMPLE_EVERY))
    for group in range(2):
        rig.save(uids, [group * 50 + uid for uid in uids], uids, group=group)
    checked = []
    for _ in range(SAMPLE_EVERY):
        before = rig.num_checked
        for group in range(2):
            rig.guard.wait(rig.load(uids, [group * 50 + uid for uid in uids], uids, group=group))
        assert rig.wrong() == []
        checked.append(rig.num_checked - before)

    assert sorted(checked, reverse=True)[:3] == [1, 1, 0]
    rig.end()


def test_verdicts_that_nobody_reads_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(integrity_guard, "MAX_OPEN_CHECKS", 4)
    rig = Rig()
    rig.write([1], 7)
    rig.save([31], [7], [1])
    rig.device.stall()
    for _ in range(20):
        rig.guard.wait(rig.load([31], [7], [11]))
    rig.device.resume()

    assert rig.wrong() == []
    assert rig.num_checked == 4
    rig.guard.wait(rig.load([31], [7], [11]))
    assert rig.wrong() == []
    assert rig.num_checked == 5
    rig.end()


def test_verdicts_that_the_device_refuses_to_copy_are_lost_and_the_next_ones_come() -> None:
    rig = Rig()
    rig.write([1], 7)
    rig.save([31], [7], [1])
    rig.guard.wait(rig.load([31], [7], [11]))
    rig.device.fails = lambda copies: True
    assert rig.guard.take_wrong() == []

    rig.device.fails = None
    rig.guard.wait(rig.load([31], [7], [12]))

    assert rig.wrong() == []
    assert rig.num_checked == 1
    rig.end()


def test_sums_that_nobody_ever_asks_for_take_no_memory() -> None:
    pool, host = (torch.zeros((8, PAGE_BYTES), dtype=torch.uint8) for _ in range(2))
    pages = [GroupPages(pool=(pool,), host=(host,))]
    engine = StreamCopyEngine(pages, IdleDevice())
    guard = IntegrityGuard(engine, pages, num_slots=8, mode=GuardMode.SAMPLE)

    def save(times: int) -> int:
        for number in range(times):
            slot = number % 8
            guard.submit(copy_of(Direction.D2H, [number], [slot], [slot], 0))
            guard.take_wrong()
            if number % 100 == 0:
                guard.totals()
        return sys.getallocatedblocks()

    before = save(501)
    assert save(2_000) - before < 500
    engine.close()


class Steps:
    """Two requests that load a block of one group in each step, by one copy."""

    def __init__(self) -> None:
        self.rig = Rig()
        self.runner = TransferRunner(self.rig.guard, 1, late_guard=self.rig.guard)
        self._step = 0
        self.run(
            saves=[SaveOrder("a", 0, [UID_A], [1], [1], False),
                   SaveOrder("b", 0, [UID_B], [2], [2], False)]
        )  # fmt: skip
        self.rig.device.finish()

    def run(self, **changes: Any) -> dict[str, FailureCause]:
        """Run a step; return who is lost."""
        self._step += 1
        message = StepTransfers(step=self._step, **changes)
        self.runner.take_in(message)
        self.runner.begin_step(message)
        self.runner.before_group(0)
        self.runner.after_group(0)
        self.runner.end_step()
        return self.runner.feedback().lost_requests

    def load(self) -> dict[str, FailureCause]:
        return self.run(
            num_staging={"a": 1, "b": 1},
            staging_updates=[StagingUpdate("a", 0, 0, [11]), StagingUpdate("b", 0, 0, [12])],
            table_updates=[
                LoadTableUpdate(name, 0, True, 0, [range(1)]) for name in ("a", "b")
            ],
            loading=["a", "b"],
        )  # fmt: skip


UID_A, UID_B = 1 << 24, 2 << 24  # position 0 of either


def test_who_holds_kv_that_came_back_wrong_is_lost_a_step_later_and_nobody_else() -> None:
    steps = Steps()
    steps.rig.host[0][2, 5] ^= 1
    steps.rig.device.stall()

    assert steps.load() == {}
    steps.rig.device.resume()
    steps.rig.device.finish()
    assert steps.run() == {"b": FailureCause.CORRUPT}
    assert steps.runner.watch.failures[FailureCause.CORRUPT] == 1
    assert steps.run() == {}
    steps.rig.end()


def test_who_has_begun_anew_meanwhile_is_not_lost() -> None:
    steps = Steps()
    steps.rig.host[0][2, 5] ^= 1
    steps.rig.device.stall()
    steps.load()
    steps.rig.device.resume()
    steps.rig.device.finish()

    assert steps.run(dropped_tables=[("b", None)]) == {}
    steps.rig.end()


def test_restores_are_checked_too(rig: Rig) -> None:
    rig.write([1], 7)
    rig.save([31], [7], [1])
    rig.device.finish()
    rig.host[1][7, 3] ^= 1
    restore = Copy(
        direction=Direction.H2D,
        group=0,
        slots=[7],
        block_ids=[11],
        urgency=BACKGROUND,
        identities=(Identity(request_id="r", uids=[31]),),
    )
    rig.guard.wait(rig.guard.submit(restore))

    assert rig.wrong() == [31]
