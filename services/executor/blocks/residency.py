"""Who owns which block: the KV of one request, per layer group.

A group of a request is *resident* (every block of its row is its own) or *offloaded* (its full
blocks are on the host, and their row entries point at the request's staging buffers; only blocks
that are not yet complete on the host are its own: the open block that takes new tokens, and full
blocks awaiting their copy). A group that is being *restored* is offloaded until its copy is
complete on every rank; its target blocks are in no row.

A request that does not run may be *asleep*: it has no staging buffers, and the row entries of what
is on the host show the null block. A *parked* request is asleep and owns no block at all.

Leading positions may be *uncached* (`uncached.py`): the rows of all groups show one scratch block,
which is the request's, and the position belongs to no group and to no staging buffer.

The host slots of a request's leading blocks are those of its columns, which others may share; the
slots behind them are its own.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, pairwise

from vllm.v1.core.kv_cache_utils import BlockHash, KVCacheBlock

from services.control.kv import KVView
from services.control.prefix_cache import Column
from services.control.requests.request_record import RequestRecord
from services.executor.blocks.host_pool import SlotPromise
from services.executor.step_messages import POSITION_BITS
from services.placement.layer_placement import LayerPlacement


@dataclass(slots=True)
class Restore:
    """Blocks that a group's KV comes back to. It may be ordered in parts, as blocks come free."""

    targets: dict[int, KVCacheBlock] = field(default_factory=dict)  # by position
    under_way: dict[int, list[KVCacheBlock]] = field(default_factory=dict)  # by restore id


@dataclass(slots=True)
class GroupKV:
    """One request's KV in one layer group."""

    row: list[KVCacheBlock] = field(default_factory=list)  # what its block table shows
    num_uncached: int = 0  # leading positions that are not the group's
    offloaded: bool = False
    own: dict[int, KVCacheBlock] = field(default_factory=dict)  # of an offloaded group, by position
    host_slots: list[int] = field(default_factory=list)  # by position
    num_saves_sent: int = 0  # leading blocks whose copy to the host was ordered
    num_host_blocks: int = 0  # leading blocks whose host copy is complete on every rank
    restore: Restore | None = None
    num_failed_restores: int = 0
    restore_from_step: int = 0  # no restore begins before this step
    buffer: int = 0  # staging buffer of an offloaded group; -1: of a resident one, none

    @property
    def stages(self) -> bool:
        """Whether new full blocks go to staging: offloaded, and meant to stay so."""
        return self.offloaded and self.restore is None

    def staged_stretches(self) -> list[range]:
        """Return the positions whose row entry is a staging block, ascending."""
        if not self.offloaded:
            return []
        return [
            range(own + 1, after)
            for own, after in pairwise([self.num_uncached - 1, *sorted(self.own), len(self.row)])
            if own + 1 < after
        ]

    def staged_positions(self) -> Iterator[int]:
        """Positions whose row entry is a staging block, ascending."""
        return chain.from_iterable(self.staged_stretches())

    def hand_over(self, positions: range) -> list[KVCacheBlock | None]:
        """Return its own blocks of these positions, which are not its own any more. It ends."""
        if self.offloaded:
            return [self.own.pop(position, None) for position in positions]
        blocks: list[KVCacheBlock | None] = [*self.row[positions.start : positions.stop]]
        del self.row[positions.start : positions.stop]
        return blocks

    @property
    def num_owned(self) -> int:
        own = len(self.own) if self.offloaded else len(self.row) - self.num_uncached
        return own + (len(self.restore.targets) if self.restore is not None else 0)

    def owned_blocks(self) -> Iterable[KVCacheBlock]:
        blocks = list(self.own.values()) if self.offloaded else self.row[self.num_uncached :]
        if self.restore is not None:
            blocks.extend(self.restore.targets.values())
        return blocks


