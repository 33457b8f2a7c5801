"""What every copy engine does."""

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from lab.fake_streams import FakeDevice
from services.executor.copies.copy_engine import (
    BACKGROUND,
    FOR_EVER,
    Copy,
    CopyEngine,
    CopyFailedError,
    CopyHungError,
    Direction,
)
from services.executor.copies.copy_job import CopyJob
from services.executor.copies.device.cpu_device import CpuDevice, LinkModel
from services.executor.copies.device.integrity_guard import IntegrityGuard
from services.executor.copies.device.stream_copy_engine import StreamCopyEngine
from services.executor.copies.pages import GroupPages
from services.executor.kv_options import GuardMode
from tests.link_gate import LinkGate

pytestmark = pytest.mark.filterwarnings("default")

NUM_BLOCKS = 64
PAGE_BYTES = 1 << 18  # a chunk of 4 MiB holds 8 blocks of two layers
Make = Callable[..., CopyEngine]


@pytest.fixture
def pages() -> list[GroupPages]:
    """Two groups of two layers that alias one pool, as vLLM's do."""
    pool = tuple(torch.zeros((NUM_BLOCKS, PAGE_BYTES), dtype=torch.uint8) for _ in range(2))
    host = tuple(
        torch.arange(1, NUM_BLOCKS + 1, dtype=torch.uint8)[:, None]
        .repeat(1, PAGE_BYTES)
        .add_(100 * layer)
        for layer in range(2)
    )
    return [GroupPages(pool=pool, host=host) for _ in range(2)]


class SeenByHost(StreamCopyEngine):
    """Has the host see after a wait what the compute stream and later loads see."""

    def __init__(self, pages: list[GroupPages], device: FakeDevice, **options: Any) -> None:
        super().__init__(pages, device, **options)
        self.device = device

    def wait(self, ticket: CopyJob, timeout_s: float = FOR_EVER) -> float:
        stall_s = super().wait(ticket, timeout_s)
        self.device.compute.record().synchronize()
        return stall_s

    def close(self) -> None:
        super().close()
        assert self.device.races == []


@pytest.fixture(params=["plain", "guarded"])
def make_cpu(request: pytest.FixtureRequest, pages: list[GroupPages]) -> Iterator[Make]:
    """Return a maker of engines with links of a speed, closed at the end."""
    engines: list[CopyEngine] = []

    def make(*, bytes_per_s: float | None = None, poison_targets: bool = False) -> CopyEngine:
        link = LinkModel(bytes_per_s=bytes_per_s)
        device = CpuDevice(h2d=link, d2h=link)
        engine = StreamCopyEngine(pages, device, poison_targets=poison_targets)
        if request.param == "guarded":
            engines.append(IntegrityGuard(engine, pages, num_slots=NUM_BLOCKS, mode=GuardMode.ALL))
        else:
            engines.append(engine)
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> LinkGate:
    return LinkGate(monkeypatch)


@pytest.fixture(params=["cpu", "streams"])
def make(request: pytest.FixtureRequest, pages: list[GroupPages]) -> Iterator[Make]:
    """Return a maker of engines of every kind, closed at the end."""
    engines: list[CopyEngine] = []

    def make() -> CopyEngine:
        if request.param == "cpu":
            engines.append(StreamCopyEngine(pages, CpuDevice()))
        else:
            engines.append(SeenByHost(pages, FakeDevice()))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


def load(slots: list[int], block_ids: list[int], *, group: int = 0, urgency: float = 0.0) -> Copy:
    return Copy(
        direction=Direction.H2D, group=group, slots=slots, block_ids=block_ids, urgency=urgency
    )


def save(slots: list[int], block_ids: list[int]) -> Copy:
    return Copy(direction=Direction.D2H, group=0, slots=slots, block_ids=block_ids)


def test_a_load_puts_each_slot_into_its_block_in_every_layer(
    make: Make, pages: list[GroupPages]
) -> None:
    engine = make()

    engine.wait(engine.submit(load([5, 0, 9], [1, 63, 2])))

    for layer, pool in enumerate(pages[0].pool):
        assert pool[[1, 63, 2], 0].tolist() == [6 + 100 * layer, 1 + 100 * layer, 10 + 100 * layer]
        assert pool[[1, 63, 2], -1].tolist() == pool[[1, 63, 2], 0].tolist()
        assert pool[0].sum() == 0


