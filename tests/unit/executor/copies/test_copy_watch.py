"""How long a copy may take, and what is told of one that takes longer."""

import random

import pytest

from services.executor.copies.copy_engine import Copy, Direction
from services.executor.copies.copy_watch import CopyWatch, Patience
from services.executor.kv_options import KVOptions
from services.executor.step_messages import FailureCause
from tests.unit.executor.failing_copies import FailingEngine, FaultRates
from tests.unit.executor.simulated_ranks import LateTicket

pytestmark = pytest.mark.filterwarnings("default")


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def engine() -> FailingEngine:
    return FailingEngine({}, random.Random(1))


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def watch(engine: FailingEngine, clock: Clock) -> CopyWatch:
    return CopyWatch(engine, Patience(least_s=10.0, s_per_block=1.0), clock=clock)


def load(*block_ids: int) -> Copy:
    return Copy(direction=Direction.H2D, group=0, slots=block_ids, block_ids=block_ids)


def save(*slots: int) -> Copy:
    return Copy(direction=Direction.D2H, group=0, slots=slots, block_ids=slots)


def test_a_copy_is_late_after_its_floor_and_the_time_of_its_blocks(
    watch: CopyWatch, clock: Clock
) -> None:
    copy = watch.submit(load(1, 2, 3))

    clock.now_s = 12.9
    assert not watch.poll(copy)
    clock.now_s = 13.0
    assert watch.poll(copy)


def test_whatever_may_go_before_a_copy_gives_it_time(watch: CopyWatch, clock: Clock) -> None:
    watch.submit(load(1, 2))
    copy = watch.submit(load(3))
    watch.submit(load(4, 5, 6, 7))  # may be more urgent
    watch.submit(save(8, 9))  # another queue

    clock.now_s = 16.9
    assert not watch.poll(copy)
    clock.now_s = 17.0
    assert watch.poll(copy)


def test_what_was_carried_before_gives_no_time(watch: CopyWatch, clock: Clock) -> None:
    watch.wait(watch.submit(load(1, 2)))
    watch.sweep()
    copy = watch.submit(load(3))

    clock.now_s = 11.0
    assert watch.poll(copy)


def test_a_hung_copy_is_cancelled_and_its_targets_are_told_until_it_ends(
    watch: CopyWatch, engine: FailingEngine
) -> None:
    engine.rates = FaultRates(hangs=1.0)
    loaded, saved = watch.submit(load(1, 2)), watch.submit(save(7))

    assert watch.wait(loaded) is watch.wait(saved) is FailureCause.HUNG
    assert watch.hung_targets() == ({1, 2}, {7})
    assert loaded.ticket.cancelled

    engine.end_hung(loaded.ticket)
    assert watch.hung_targets() == (set(), {7})
    assert watch.failures == {FailureCause.HUNG: 2}


def test_the_answer_about_a_copy_stays_the_same(watch: CopyWatch, engine: FailingEngine) -> None:
    engine.rates = FaultRates(fails=1.0)
    copy = watch.submit(load(1))

    assert [watch.wait(copy) for _ in range(3)] == [FailureCause.FAILED] * 3
    assert watch.failures == {FailureCause.FAILED: 1}


def test_a_modelled_link_is_given_twice_its_time() -> None:
    slow = KVOptions(h2d_bytes_per_s=1e6, copy_timeout_s=3.0)

    assert Patience.of(slow, block_bytes=1_000) == Patience(least_s=3.0, s_per_block=2e-3)
    assert Patience.of(KVOptions(), block_bytes=1_000).s_per_block == pytest.approx(
        1_000 / KVOptions().slowest_bytes_per_s
    )


def test_a_copy_that_waits_for_layers_is_late_only_long_after_they_have_run(
    watch: CopyWatch, engine: FailingEngine, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LateTicket, "waits_for_layers", True)
    copy = watch.submit(load(1))

    clock.now_s = 1_000.0  # a step that compiled something
    assert not watch.poll(copy)

    monkeypatch.setattr(LateTicket, "waits_for_layers", False)
    assert not watch.poll(copy)
    clock.now_s = 1_010.9
    assert not watch.poll(copy)
    clock.now_s = 1_011.0
    assert watch.poll(copy)
