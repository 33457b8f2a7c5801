"""The device engine on streams that run late and in any order: every access is ordered.

Rows are one byte repeated. The model is what `TransferRunner` makes of it: it writes and reads
blocks on the compute stream, submits copies after it, and waits before it touches what they do.
"""

import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from lab.fake_streams import FakeDevice
from services.executor.copies import pages as pages_module
from services.executor.copies.copy_engine import (
    BACKGROUND,
    Copy,
    CopyFailedError,
    CopyHungError,
    Direction,
)
from services.executor.copies.copy_job import CopyJob
from services.executor.copies.device import lane as lane_module
from services.executor.copies.device.stream_copy_engine import StreamCopyEngine
from services.executor.copies.pages import GroupPages

NUM_BLOCKS = 24
MAX_ISSUED_CHUNKS = FakeDevice.max_chunks_ahead
NUM_SLOTS = 40
PAGE_BYTES = 1024
CHUNK_BYTES = 4 * PAGE_BYTES  # two layers: two blocks are a chunk


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages_module, "CHUNK_BYTES", CHUNK_BYTES)


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lane_module, "CLOSE_TIMEOUT_S", 60.0)


@dataclass
class Rig:
    """An engine, its device, and a model that knows what every block must hold."""

    seed: int = 0
    mistakes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.device = FakeDevice(self.seed)
        self.pool = [torch.zeros((NUM_BLOCKS, PAGE_BYTES), dtype=torch.uint8) for _ in range(2)]
        self.host = [torch.zeros((NUM_SLOTS, PAGE_BYTES), dtype=torch.uint8) for _ in range(2)]
        pages = [GroupPages(pool=tuple(self.pool), host=tuple(self.host)) for _ in range(2)]
        self.engine = StreamCopyEngine(pages, self.device)

    def write(self, blocks: list[int], value: int) -> None:
        for pool in self.pool:
            self.device.write(pool, blocks, _fill(pool, blocks, value))

    def read(self, blocks: list[int], value: int) -> None:
        for pool in self.pool:
            self.device.read(pool, blocks, self._check(pool, blocks, value))

    def _check(self, pool: torch.Tensor, blocks: list[int], value: int) -> Callable[[], None]:
        def work() -> None:
            if not (pool[blocks] == value).all():
                self.mistakes.append(f"blocks {blocks} do not hold {value}")

        return work

    def load(self, slots: list[int], blocks: list[int], urgency: float = 0.0) -> CopyJob:
        copy = Copy(
            direction=Direction.H2D, group=0, slots=slots, block_ids=blocks, urgency=urgency
        )
        return self.engine.submit(copy)

    def save(self, slots: list[int], blocks: list[int]) -> CopyJob:
        return self.engine.submit(
            Copy(direction=Direction.D2H, group=1, slots=slots, block_ids=blocks)
        )

    def finish(self) -> None:
        self.engine.close()
        self.device.finish()

    @property
    def faults(self) -> list[str]:
        return self.mistakes + self.device.races


def _fill(pool: torch.Tensor, blocks: list[int], value: int) -> Callable[[], None]:
    return lambda: pool.numpy().__setitem__(blocks, value)


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    rig.device.resume()
    rig.finish()


def save_then_load_into_another_block(rig: Rig) -> None:
    rig.write([0, 1, 2], 7)
    rig.save([5, 6, 7], [0, 1, 2])
    ticket = rig.load([5, 6, 7], [9, 10, 11])
    rig.engine.wait(ticket)
    rig.read([9, 10, 11], 7)


def save_then_write_the_source(rig: Rig) -> None:
    rig.write([0, 1, 2], 7)
    saving = rig.save([5, 6, 7], [0, 1, 2])
    rig.engine.wait(saving)
    rig.write([0, 1, 2], 8)
    rig.engine.wait(rig.load([5, 6, 7], [9, 10, 11]))
    rig.read([9, 10, 11], 7)


def load_into_a_block_that_was_read(rig: Rig) -> None:
    rig.write([0, 1], 3)
    rig.engine.wait(rig.save([1, 2], [0, 1]))
    rig.write([0, 1], 4)
    rig.read([0, 1], 4)
    rig.engine.wait(rig.load([1, 2], [0, 1]))
    rig.read([0, 1], 3)


PROGRAMS = [
    save_then_load_into_another_block,
    save_then_write_the_source,
    load_into_a_block_that_was_read,
]


@pytest.mark.parametrize("program", PROGRAMS)
def test_every_access_is_ordered(program: Callable[[Rig], None]) -> None:
    for seed in range(10):
        rig = Rig(seed)
        program(rig)
        rig.finish()
        assert rig.faults == []


