"""What requests have of the pool: each its own part, and trunks, which several begin with.

A *parked* request is asleep and owns no block at all.

Leading positions may be *uncached* (`uncached.py`): the rows of all groups show one scratch block,
which is the request's, and the position belongs to no group and to no staging buffer.

The host slots of a request's leading blocks are those of its columns, which others may share; the
slots behind them are its own. One that leaves where groups keep a window or a state has a
*side copy* beside them, and comes back at the very token.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

from vllm.v1.core.kv_cache_utils import BlockHash, KVCacheBlock

from services.control.prefixes.anchors import Anchor
from services.control.requests.life import State
from services.control.requests.request_record import RequestRecord
from services.executor.blocks.holder import GroupKV, Holder
from services.executor.blocks.host_pool import SlotPromise
from services.executor.kv_holders import KVUse
from services.executor.step_messages import POSITION_BITS
from services.placement.layer_placement import LayerPlacement


class SideStage(Enum):
    """Where a side copy is."""

    LEAVES = "leaves"  # ordered, and not complete
    FAILED = "failed"  # a copy went wrong, or there was no room: its request is computed again
    KEPT = "kept"  # on the host
    COMES = "comes"  # blocks were taken for it, which are in no row
    BACK = "back"  # in its request's rows


@dataclass(slots=True, eq=False, kw_only=True)
class SideCopy:
    """What a request has beside its full blocks, on the host: it belongs to one number of tokens.

    Open blocks, windows and states, by group, side groups last.
    """

    num_tokens: int  # of the request whose next step follows it
    positions: Sequence[range] = ()  # in rows
    slots: Sequence[list[int]] = ()  # of the host; as many by group
    uids: Sequence[list[int]] = ()  # of what is in them, as it was saved
    tokens: tuple[int, ...] = ()  # behind its full blocks, of one that is to be an anchor
    anchor: Anchor | None = None  # whose slots these are, and not the request's
    stage: SideStage = SideStage.LEAVES
    step: int = 0  # that saves it; 0: not sent yet
    targets: list[list[KVCacheBlock]] = field(default_factory=list)  # that it comes back to
    under_way: dict[int, list[KVCacheBlock]] = field(default_factory=dict)  # of them, by restore id

    @property
    def is_on_host(self) -> bool:
        return self.stage is not SideStage.LEAVES and self.stage is not SideStage.FAILED

    @property
    def num_blocks(self) -> int:
        return sum(map(len, self.positions))

    @property
    def own_slots(self) -> list[int]:
        """Return its slots of the host that are no anchor's."""
        return [] if self.anchor is not None else [slot for slots in self.slots for slot in slots]


@dataclass(slots=True, eq=False, kw_only=True)
class RequestKV(Holder):
    """The holder that is one request's."""

    record: RequestRecord["RequestKV"]
    generation: int = 0  # of its KV: another one each time that begins from nothing
    first_step: int = 0  # that computed some of it; 0: none yet
    keys: Sequence[BlockHash] = ()  # of its full blocks, as its tokens become known; none: unshared
    uncached: list[KVCacheBlock] = field(default_factory=list)  # scratch blocks, by position
    # Those behind them that were scratch until now: the next step that it is in computes them anew,
    # once more, for positions that are cached from then on.
    retiring: list[KVCacheBlock] = field(default_factory=list)
    promise: SlotPromise = field(default_factory=SlotPromise)  # of room on the host
    trunks: list["Trunk"] = field(default_factory=list)  # that it begins with, in order
    side_copy: SideCopy | None = None  # made when it leaves, given up with its next step
    prompt_copy: SideCopy | None = None  # made where its prompt ended, if it was to leave an anchor
    began: Anchor | None = None  # that its KV began with

    @property
    def request_id(self) -> str:
        return self.record.request_id

    @property
    def num_shared(self) -> int:
        return self.trunks[-1].end if self.trunks else 0

    @property
    def is_copied(self) -> bool:
        return self.mirrored

    @property
    def leaves_columns(self) -> bool:
        return bool(self.keys) and self.record.state is State.LEAVING

    @property
    def num_host_blocks(self) -> int:
        for trunk in self.trunks:
            if not trunk.mirrored:
                return trunk.num_copied_blocks
        return self.num_copied_blocks

    def shown_rows(self) -> tuple[list[KVCacheBlock], ...]:
        """Return what its block table shows, by layer group: of its trunks, then its own."""
        if not self.trunks:
            return tuple(group.row for group in self.groups)
        return tuple(
            [
                *(b for trunk in self.trunks for b in trunk.groups[index].row[trunk.first :]),
                *group.row[self.first :],
            ]
            for index, group in enumerate(self.groups)
        )

    @property
    def num_recomputed(self) -> int:
        """Return how many leading positions a step computes anew."""
        return len(self.uncached) + len(self.retiring)

    @property
    def num_saved(self) -> int:
        """Return how many blocks more it would own if no position were uncached."""
        num_holders = len(self.groups) - len(self.offloaded) + len(self.staging)
        return len(self.uncached) * (num_holders - 1)

    def recomputed_row(self, index: int) -> list[KVCacheBlock]:
        """Return where a step writes what it computes anew of a group."""
        group = self.groups[index]
        if group.offloaded:  # what is cached from now on comes from the host
            return [*self.uncached, *self.retiring]
        return group.row[: self.num_recomputed]

    @property
    def scratch(self) -> list[KVCacheBlock]:
        if self.side_copy is not None:
            return [block for blocks in self.side_copy.targets for block in blocks]
        return [*self.uncached, *self.retiring]

    @property
    def side_slots(self) -> list[int]:
        """Return the host slots of its own, of what it has there beside its full blocks."""
        return [slot for copy in self.side_copies for slot in copy.own_slots]

    @property
    def side_copies(self) -> Sequence[SideCopy]:
        return [copy for copy in (self.side_copy, self.prompt_copy) if copy is not None]

    @property
    def num_side_tokens(self) -> int:
        return self.side_copy.num_tokens if self.side_copy and self.side_copy.is_on_host else 0

    @property
    def use(self) -> KVUse:
        """Return where its KV is, in tokens of all layers."""
        return KVUse(
            num_pool_tokens=self.num_owned * self.block_size // len(self.groups),
            num_host_tokens=self.num_host_blocks * self.block_size,
            num_shared_tokens=self.num_shared * self.block_size,
        )

    def num_blocks_in_transit(self) -> int:
        """Return what `Holder` does, and blocks that are scratch no more."""
        return super(RequestKV, self).num_blocks_in_transit() + len(self.retiring)

    def uid(self, position: int) -> int:
        if position < len(self.columns):
            return self.columns[position].uid
        return self.generation << POSITION_BITS | position

    def uids(self, positions: range) -> Sequence[int]:
        """Return the same for a stretch."""
        shared = self.columns[positions.start : positions.stop]
        first = self.generation << POSITION_BITS
        own = range(first + positions.start + len(shared), first + positions.stop)
        return [*(column.uid for column in shared), *own]

    def own_slots(self) -> list[int]:
        """Return the host slots behind its columns."""
        return [slot for group in self.groups for slot in group.host_slots[len(self.columns) :]]

    @property
    def num_slots_of_its_own(self) -> int:
        """Return how many host slots no other uses."""
        alone = (len(column.slots) for column in self.columns if column.num_users == 1)
        behind = (len(group.host_slots) - len(self.columns) for group in self.groups)
        anchor = self.side_copy and self.side_copy.anchor
        num_anchored = len(anchor.slots) if anchor and anchor.num_users == 1 else 0
        return sum(behind) + sum(alone) + len(self.side_slots) + num_anchored

    @property
    def is_parked(self) -> bool:
        """Whether it waits, all of it is on the host, and nothing is on its way back."""
        return (
            self.record.state.is_queued
            and self.asleep
            and not self.trunks
            and (self.side_copy is None or self.side_copy.stage is SideStage.KEPT)
            and all(
                group.offloaded and not group.own and group.restore is None for group in self.groups
            )
        )

    def check_integrity(self) -> None:
        super(RequestKV, self).check_integrity()
        number = len(self.uncached)
        assert number <= self.num_full_blocks, "an open block is uncached"
        runs = not self.record.state.is_queued
        assert runs or not self.num_recomputed, "scratch of a request in the queue"
        assert self.first == (self.num_shared or number)
        assert not (self.trunks and self.scratch), "a request that shares has scratch"
        assert self.trunks or self.groups[0].row[:number] == self.uncached, "a row without scratch"
        waits = self.asleep and not runs
        assert not waits or all(c.is_complete for c in self.columns[self.first :]), "no copy comes"