def test_a_save_puts_each_block_into_its_slot(make: Make, pages: list[GroupPages]) -> None:
    engine = make()
    pages[0].pool[0][3] = 77
    pages[0].pool[1][3] = 78

    engine.wait(engine.submit(save([20], [3])))

    assert [host[20, 17].item() for host in pages[0].host] == [77, 78]


def test_what_is_saved_comes_back(make: Make, pages: list[GroupPages]) -> None:
    engine = make()
    for pool in pages[0].pool:
        pool.copy_(torch.randint(0, 255, pool.shape, dtype=torch.uint8))
    before = [pool.clone() for pool in pages[0].pool]
    blocks = list(range(NUM_BLOCKS))
    engine.wait(engine.submit(save(blocks[::-1], blocks)))
    for pool in pages[0].pool:
        pool.zero_()

    engine.wait(engine.submit(load(blocks[::-1], blocks)))

    assert all(torch.equal(a, b) for a, b in zip(before, pages[0].pool, strict=True))


def test_an_empty_copy_is_done_at_once(make: Make) -> None:
    engine = make()

    assert engine.submit(load([], [])).done
    assert engine.submit(save([], [])).done


def test_an_urgent_load_overtakes_a_background_one_that_has_begun(
    make_cpu: Make, gate: LinkGate
) -> None:
    engine = make_cpu()
    everything = list(range(NUM_BLOCKS))  # eight chunks
    background = engine.submit(load(everything, everything, urgency=BACKGROUND))
    gate.await_chunk()
    urgent = engine.submit(load([1], [1], group=1, urgency=3.0))

    gate.admit(2)  # the chunk that has begun, and one more
    engine.wait(urgent)

    assert not background.done
    gate.open()
    engine.wait(background)


def test_loads_run_in_the_order_in_which_layers_need_them(make_cpu: Make, gate: LinkGate) -> None:
    engine = make_cpu()
    first = engine.submit(load(list(range(8)), list(range(8)), urgency=0.0))
    gate.await_chunk()  # it holds the link
    late = engine.submit(load(list(range(8, 16)), list(range(8, 16)), urgency=2.0))
    early = engine.submit(load(list(range(16, 24)), list(range(16, 24)), urgency=1.0))

    gate.admit(2)
    engine.wait(early)

    assert first.done
    assert not late.done
    gate.open()
    engine.wait(late)


def test_a_cancelled_copy_ends_early_and_counts_as_done(
    make_cpu: Make, pages: list[GroupPages], gate: LinkGate
) -> None:
    engine = make_cpu()
    everything = list(range(NUM_BLOCKS))  # eight chunks
    ticket = engine.submit(load(everything, everything, urgency=BACKGROUND))
    gate.await_chunk()

    engine.cancel(ticket)
    gate.open()
    engine.wait(ticket)

    assert ticket.done
    assert pages[0].pool[0][8:].sum() == 0  # the second chunk had not begun
    assert engine.totals().h2d_bytes == 8 * 2 * PAGE_BYTES


def test_until_the_link_has_carried_its_bytes_the_target_of_a_load_is_nan(
    make_cpu: Make, pages: list[GroupPages], gate: LinkGate
) -> None:
    engine = make_cpu(poison_targets=True)
    ticket = engine.submit(load([0, 1], [4, 5]))
    gate.await_chunk()

    early = pages[0].pool[0][4, 0].item()
    gate.open()
    engine.wait(ticket)

    assert early == 0xFF
    assert pages[0].pool[0][4, 0].item() == 1


def test_a_load_is_done_no_sooner_than_its_time_on_the_link(make_cpu: Make) -> None:
    engine = make_cpu(bytes_per_s=8 * 2 * PAGE_BYTES)  # 8 blocks a second
    begin_s = time.perf_counter()

    engine.wait(engine.submit(load([0, 1], [4, 5])))

    assert time.perf_counter() - begin_s >= 2 / 8


