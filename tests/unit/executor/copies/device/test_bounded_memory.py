"""What a rank keeps does not grow with its steps, whichever copies they make."""

import gc
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from bench.gpu.costs import IdleDevice, IdleEvent
from services.executor.copies.copy_engine import Copy, Direction
from services.executor.copies.copy_job import CopyJob
from services.executor.copies.copy_watch import WatchedCopy
from services.executor.copies.device.stream_copy_engine import StreamCopyEngine
from services.executor.copies.pages import GroupPages
from services.executor.copies.timing.layer_clock import LayerClock
from services.executor.copies.timing.rank_stats import RankStats
from services.executor.copies.timing.step_marks import Mark, StepMarks
from services.executor.copies.transfer_runner import RunningSave, TransferRunner
from services.executor.step_messages import (
    LoadTableUpdate,
    PrefixSlots,
    SaveOrder,
    StagingUpdate,
    StepTransfers,
)

pytestmark = pytest.mark.filterwarnings("default")

NUM_GROUPS, NUM_COPIES = 8, 1_600
KEPT = (CopyJob, WatchedCopy, RunningSave, IdleEvent, Mark)


class Rank:
    """A rank that reports its times and sums with each step, on a device that is never behind."""

    def __init__(self) -> None:
        pool, host = (torch.zeros((4, 8), dtype=torch.uint8) for _ in range(2))
        pages = [GroupPages(pool=(pool,), host=(host,))] * NUM_GROUPS
        self.engine = StreamCopyEngine(pages, IdleDevice())
        self.runner = TransferRunner(self.engine, NUM_GROUPS)
        self.clock = LayerClock(
            self.runner, StepMarks(self.engine), num_layers=NUM_GROUPS, chunk_bytes=8
        )
        self.stats = RankStats(self.runner, 0)
        self.num_steps = 0

    def run(self, **transfers: Any) -> None:
        self.num_steps += 1
        message = StepTransfers(step=self.num_steps, **transfers)
        self.runner.take_in(message)
        self.runner.begin_step(message)
        self.clock.marks.layers_begin(message.step)
        for group in range(NUM_GROUPS):
            self.runner.before_group(group)
            self.runner.after_group(group)
        self.clock.marks.layers_end()
        self.runner.end_step()
        assert not self.runner.feedback().lost_requests
        self.clock.take()
        self.stats.take()


@pytest.fixture
def rank() -> Iterator[Rank]:
    gc.collect()
    gc.freeze()  # what other tests left is not looked through again and again
    rank = Rank()
    yield rank
    rank.engine.close()
    gc.unfreeze()


def num_kept() -> Counter[str]:
    gc.collect()
    return Counter(type(kept).__name__ for kept in gc.get_objects() if type(kept) in KEPT)


def growth(rank: Rank, **transfers: Any) -> Counter[str]:
    """Return how much more there is after so many copies than after a few."""
    for _ in range(20):
        rank.run(**transfers)
    before = num_kept()
    for _ in range(NUM_COPIES // NUM_GROUPS):
        rank.run(**transfers)
    return num_kept() - before


def test_twenty_thousand_saves_are_one_to_look_through_when_something_is_loaded(
    rank: Rank,
) -> None:
    save = Copy(direction=Direction.D2H, group=0, slots=[0], block_ids=[1])
    for _ in range(20_000):
        rank.engine.submit(save)

    assert num_kept()["CopyJob"] == 1


def test_saves_leave_nothing_behind_though_nothing_is_ever_loaded(rank: Rank) -> None:
    saves = [SaveOrder("r", group, [0], [0], [1], False) for group in range(NUM_GROUPS)]

    assert growth(rank, saves=saves) == {}


def test_loads_leave_nothing_behind_where_waits_issue_them_all(rank: Rank) -> None:
    rank.run(
        prefixes=[PrefixSlots("r", [0], [[0]] * NUM_GROUPS)],
        num_staging={"r": 2},
        staging_updates=[StagingUpdate("r", 0, 0, [1]), StagingUpdate("r", 1, 0, [2])],
        table_updates=[
            LoadTableUpdate("r", group, True, group % 2, [range(1)]) for group in range(NUM_GROUPS)
        ],
        loading=["r"],
    )

    assert growth(rank, loading=["r"]) == {}
    assert rank.runner.num_loads >= NUM_COPIES
