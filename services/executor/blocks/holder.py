"""What one holder has of the pool: rows of blocks, one per layer group, and staging buffers.

A holder is a request's own part, or a trunk that several requests begin with (`sharing`); every
block is one holder's. Positions are those of the whole row of a request, in blocks. A holder's own
begin with `first`; before it stand blocks that are not its groups': scratch (`uncached.py`), or the
null block, where trunks have them.

A group of a holder is *resident* (every block of its row is its own) or *offloaded* (its full
blocks are on the host, and their row entries point at the holder's staging buffers; only blocks
that are not yet complete on the host are its own: the open block that takes new tokens, and full
blocks awaiting their copy). A group that is being *restored* is offloaded until its copy is
complete on every rank; its target blocks are in no row.

A holder that is in no step may be *asleep*: it has no staging buffers, and the row entries of what
is on the host show the null block.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise

from vllm.v1.core.kv_cache_utils import KVCacheBlock

from services.control.kv import KVView
from services.control.prefixes.prefix_cache import Column, num_complete
from services.placement.layer_placement import LayerPlacement


@dataclass(slots=True)
class Restore:
    """Blocks that a group's KV comes back to. It may be ordered in parts, as blocks come free."""

    targets: dict[int, KVCacheBlock] = field(default_factory=dict)  # by position
    under_way: dict[int, list[KVCacheBlock]] = field(default_factory=dict)  # by restore id


@dataclass(slots=True)
class GroupKV:
    """One holder's KV in one layer group."""

    row: list[KVCacheBlock] = field(default_factory=list)  # what its block table shows
    first: int = 0  # of its positions; those before it are not its own
    offloaded: bool = False
    own: dict[int, KVCacheBlock] = field(default_factory=dict)  # of an offloaded group, by position
    host_slots: list[int] = field(default_factory=list)  # by position; see `Column.slot`
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
            for own, after in pairwise([self.first - 1, *sorted(self.own), len(self.row)])
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
        own = len(self.own) if self.offloaded else len(self.row) - self.first
        return own + (len(self.restore.targets) if self.restore is not None else 0)

    def owned_blocks(self) -> Iterable[KVCacheBlock]:
        blocks = list(self.own.values()) if self.offloaded else self.row[self.first :]
        if self.restore is not None:
            blocks.extend(self.restore.targets.values())
        return blocks