@pytest.mark.parametrize("program", PROGRAMS)
def test_leaving_out_a_wait_is_found(program: Callable[[Rig], None]) -> None:
    """Of each program some wait is the only order between two accesses: most are."""
    num_waits = num_found = 0
    while True:
        is_found = False
        for seed in range(3):
            rig = Rig(seed)
            rig.device.forgotten_wait = num_waits + 1
            program(rig)
            rig.finish()
            is_found = is_found or rig.faults != []
            has_left_out = rig.device.num_waits >= rig.device.forgotten_wait
        if not has_left_out:
            break
        num_waits += 1
        num_found += is_found

    assert num_waits >= 3
    assert num_found >= 2


@pytest.mark.parametrize("seed", range(20))
def test_random_steps_of_saves_and_loads_are_ordered(seed: int) -> None:
    rig, rng = Rig(seed), random.Random(seed)
    on_host: dict[int, int] = {}  # slot -> value
    for step in range(12):
        value = 1 + step
        blocks = rng.sample(range(12), rng.randrange(1, 6))
        rig.write(blocks, value)
        rig.read(blocks, value)
        slots = rng.sample(range(NUM_SLOTS), len(blocks))
        saving = rig.save(slots, blocks)
        on_host.update(dict.fromkeys(slots, value))
        known = rng.choice(list(on_host.values()))
        loaded = [slot for slot, held in on_host.items() if held == known][:5]
        targets = rng.sample(range(12, NUM_BLOCKS), len(loaded))
        loading = rig.load(loaded, targets, urgency=rng.choice([0.0, 1.0, BACKGROUND]))
        if rng.random() < 0.5:
            rig.write([12], 200) if 12 not in targets else None
        rig.engine.wait(loading)
        rig.read(targets, known)
        rig.engine.wait(saving)  # the next step may write what was saved
    rig.finish()

    assert rig.faults == []


def test_nobody_waits_on_the_host_for_a_device_that_is_busy() -> None:
    rig = Rig()
    rig.write([0, 1], 1)
    rig.device.stall()

    saving = rig.save([0, 1], [0, 1])
    loading = rig.load([2, 3], [4, 5])
    rig.engine.wait(loading)
    rig.engine.wait(saving)

    assert not loading.done
    assert not saving.done
    rig.device.resume()
    rig.finish()
    assert loading.done
    assert rig.faults == []


NUM_RESTORED = 24


def stalled_restore(rig: Rig) -> CopyJob:
    """Return a restore of `NUM_RESTORED` blocks, in 12 chunks, on a link that stands still.

    The thread has issued all that it may.
    """
    rig.device.stall()
    slots = list(range(NUM_RESTORED))
    restoring = rig.load(slots, slots, urgency=BACKGROUND)
    assert rig.device.waited.wait(60)  # the thread waits for the first chunk
    assert restoring.num_to_issue == 12 - MAX_ISSUED_CHUNKS
    return restoring


def test_a_late_urgent_load_overtakes_a_restore_that_has_begun() -> None:
    rig = Rig()
    restoring = stalled_restore(rig)

    rig.engine.wait(rig.load([30, 31], [0, 1], urgency=3.0))
    rig.engine.wait(restoring)
    rig.device.resume()
    rig.finish()

    order = [rows for target, rows in rig.device.copied_rows if target == rig.pool[0].data_ptr()]
    place = order.index([0, 1], 1)  # the first [0, 1] is the restore's first chunk
    assert place == MAX_ISSUED_CHUNKS
    assert sum(map(len, order)) == NUM_RESTORED + 2
    assert len(order) == MAX_ISSUED_CHUNKS + 2  # whoever waits issues the rest as one batch


def test_what_may_go_ahead_of_a_load_is_on_the_stream_once_submitted_of_a_restore_nothing() -> None:
    rig = Rig()
    lane: Any = rig.engine._lanes[Direction.H2D]
    with lane.changed:  # the thread can do nothing
        load = rig.load([1, 2, 3], [1, 2, 3])
        restore = rig.load([4, 5], [4, 5], urgency=BACKGROUND)
        large = rig.load(list(range(6, 18)), list(range(6, 18)))
        assert (load.num_to_issue, restore.num_to_issue) == (0, 1)
        assert large.num_to_issue == 6 - MAX_ISSUED_CHUNKS
    for job in (load, restore, large):
        rig.engine.wait(job)
    rig.finish()
    assert rig.faults == []