@dataclass(slots=True, eq=False, kw_only=True)
class Trunk(Holder):
    """A stretch of positions that its users begin with, behind their trunks before it.

    Nothing of it is written any more. It has a place on the host, in columns that its users have,
    too, if there was room. Until its copies are complete it is not `mirrored`: it stays in the
    pool; without room on the host, as long as it has users. It takes part in each step that one of
    its users is in.
    """

    name: str
    users: dict[RequestKV, None]  # which have a place in the pool, or are on their way there
    floor: LayerPlacement | None = None  # what leaves in any case; None: all may be in the pool
    is_found: bool = True  # what it leaves in the pool when it ends
    num_failed_saves: int = 0  # steps in which copies of it to the host failed

    @property
    def request_id(self) -> str:
        return self.name

    @property
    def end(self) -> int:
        """Return the position behind it."""
        return len(self.columns)

    @property
    def num_shared(self) -> int:
        return self.first

    @property
    def is_copied(self) -> bool:
        return bool(self.columns[-1].slots)

    @property
    def trunks(self) -> tuple[()]:
        """Return none: those before it are its users'."""
        return ()

    @property
    def is_parked(self) -> bool:
        return False

    def uid(self, position: int) -> int:
        return self.columns[position].uid

    def check_integrity(self) -> None:
        super(Trunk, self).check_integrity()
        assert self.users, "a trunk that nobody uses"
        assert self.num_rows == self.end == self.num_full_blocks
        assert self.mirrored == (self.num_copied_blocks == self.end), "a trunk is not on the host"
        assert self.mirrored or not self.offloaded, "a trunk left before it was on the host"


def users_of(holder: Holder) -> list[RequestKV]:
    """Return the requests that begin with a trunk, or the one whose own part a holder is."""
    if isinstance(holder, Trunk):
        return list(holder.users)
    assert isinstance(holder, RequestKV)
    return [holder]


def on_host_only(
    old: RequestKV, host_slots: Sequence[list[int]], *, null: KVCacheBlock
) -> RequestKV:
    """Return the KV of a request that waits in the queue, as `old` but for where it is.

    `host_slots`: of its leading blocks, by layer group; `null` stands in its rows.
    """
    num_blocks = len(host_slots[0])
    return replace(
        old,
        groups=[
            GroupKV(
                row=[null] * num_blocks,
                offloaded=True,
                host_slots=slots,
                num_saves_sent=num_blocks,
                num_host_blocks=num_blocks,
                buffer=-1,
            )
            for slots in host_slots
        ],
        staging=[],
        uncached=[],
        retiring=[],
        num_tokens=num_blocks * old.block_size,
        asleep=True,
        promise=SlotPromise(),
        trunks=[],
    )