@dataclass(slots=True, eq=False, kw_only=True)
class Holder(ABC):
    """Rows of equal length, one per layer group, and staging buffers."""

    groups: list[GroupKV]
    mirrored: bool  # has room on the host; what is not mirrored stays resident
    block_size: int  # tokens
    wanted_staging: int = 1  # buffers its placement asks for
    columns: list[Column] = field(default_factory=list)  # of its row's leading blocks
    # Equal lengths; each begins with what stands before its first position.
    staging: list[list[KVCacheBlock]] = field(default_factory=list)
    # Of the row, whose KV exists once the steps sent so far have run: only those that cannot be
    # rejected any more. Rows have room for drafts behind them.
    num_tokens: int = 0
    asleep: bool = False  # is in no step and has no staging

    @property
    @abstractmethod
    def request_id(self) -> str:
        """Return its name in orders: a request's id, or what no request is called."""

    @abstractmethod
    def uid(self, position: int) -> int:
        """Return a number that stands for the KV of a block position, and for no other's."""

    @property
    def scratch(self) -> list[KVCacheBlock]:
        """Return its blocks that are no group's."""
        return []

    @property
    def leaves_columns(self) -> bool:
        """Whether it leaves the pool, and what it gives up may be found there."""
        return False

    @property
    @abstractmethod
    def num_shared(self) -> int:
        """Return how many leading positions trunks have."""

    @property
    @abstractmethod
    def is_copied(self) -> bool:
        """Whether its full blocks have room on the host, and go there in time."""

    @property
    def first(self) -> int:
        """Return the first position that is its own."""
        return self.groups[0].first

    @property
    def num_rows(self) -> int:
        return len(self.groups[0].row)

    @property
    def num_full_blocks(self) -> int:
        """Full blocks per group, of the whole row."""
        return self.num_tokens // self.block_size

    @property
    def num_own_tokens(self) -> int:
        return self.num_tokens - self.num_shared * self.block_size

    # -- its groups ---------------------------------------------------------------------------

    @property
    def offloaded(self) -> list[int]:
        """The offloaded groups, in the order in which a step needs them."""
        return [index for index, group in enumerate(self.groups) if group.offloaded]

    @property
    def restoring(self) -> list[int]:
        """The groups on their way back."""
        return [index for index, group in enumerate(self.groups) if group.restore is not None]

    @property
    def placement(self) -> LayerPlacement:
        return LayerPlacement(
            offloaded=frozenset(self.offloaded), num_staging=max(1, len(self.staging))
        )

    @property
    def num_copied_blocks(self) -> int:
        """Return up to where its own blocks have a complete host copy in every group."""
        return min(group.num_host_blocks for group in self.groups)

    @property
    def num_host_blocks(self) -> int:
        """Return how many leading blocks of its row have a complete host copy in every group."""
        return self.num_copied_blocks

    # -- its staging --------------------------------------------------------------------------

    @property
    def num_buffers(self) -> int:
        return len(self.staging)

    @property
    def staging_length(self) -> int:
        return len(self.staging[0]) if self.staging else 0

    @property
    def num_staging_blocks(self) -> int:
        return sum(len(buffer) - self.first for buffer in self.staging)

    @property
    def num_staged_positions(self) -> int:
        """Return how long a staging buffer must be: up to the last staged position."""
        stretches = [group.staged_stretches() for group in self.groups if group.offloaded]
        return max((last[-1].stop for last in stretches if last), default=0)

    # -- its blocks ---------------------------------------------------------------------------

    @property
    def num_owned(self) -> int:
        return len(self.owned_blocks())

    def owned_blocks(self) -> list[KVCacheBlock]:
        owned = [block for group in self.groups for block in group.owned_blocks()]
        owned.extend(block for buffer in self.staging for block in buffer[self.first :])
        return [*owned, *self.scratch]

    @property
    def num_open_rows(self) -> int:
        return max(0, self.num_rows - self.num_full_blocks)

    @property
    def num_owned_when_copied(self) -> int:
        """Blocks that it owns, in no step, once copies under way are complete."""
        num_blocks = self.num_staging_blocks + len(self.scratch)
        for group in self.groups:
            num_blocks += self.num_open_rows if group.offloaded else self.num_rows - self.first
            if group.restore is not None:
                num_blocks += len(group.restore.targets)
        return num_blocks

    @property
    def num_unmovable(self) -> int:
        """Blocks that it keeps, in no step: open and scratch ones, or all without a host copy."""
        if not self.mirrored:
            return self.num_owned
        return len(self.groups) * self.num_open_rows + len(self.scratch)

    @property
    def view(self) -> KVView:
        offloaded = self.offloaded
        num_blocks = [group.num_owned for group in self.groups]
        num_blocks[0] += len(self.scratch)
        for index, buffer in zip(offloaded, self.staging, strict=False):
            num_blocks[index] += len(buffer) - self.first
        return KVView(
            offloaded=tuple(offloaded),
            num_buffers=len(self.staging) or min(1, len(offloaded)),
            num_blocks=tuple(num_blocks),
            num_host_blocks=tuple(g.num_host_blocks for g in self.groups) if self.is_copied else (),
        )

    def num_blocks_in_transit(self) -> int:
        """Return what it owns beyond the block formula: copies under way in either direction.

        Full own blocks of offloaded groups, less the staging blocks that they will become, and the
        targets of restores.
        """
        num_full = self.num_full_blocks
        waiting = sum(
            sum(1 for position in group.own if position < num_full)
            for group in self.groups
            if group.offloaded
        )
        missing = sum(num_full - len(buffer) for buffer in self.staging)
        targets = sum(len(g.restore.targets) for g in self.groups if g.restore is not None)
        return waiting - missing + targets

    # -- integrity ----------------------------------------------------------------------------

    def check_integrity(self) -> None:
        """Assert that every row entry is an own block or the staging block of its position."""
        lengths = {len(group.row) for group in self.groups}
        assert len(lengths) == 1, f"rows of {self.request_id} differ in length: {lengths}"
        assert len({len(buffer) for buffer in self.staging}) <= 1, "staging buffers differ"
        chain = self.offloaded
        if self.asleep:
            assert not self.staging, "what is asleep has staging"
        else:
            assert bool(chain) == bool(self.staging), "staging without offloaded groups, or reverse"
        assert len(self.staging) <= max(len(chain), 1)
        for ordinal, index in enumerate(chain):
            self._check_offloaded(
                self.groups[index], ordinal % len(self.staging) if self.staging else -1
            )
        for group in self.groups:
            self._check_group(group)
        for position, column in enumerate(self.columns):
            slots = [group.host_slots[position] for group in self.groups]
            its = [column.slot(index) for index in range(len(self.groups))]
            assert slots == its, "a holder does not load from its columns"

    def _check_group(self, group: GroupKV) -> None:
        before = self.groups[0].row[: self.first]
        assert group.first == self.first
        assert group.row[: self.first] == before, "rows begin differently"
        assert all(buffer[: self.first] == before for buffer in self.staging), "nor do buffers"
        assert min(group.own, default=self.first) >= self.first, "a group owns what it has not"
        assert not self.mirrored or self.first <= group.num_host_blocks, "no copy before its first"
        assert num_complete(self.columns) <= max(self.first, group.num_host_blocks)
        assert group.num_host_blocks <= group.num_saves_sent <= len(group.host_slots)
        assert group.offloaded or (not group.own and group.restore is None)

    def _check_offloaded(self, group: GroupKV, buffer: int) -> None:
        assert self.mirrored, f"{self.request_id} is offloaded without room on the host"
        assert group.buffer == buffer, "an offloaded group points at the wrong staging buffer"
        for position, block in enumerate(group.row[self.first :], self.first):
            if position in group.own:
                assert group.own[position] is block, "an own block is not in its row"
            else:
                assert position < group.num_saves_sent, "an offloaded block has no host copy"
                if self.asleep:
                    assert block.is_null, "a row of what is asleep shows a block"
                else:
                    assert self.staging[buffer][position] is block, "a row points past its staging"
        if group.restore is not None:
            assert group.restore.targets.keys() <= set(group.staged_positions())


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