def test_a_cancelled_restore_issues_nothing_more() -> None:
    rig = Rig()
    restoring = stalled_restore(rig)

    rig.engine.cancel(restoring)
    rig.device.resume()
    rig.engine.wait(restoring)
    rig.finish()

    assert restoring.done
    assert len(rig.device.copied_rows) == 2 * MAX_ISSUED_CHUNKS  # two layers


def test_many_chunks_in_both_directions_at_once_are_ordered(rig: Rig) -> None:
    rig.write(list(range(12)), 5)
    saving = rig.save(list(range(12)), list(range(12)))
    loading = rig.load(list(range(12)), list(range(12, 24)))
    again = rig.load(list(range(12)), list(range(12)), urgency=1.0)

    for ticket in (loading, saving, again):
        rig.engine.wait(ticket)
    rig.read(list(range(24)), 5)
    rig.device.finish()

    assert rig.faults == []


def test_a_wait_that_may_not_take_time_says_that_a_copy_hangs(rig: Rig) -> None:
    rig.device.stall()
    ticket = rig.load([0], [0])

    with pytest.raises(CopyHungError):
        rig.engine.wait(ticket, 0.0)
    rig.device.resume()


def test_without_patience_nothing_more_of_a_late_copy_is_issued() -> None:
    rig = Rig()
    restoring = stalled_restore(rig)

    with pytest.raises(CopyHungError):
        rig.engine.wait(restoring, 0.0)

    assert restoring.num_to_issue == 12 - MAX_ISSUED_CHUNKS
    rig.device.resume()
    rig.engine.wait(restoring)
    rig.finish()


def test_what_failed_counts_in_no_links_rate(rig: Rig) -> None:
    rig.device.fails = lambda copies: 3 in copies[0].target_rows.tolist()
    fine, failing = rig.load([1], [9]), rig.load([2], [3])

    rig.engine.wait(fine)
    with pytest.raises(CopyFailedError):
        rig.engine.wait(failing)
    rig.device.finish()

    assert rig.engine.totals().h2d_bytes == 2 * PAGE_BYTES  # of two layers


def test_what_the_device_refuses_fails_and_the_rest_goes_on(rig: Rig) -> None:
    rig.device.fails = lambda copies: 3 in copies[0].target_rows.tolist()
    failing, fine = rig.load([1, 2, 3, 4], [2, 3, 4, 5]), rig.load([1], [9])

    rig.engine.wait(fine)
    with pytest.raises(CopyFailedError):
        rig.engine.wait(failing)

    assert failing.done


def test_stalls_are_what_the_compute_stream_waited_and_are_told_once() -> None:
    rig = Rig()
    rig.device.stall()
    ticket = rig.load([0, 1], [0, 1])
    first = rig.engine.wait(ticket)
    rig.device.resume()
    rig.device.finish()

    later = [rig.engine.wait(ticket) for _ in range(40)]

    assert first == 0.0
    assert sum(later) == pytest.approx(4 * PAGE_BYTES / 1e9)  # two blocks of two layers
    assert sum(value > 0 for value in later) == 1
    rig.finish()


def test_saves_that_are_over_are_forgotten_though_nothing_is_ever_loaded() -> None:
    rig = Rig()
    for _ in range(4_000):
        rig.save([0], [0])
        rig.device.finish()

    assert len(rig.engine._saves._under_way) == 1
    rig.finish()


def test_loads_that_are_over_are_forgotten_where_waits_issue_them_all() -> None:
    rig = Rig()
    lane: Any = rig.engine._lanes[Direction.H2D]
    for _ in range(500):
        with lane.changed:  # the thread comes too late
            rig.engine.wait(rig.load([0], [0]))
        rig.device.finish()

    assert len(lane._issued) <= 1
    rig.finish()


def test_closing_ends_what_is_under_way_and_fails_what_is_queued() -> None:
    rig = Rig()
    restoring = stalled_restore(rig)
    closing = threading.Thread(target=rig.engine.close)
    closing.start()
    lane: Any = rig.engine._lanes[Direction.H2D]
    with lane.changed:
        assert lane.changed.wait_for(lambda: lane.closing, 60)
    rig.device.resume()
    closing.join(60)

    assert rig.engine.is_idle
    with pytest.raises(CopyFailedError):
        rig.engine.wait(restoring)
    assert restoring.done


def test_a_copy_that_comes_after_nothing_unfinished_waits_for_no_layers() -> None:
    rig = Rig()
    rig.write([1], 5)
    job = rig.save([1], [1])

    rig.device.finish()
    assert not job.waits_for_layers
    rig.finish()
