"""What travels with a step: from the scheduler to every rank, and back.

Block ids and slots are sent once, when they change, and a rank keeps them: slots as saves and
restores name them, blocks of staging buffers as they are taken. What loads copy, and what rows show
of it, is then said by positions. So neither what a steady decode step sends nor a layer group that
leaves grows with the context. To vLLM these are what its connectors' metadata are; it asks for no
base class, and copies run without vLLM.
"""

import sys
from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum

from services.control.measures.step_timing import LinkCalibration, StepTiming

CHUNK_BYTES = 4 << 20  # a copy goes in chunks of about this size, so that others can overtake it
POSITION_BITS = 24  # of a uid, its last: the position in a row, which has fewer blocks than that


def position_of(uid: int) -> int:
    """Return the position of a block's KV in its row."""
    return uid & ((1 << POSITION_BITS) - 1)


class FailureCause(StrEnum):
    """What went wrong with a copy."""

    FAILED = "failed"  # it ended without moving every byte
    HUNG = "hung"  # it did not end in time, and may still write
    CORRUPT = "corrupt"  # it ended, and the bytes are not those that left


@dataclass(frozen=True, slots=True)
class RowEdit:
    """Block ids that replace a stretch of a running request's row before the step."""

    request_id: str
    group: int
    start: int  # first position, in blocks
    block_ids: list[int]


@dataclass(frozen=True, slots=True)
class PrefixSlots:
    """Where a request's first blocks are on the host that others have saved."""

    request_id: str
    uids: list[int]  # by position
    slots: list[list[int]]  # by layer group; each as long as `uids`


@dataclass(frozen=True, slots=True)
class StagingUpdate:
    """The blocks of one of a request's staging buffers, from a position on to its end."""

    request_id: str
    buffer: int
    start: int
    block_ids: list[int]


@dataclass(frozen=True, slots=True)
class LoadTableUpdate:
    """What an offloaded group loads at each step from now on, and what its row shows.

    The slot of each position goes to the block of that position in the group's staging buffer.
    """

    request_id: str
    group: int
    replace: bool  # True: this is the whole table; False: append to it
    buffer: int
    positions: list[range]  # stretches of the request's row that are not in the table yet


@dataclass(frozen=True, slots=True)
class SaveOrder:
    """Blocks to copy to the host: full ones, or what goes with a request that is in no step.

    After the group has run in this step; of groups that no layer waits for, before the layers.
    """

    request_id: str
    group: int
    uids: list[int]  # of the blocks' KV (`RequestKV.uid`); as long as the two below
    slots: list[int]
    block_ids: list[int]
    from_staging: bool  # the next user of the staging buffer waits for this copy


@dataclass(frozen=True, slots=True)
class RestoreOrder:
    """A background copy from the host; its blocks are in no row until every rank is done."""

    restore_id: int
    request_id: str
    group: int
    uids: list[int]  # of the blocks' KV (`RequestKV.uid`); as long as the two below
    slots: list[int]
    block_ids: list[int]


@dataclass(frozen=True, slots=True)
class FoundOrder:
    """Blocks that a request takes as they are; nothing is copied, and the guard looks at them."""

    request_id: str
    group: int
    uids: list[int]  # of the KV that they hold; as long as the two below
    slots: list[int]  # which hold the same
    block_ids: list[int]


@dataclass(kw_only=True)
class StepTransfers:
    """All that a rank does with KV in one step."""

    step: int  # grows by one with each step, from 1
    row_edits: list[RowEdit] = field(default_factory=list)
    # With poisoning on: freed blocks become NaN, blocks that take new tokens zero, for attention
    # multiplies what lies behind a row's last token by zero.
    poisoned_block_ids: list[int] = field(default_factory=list)
    cleared_block_ids: list[int] = field(default_factory=list)
    dropped_tables: list[tuple[str, int | None]] = field(default_factory=list)  # None: all groups
    table_updates: list[LoadTableUpdate] = field(default_factory=list)
    # Leading positions that requests in `dropped_tables` keep the slots of: they were parked.
    num_kept_slots: dict[str, int] = field(default_factory=dict)
    prefixes: list[PrefixSlots] = field(default_factory=list)  # of requests that begin with some
    num_staging: dict[str, int] = field(default_factory=dict)  # of requests where it changed
    staging_updates: list[StagingUpdate] = field(default_factory=list)
    loading: list[str] = field(default_factory=list)  # scheduled holders with offloaded groups
    saves: list[SaveOrder] = field(default_factory=list)
    restores: list[RestoreOrder] = field(default_factory=list)
    found: list[FoundOrder] = field(default_factory=list)
    cancelled_restores: list[int] = field(default_factory=list)
    # Requests whose rows begin with a trunk's, by its name, where that has changed.
    users: dict[str, list[str]] = field(default_factory=dict)

    @property
    def needs_hooks(self) -> bool:
        """Whether layers must be entered one by one: they load, or write staging that is saved.

        Copies of own blocks to the host may as well start after the last layer.
        """
        return bool(self.loading) or any(save.from_staging for save in self.saves)


@dataclass(frozen=True, slots=True)
class HostRoom:
    """What one rank tells the scheduler before the first step."""

    num_slots: int  # that the rank has memory for
    calibration: LinkCalibration | None = None  # None: there was no room to measure


@dataclass(kw_only=True)
class StepFeedback:
    """What one rank, or several together, have completed, and what went wrong with them."""

    step: int
    # Copies to the host of all steps up to this one have ended: they are complete unless they are
    # in `failed_saves` of this feedback or an earlier one, or their request was lost.
    saved_step: int
    num_ranks_done: Counter[int] = field(default_factory=Counter)  # by restore id, each rank once
    timing: StepTiming = field(default_factory=StepTiming)  # of the step
    # Requests whose KV is wrong on some rank: their tokens of this step and later ones are, too.
    lost_requests: dict[str, FailureCause] = field(default_factory=dict)
    # By (step, request, layer group): own blocks whose copy to the host did not succeed.
    failed_saves: dict[tuple[int, str, int], FailureCause] = field(default_factory=dict)
    failed_restores: dict[int, FailureCause] = field(default_factory=dict)  # by restore id
    # What copies that were given up may still write, on some rank, after this step.
    hung_blocks: frozenset[int] = frozenset()  # of the pool
    hung_slots: frozenset[int] = frozenset()  # of the host
    # The first host slots, which may be used; a rank that has nothing to pin has all of them.
    num_ready_slots: int = sys.maxsize

    def aggregate(self, other: "StepFeedback") -> "StepFeedback":
        return StepFeedback(
            step=max(self.step, other.step),
            saved_step=min(self.saved_step, other.saved_step),
            num_ranks_done=self.num_ranks_done + other.num_ranks_done,
            timing=self.timing.aggregate(other.timing),
            lost_requests=self.lost_requests | other.lost_requests,
            failed_saves=self.failed_saves | other.failed_saves,
            failed_restores=self.failed_restores | other.failed_restores,
            hung_blocks=self.hung_blocks | other.hung_blocks,
            hung_slots=self.hung_slots | other.hung_slots,
            num_ready_slots=min(self.num_ready_slots, other.num_ready_slots),
        )