@dataclass(slots=True, eq=False)
class RequestKV:
    """One request's KV: rows of equal length, one per layer group, and its staging buffers."""

    record: RequestRecord["RequestKV"]
    groups: list[GroupKV]
    mirrored: bool  # has room on the host; an unmirrored request stays resident
    block_size: int  # tokens
    generation: int = 0  # of its KV: another one each time that begins from nothing
    first_step: int = 0  # that uses these blocks, since it was admitted; 0: none yet
    wanted_staging: int = 1  # buffers its placement asks for
    keys: Sequence[BlockHash] = ()  # of its full blocks, as its tokens become known; none: unshared
    columns: list[Column] = field(default_factory=list)  # of its leading blocks
    # Equal lengths; each begins with the scratch blocks.
    staging: list[list[KVCacheBlock]] = field(default_factory=list)
    uncached: list[KVCacheBlock] = field(default_factory=list)  # scratch blocks, by position
    # Those behind them that were scratch until now: the next step that it is in computes them anew,
    # once more, for positions that are cached from then on.
    retiring: list[KVCacheBlock] = field(default_factory=list)
    num_tokens: int = 0  # whose KV exists once the steps sent so far have run
    asleep: bool = False  # does not run and has no staging
    promise: SlotPromise = field(default_factory=SlotPromise)  # of room on the host

    @property
    def request_id(self) -> str:
        return self.record.request_id

    @property
    def num_rows(self) -> int:
        return len(self.groups[0].row)

    @property
    def staging_length(self) -> int:
        return len(self.staging[0]) if self.staging else 0

    @property
    def num_staging_blocks(self) -> int:
        return sum(len(buffer) - len(self.uncached) for buffer in self.staging)

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
    def num_staged_positions(self) -> int:
        """Return how long a staging buffer must be: up to the last staged position."""
        stretches = [group.staged_stretches() for group in self.groups if group.offloaded]
        return max((last[-1].stop for last in stretches if last), default=0)

    @property
    def offloaded(self) -> list[int]:
        """The offloaded groups, in the order in which a step needs them."""
        return [index for index, group in enumerate(self.groups) if group.offloaded]

    @property
    def placement(self) -> LayerPlacement:
        return LayerPlacement(
            offloaded=frozenset(self.offloaded), num_staging=max(1, len(self.staging))
        )

    @property
    def restoring(self) -> list[int]:
        """The groups on their way back."""
        return [index for index, group in enumerate(self.groups) if group.restore is not None]

    @property
    def num_buffers(self) -> int:
        return len(self.staging)

    @property
    def num_full_blocks(self) -> int:
        """Full blocks per group."""
        return self.num_tokens // self.block_size

    @property
    def num_owned(self) -> int:
        return len(self.owned_blocks())

    @property
    def num_owned_when_copied(self) -> int:
        """Blocks that it owns, not running, once copies under way are complete."""
        num_open = max(0, self.num_rows - self.num_full_blocks)
        num_blocks = sum(len(buffer) for buffer in self.staging)
        for group in self.groups:
            num_blocks += num_open if group.offloaded else self.num_rows
            if group.restore is not None:
                num_blocks += len(group.restore.targets)
        return num_blocks + len(self.retiring) - self.num_saved

    @property
    def num_unmovable(self) -> int:
        """Blocks that it keeps, not running: open and scratch ones, or all without a host copy."""
        if not self.mirrored:
            return self.num_owned
        num_open = max(0, self.num_rows - self.num_full_blocks)
        return len(self.groups) * num_open + self.num_recomputed

    @property
    def view(self) -> KVView:
        offloaded = self.offloaded
        num_blocks = [group.num_owned for group in self.groups]
        num_blocks[0] += self.num_recomputed
        for index, buffer in zip(offloaded, self.staging, strict=False):
            num_blocks[index] += len(buffer) - len(self.uncached)
        return KVView(
            offloaded=tuple(offloaded),
            num_buffers=len(self.staging) or min(1, len(offloaded)),
            num_blocks=tuple(num_blocks),
            num_host_blocks=tuple(group.num_host_blocks for group in self.groups),
        )

    def uid(self, position: int) -> int:
        """Return a number that stands for the KV of a block position, and for no other's."""
        if position < len(self.columns):
            return self.columns[position].uid
        return self.generation << POSITION_BITS | position

    def uids(self, positions: range) -> Sequence[int]:
        """Return the same for a stretch."""
        shared = self.columns[positions.start : positions.stop]
        first = self.generation << POSITION_BITS
        own = range(first + positions.start + len(shared), first + positions.stop)
        return [*(column.uid for column in shared), *own]

    def owned_blocks(self) -> list[KVCacheBlock]:
        owned = [block for group in self.groups for block in group.owned_blocks()]
        num_uncached = len(self.uncached)
        owned.extend(block for buffer in self.staging for block in buffer[num_uncached:])
        return [*owned, *self.uncached, *self.retiring]

    @property
    def num_host_blocks(self) -> int:
        """Return how many leading blocks have a complete host copy in every group."""
        return min(group.num_host_blocks for group in self.groups)

    def own_slots(self) -> list[int]:
        """Return the host slots behind its columns."""
        return [slot for group in self.groups for slot in group.host_slots[len(self.columns) :]]

    @property
    def num_slots_of_its_own(self) -> int:
        """Return how many host slots nobody else uses."""
        num_alone = sum(column.num_users == 1 for column in self.columns)
        behind = (len(group.host_slots) - len(self.columns) for group in self.groups)
        return sum(behind) + num_alone * len(self.groups)

    @property
    def is_parked(self) -> bool:
        """Whether it waits, all of it is on the host, and nothing is on its way back."""
        return (
            self.record.state.is_queued
            and self.asleep
            and all(
                group.offloaded and not group.own and group.restore is None for group in self.groups
            )
        )

    def num_blocks_in_transit(self) -> int:
        """Return what it owns beyond the block formula: copies under way in either direction.

        Full own blocks of offloaded groups, less the staging blocks that they will become, the
        targets of restores, and blocks that are scratch no more.
        """
        num_full = self.num_full_blocks
        waiting = sum(
            sum(1 for position in group.own if position < num_full)
            for group in self.groups
            if group.offloaded
        )
        missing = sum(num_full - len(buffer) for buffer in self.staging)
        targets = sum(len(g.restore.targets) for g in self.groups if g.restore is not None)
        return waiting - missing + targets + len(self.retiring)

    def check_integrity(self) -> None:
        """Assert that every row entry is an own block or the staging block of its position."""
        lengths = {len(group.row) for group in self.groups}
        assert len(lengths) == 1, f"rows of {self.request_id} differ in length: {lengths}"
        assert len({len(buffer) for buffer in self.staging}) <= 1, "staging buffers differ"
        self._check_uncached()
        chain = self.offloaded
        if self.asleep:
            assert not self.staging, "a request that is asleep has staging"
        else:
            assert bool(chain) == bool(self.staging), "staging without offloaded groups, or reverse"
        assert len(self.staging) <= max(len(chain), 1)
        for ordinal, index in enumerate(chain):
            self._check_offloaded(
                self.groups[index], ordinal % len(self.staging) if self.staging else -1
            )
        for group in self.groups:
            assert len(self.columns) <= group.num_host_blocks
            assert group.num_host_blocks <= group.num_saves_sent <= len(group.host_slots)
            assert group.offloaded or (not group.own and group.restore is None)
        for position, column in enumerate(self.columns):
            slots = tuple(group.host_slots[position] for group in self.groups)
            assert slots == column.slots, "a request does not load from its columns"

    def _check_uncached(self) -> None:
        number = len(self.uncached)
        assert number <= self.num_full_blocks, "an open block is uncached"
        runs = not self.record.state.is_queued
        assert runs or not self.num_recomputed, "scratch of a request in the queue"
        for group in self.groups:
            assert group.num_uncached == number
            assert group.row[:number] == self.uncached, "a row shows no scratch"
            assert min(group.own, default=number) >= number, "a group owns an uncached position"
            assert not self.mirrored or number <= group.num_host_blocks, "scratch may be copied"
        for staging in self.staging:
            assert staging[:number] == self.uncached, "a buffer begins with no scratch"

    def _check_offloaded(self, group: GroupKV, buffer: int) -> None:
        assert self.mirrored, f"{self.request_id} is offloaded without room on the host"
        assert group.buffer == buffer, "an offloaded group points at the wrong staging buffer"
        for position, block in enumerate(group.row):
            if position < group.num_uncached:
                continue
            if position in group.own:
                assert group.own[position] is block, "an own block is not in its row"
            else:
                assert position < group.num_saves_sent, "an offloaded block has no host copy"
                if self.asleep:
                    assert block.is_null, "a row of a request that is asleep shows a block"
                else:
                    assert self.staging[buffer][position] is block, "a row points past its staging"
        if group.restore is not None:
            assert group.restore.targets.keys() <= set(group.staged_positions())


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
        first_step=0,
        asleep=True,
        promise=SlotPromise(),
    )


def stretches(positions: Sequence[int]) -> list[range]:
    """Return ascending positions as stretches of neighbours."""
    if not positions:
        return []
    if positions[-1] - positions[0] + 1 == len(positions):
        return [range(positions[0], positions[-1] + 1)]
    ends = [n for n, (a, b) in enumerate(pairwise(positions), start=1) if b != a + 1]
    return [
        range(positions[first], positions[last - 1] + 1)
        for first, last in pairwise([0, *ends, len(positions)])
    ]
