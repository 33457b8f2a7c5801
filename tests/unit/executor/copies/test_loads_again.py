"""What a step loads as the step before did is the same copy, which is looked through once."""

import random
import sys
from array import array
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch

from bench.gpu.costs import IdleDevice
from lab.fake_streams import FakeDevice
from services.executor.copies.copy_engine import Copy, Direction
from services.executor.copies.device import stream_copy_engine
from services.executor.copies.device.stream_copy_engine import StreamCopyEngine
from services.executor.copies.pages import GroupPages
from services.executor.copies.transfer_runner import TransferRunner
from services.executor.step_messages import (
    LoadTableUpdate,
    PrefixSlots,
    StagingUpdate,
    StepTransfers,
)

pytestmark = pytest.mark.filterwarnings("default")


@pytest.fixture
def looked_through(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return the batches that were made."""
    batches: list[Any] = []
    make = stream_copy_engine.between_pool_and_host

    def noted(*arguments: Any) -> Any:
        batches.append(make(*arguments))
        return batches[-1]

    monkeypatch.setattr(stream_copy_engine, "between_pool_and_host", noted)
    return batches


class Loads:
    """A runner over the device engine whose request loads some blocks of one layer group."""

    def __init__(self) -> None:
        pool, host = (torch.zeros((20, 8), dtype=torch.uint8) for _ in range(2))
        host[:] = torch.arange(20, dtype=torch.uint8)[:, None]
        self.pool, self.device = pool, FakeDevice(0)
        self.engine = StreamCopyEngine([GroupPages(pool=(pool,), host=(host,))], self.device)
        self.runner = TransferRunner(self.engine, 1)
        self._step = 0

    def run(self, **changes: Any) -> None:
        self._step += 1
        message = StepTransfers(step=self._step, loading=["r"], **changes)
        self.runner.take_in(message)
        self.runner.begin_step(message)
        self.runner.before_group(0)
        self.runner.after_group(0)
        self.runner.end_step()
        self.device.finish()

    def begin(self) -> None:
        self.run(
            prefixes=[PrefixSlots("r", [0, 1, 2], [[7, 8, 9]])],
            num_staging={"r": 1},
            staging_updates=[StagingUpdate("r", 0, 0, [1, 2, 3])],
            table_updates=[LoadTableUpdate("r", 0, True, 0, [range(2)])],
        )


def test_steps_that_load_the_same_make_the_copy_once(looked_through: list[Any]) -> None:
    loads = Loads()
    loads.begin()
    for _ in range(5):
        loads.pool.zero_()
        loads.run()
        assert loads.pool[:4, 0].tolist() == [0, 7, 8, 0]

    assert len(looked_through) == 1
    loads.engine.close()


def test_a_table_that_grows_or_changes_its_buffer_is_another_copy(
    looked_through: list[Any],
) -> None:
    loads = Loads()
    loads.begin()
    loads.run(table_updates=[LoadTableUpdate("r", 0, False, 0, [range(2, 3)])])
    assert loads.pool[:4, 0].tolist() == [0, 7, 8, 9]

    loads.run(
        staging_updates=[StagingUpdate("r", 0, 0, [11, 12, 13])],
        table_updates=[LoadTableUpdate("r", 0, True, 0, [range(3)])],
    )
    assert loads.pool[11:14, 0].tolist() == [7, 8, 9]
    assert len(looked_through) == 3
    loads.engine.close()


def test_an_engine_that_is_given_equal_copies_takes_neither_for_the_other(
    looked_through: list[Any],
) -> None:
    loads = Loads()
    for block in (5, 6):
        copy = Copy(direction=Direction.H2D, group=0, slots=[4], block_ids=[block])
        loads.engine.wait(loads.engine.submit(copy))
    loads.device.finish()

    assert loads.pool[5:7, 0].tolist() == [4, 4]
    assert len(looked_through) == 2
    loads.engine.close()


def num_calls(num_blocks: int, num_loads: int) -> float:
    """Return the calls that a load takes that is not what its group loaded last, on average."""
    rows = list(range(num_blocks))
    random.Random(0).shuffle(rows)
    pool, host = (torch.zeros((num_blocks + 1, 8), dtype=torch.uint8) for _ in range(2))
    engine = StreamCopyEngine([GroupPages(pool=(pool,), host=(host,))], IdleDevice())
    load = Copy(
        direction=Direction.H2D, group=0, slots=array("q", rows), block_ids=array("q", rows)
    )
    calls: Counter[str] = Counter()
    loads = [replace(load) for _ in range(num_loads)]
    sys.setprofile(lambda frame, event, argument: calls.update([event]))
    for copy in loads:
        engine.wait(engine.submit(copy))
    sys.setprofile(None)
    engine.close()
    return (calls["call"] + calls["c_call"]) / num_loads


def test_a_changed_load_takes_few_calls_however_many_blocks_it_has_and_wakes_no_thread() -> None:
    assert num_calls(512, 20) == num_calls(64, 20) < 100