@pytest.mark.parametrize("direction", list(Direction))
def test_half_the_speed_takes_twice_the_time(make_cpu: Make, direction: Direction) -> None:
    blocks = list(range(32))  # four chunks of 4 MiB: 0.25 s and 0.5 s
    busy_s = []
    for bytes_per_s in (64 * (1 << 20), 32 * (1 << 20)):
        engine = make_cpu(bytes_per_s=bytes_per_s)
        begin_s = time.perf_counter()
        ticket = engine.submit(Copy(direction=direction, group=0, slots=blocks, block_ids=blocks))
        engine.wait(ticket)
        took_s = time.perf_counter() - begin_s
        totals = engine.totals()
        busy_s.append(totals.h2d_busy_s + totals.d2h_busy_s)
        assert took_s >= 0.99 * busy_s[-1]

    assert busy_s == pytest.approx([0.25, 0.5])


def test_totals_count_bytes_and_busy_time_per_direction(make_cpu: Make) -> None:
    engine = make_cpu(bytes_per_s=100 * 2 * PAGE_BYTES)  # 100 blocks a second

    engine.wait(engine.submit(load([0, 1, 2, 3], [0, 1, 2, 3])))
    engine.wait(engine.submit(save([0, 1], [0, 1])))

    totals = engine.totals()
    assert (totals.h2d_bytes, totals.d2h_bytes) == (4 * 2 * PAGE_BYTES, 2 * 2 * PAGE_BYTES)
    assert totals.h2d_busy_s == pytest.approx(0.04)
    assert totals.d2h_busy_s == pytest.approx(0.02)


def test_a_failing_copy_raises_where_it_is_waited_for(make: Make) -> None:
    engine = make()

    with pytest.raises(CopyFailedError):
        engine.wait(engine.submit(load([NUM_BLOCKS + 1], [0])))


def test_a_failing_copy_raises_each_time_and_the_others_go_on(
    make: Make, pages: list[GroupPages]
) -> None:
    engine = make()
    failing = engine.submit(load([NUM_BLOCKS + 1], [0]))
    healthy = engine.submit(load([5], [1]))

    for _ in range(2):
        with pytest.raises(CopyFailedError):
            engine.wait(failing)
    engine.wait(healthy)

    assert failing.done
    assert pages[0].pool[0][1, 0].item() == 6


def test_a_wait_ends_after_its_bound_and_the_copy_may_still_end(
    make_cpu: Make, pages: list[GroupPages], gate: LinkGate
) -> None:
    engine = make_cpu()
    ticket = engine.submit(load([5, 6], [1, 2]))

    with pytest.raises(CopyHungError):
        engine.wait(ticket, 0.01)

    assert not ticket.done
    gate.open()
    engine.wait(ticket)
    assert pages[0].pool[0][2, 0].item() == 7


@pytest.mark.parametrize("direction", list(Direction))
def test_closing_in_the_middle_of_copies_ends_them_and_returns(
    make_cpu: Make, direction: Direction
) -> None:
    engine = make_cpu(bytes_per_s=1.0)  # for ever
    blocks = list(range(NUM_BLOCKS))
    tickets = [
        engine.submit(Copy(direction=direction, group=0, slots=blocks, block_ids=blocks))
        for _ in range(3)
    ]

    engine.close()

    assert all(ticket.done for ticket in tickets)
    with pytest.raises(CopyFailedError):
        engine.wait(tickets[-1])
    late = engine.submit(load([1], [1]))
    with pytest.raises(CopyFailedError):
        engine.wait(late)


def test_totals_count_every_byte_of_copies_that_were_waited_for(make: Make) -> None:
    engine = make()

    engine.wait(engine.submit(load(list(range(20)), list(range(20)))))
    engine.wait(engine.submit(save([30, 31], [40, 41])))

    totals = engine.totals()
    assert (totals.h2d_bytes, totals.d2h_bytes) == (20 * 2 * PAGE_BYTES, 2 * 2 * PAGE_BYTES)


def test_a_load_brings_what_a_save_before_it_took(make: Make, pages: list[GroupPages]) -> None:
    engine = make()
    for pool in pages[0].pool:
        pool[:32] = 99
    blocks = list(range(32))
    engine.wait(engine.submit(save(blocks, blocks)))
    for pool in pages[0].pool:
        pool.zero_()

    engine.wait(engine.submit(load(blocks, blocks)))

    assert all((pool[:32] == 99).all() for pool in pages[0].pool)


def test_closing_twice_is_closing_once_and_late_copies_fail(make: Make) -> None:
    engine = make()
    engine.close()
    engine.close()

    late = engine.submit(load([1], [1]))

    with pytest.raises(CopyFailedError):
        engine.wait(late)
