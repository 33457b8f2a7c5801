"""Where one holder's KV is, and how many pool blocks that takes: the executor's rules, counted.

A holder is a request's own part or a trunk, which several requests begin with (`trunks.py`). Its
own positions are those of the row from `first` on.

A row has the same length in every layer group. A *resident* group owns all blocks of its
row. An *offloaded* group owns the positions that are not yet complete on the host: the open block,
which takes new tokens, and full blocks that await their copy; the others are staged in buffers that
the holder's offloaded groups take turns in. Full blocks that a chunk of a prompt fills go straight
to the buffers. A group on its way back owns its whole row already; one that leaves meanwhile may be
counted with a block more than the executor has. A request that does not run may be *asleep*:
without buffers. Leading positions of one with nothing offloaded may be *uncached*: all groups share
one block each, and every step computes them anew. Side groups, which never leave, are counted
apart: where there are any, a request that gives way before they are on the host (`side_copies.py`)
keeps nothing, and no two share anything.
"""

from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from services.control.kv import KVView
from services.control.prefixes.prefix_cache import Column
from services.placement.blocks import BlockGeometry, side_blocks
from services.placement.layer_placement import LayerPlacement
from simulator.device.copies import RESTORE, CopyJob


@dataclass(slots=True, kw_only=True, eq=False)
class KVState:
    """One holder's KV. All groups are mirrored alike: one count of host blocks."""

    request_id: str
    geometry: BlockGeometry
    num_tokens: int = 0  # of the row, that have a place in the pool or on the host
    num_ahead: int = 0  # for which there is room behind them: drafts
    first: int = 0  # position of its own: trunks have those before it
    trunks: list["Trunk"] = field(default_factory=list)  # that it begins with, in order
    offloaded: tuple[int, ...] = ()  # layer groups, ascending
    own: tuple[int, ...] = ()  # positions that offloaded groups own, ascending
    num_buffers: int = 0  # staging buffers; 0 where nothing is offloaded, and asleep
    buffer_length: int = 0  # up to which a buffer has a block for each position of its own
    wanted_buffers: int = 1  # that the placement asks for
    num_uncached: int = 0  # leading positions that all groups share a block for
    asleep: bool = False  # does not run, and has no buffers
    mirrored: bool = False  # has room on the host
    num_side_blocks: int = 0  # of the pool, in groups that never leave, or for what comes with them
    num_side_tokens: int = 0  # up to which windows, states and open blocks are on the host
    side_save: CopyJob | None = None  # of these, since its last step
    side_load: CopyJob | None = None  # while they come back
    # Per group, with those of its trunks, whether these are there or not:
    num_copied_blocks: int = 0  # leading ones, complete copies
    num_sent_blocks: int = 0  # leading ones, copies ordered
    columns: list[Column] = field(default_factory=list)  # leading full ones that others may have
    saves: deque[tuple[CopyJob, int]] = field(default_factory=deque)  # and the host blocks after
    restoring: dict[int, CopyJob] = field(
        default_factory=dict
    )  # copies of groups on their way back
    lacking: list[int] = field(default_factory=list)  # groups whose way back has yet to begin

    @property
    def num_shared(self) -> int:
        return self.first

    @property
    def num_own_tokens(self) -> int:
        return self.num_tokens - self.first * self.geometry.block_size

    @property
    def num_rows(self) -> int:
        """Blocks of a row, open ones included."""
        return -(-(self.num_tokens + self.num_ahead) // self.geometry.block_size)

    @property
    def is_saved(self) -> bool:
        """Whether all of it is on the host, beside what its groups that never leave have."""
        is_done = self.side_save is not None and self.side_save.done_s is not None
        return is_done and self.num_host_blocks == self.num_full_blocks

    @property
    def num_own_rows(self) -> int:
        """Those of its own."""
        return self.num_rows - self.first

    @property
    def num_full_blocks(self) -> int:
        """Full blocks per group."""
        return self.num_tokens // self.geometry.block_size

    @property
    def num_host_blocks(self) -> int:
        """Leading blocks with a complete host copy in every group."""
        for trunk in self.trunks:
            if not trunk.mirrored:
                return trunk.num_copied_blocks
        return self.num_copied_blocks

    @property
    def num_staging_groups(self) -> int:
        """Groups that are offloaded and meant to stay so."""
        return len(self.offloaded) - len(self.restoring)

    @property
    def num_staged(self) -> int:
        """Positions of an offloaded group that are on the host and not its own."""
        return self.num_own_rows - len(self.own) if self.offloaded else 0

    @property
    def num_buffer_blocks(self) -> int:
        """Blocks of all its buffers."""
        return self.num_buffers * (self.buffer_length - self.first) if self.num_buffers else 0

    @property
    def num_owned(self) -> int:
        """Blocks of the pool."""
        staging = self.num_staging_groups
        own = (self.geometry.num_groups - staging) * self.num_own_rows + staging * len(self.own)
        return own + self.num_buffer_blocks - self.num_saved

    @property
    def num_saved(self) -> int:
        """Blocks that it would own more if nothing were uncached."""
        return (self.geometry.num_groups - 1) * self.num_uncached

    @property
    def num_owned_when_copied(self) -> int:
        """Blocks of the pool once copies to the host that are under way are complete."""
        staging = self.num_staging_groups
        num_open = self.num_rows - self.num_full_blocks
        own = (self.geometry.num_groups - staging) * self.num_own_rows + staging * num_open
        return own + self.num_buffer_blocks - self.num_saved

    @property
    def num_unmovable(self) -> int:
        """Blocks that it keeps even when all that can be taken from it is."""
        if not self.mirrored:
            return self.num_owned
        return self.geometry.num_groups * (self.num_rows - self.num_full_blocks)

    @property
    def num_to_wake(self) -> int:
        """Blocks that it takes to run again."""
        return self.num_staged if self.asleep else 0

    @property
    def is_parked(self) -> bool:
        """Whether all that it has is on the host, and nothing is on its way back."""
        is_out = not self.num_owned and not self.num_side_blocks
        return self.asleep and is_out and not self.trunks

    @property
    def view(self) -> KVView:
        blocks = [self.num_own_rows] * self.geometry.num_groups
        for place, group in enumerate(self.offloaded):
            if group not in self.restoring:
                blocks[group] = len(self.own)
            if place < self.num_buffers:
                blocks[group] += self.buffer_length - self.first
        host_blocks = (self.num_host_blocks,) * self.geometry.num_groups
        return KVView(
            offloaded=self.offloaded,
            num_buffers=self.num_buffers or min(1, len(self.offloaded)),
            num_blocks=tuple(blocks),
            num_host_blocks=host_blocks if self.mirrored else (),
        )

    def num_new(self, num_tokens: int) -> int:
        """Return the blocks that room for so many tokens takes, those to wake up not counted.

        Fewer than none where a window has left more behind.
        """
        num_more = self._num_side(num_tokens) - self.num_side_blocks
        rows, more = self._rows(num_tokens)
        if more <= 0:
            return num_more
        direct = self._direct_end(num_tokens)
        staging = self.num_staging_groups
        new = (self.geometry.num_groups - staging) * more + staging * (rows - direct)
        if direct > self.num_rows:
            new += self.num_buffers * max(0, direct - self.buffer_length)
            if self.asleep:  # it wakes up with one buffer
                new += direct - self.num_rows
        return new + num_more

    def _num_side(self, num_tokens: int) -> int:
        """Return the blocks of side groups once a step computes up to so many tokens."""
        num_new = num_tokens - max(self.num_tokens, self.num_side_tokens)
        if num_new <= 0:
            return self.num_side_blocks
        ahead = self.geometry.max_ahead_tokens
        return side_blocks(
            self.geometry, num_tokens=num_tokens + ahead, num_new_tokens=num_new + ahead
        )

    def _rows(self, num_tokens: int) -> tuple[int, int]:
        rows = -(-(num_tokens + self.geometry.max_ahead_tokens) // self.geometry.block_size)
        return rows, rows - self.num_rows

    def _direct_end(self, num_tokens: int) -> int:
        """Return the position up to which new blocks are staging blocks in offloaded groups."""
        num_full = num_tokens // self.geometry.block_size
        return max(num_full, self.num_rows) if self.num_staging_groups else self.num_rows

    def grow(self, num_tokens: int) -> None:
        """Take the blocks of `num_new`."""
        self.num_side_blocks = self._num_side(num_tokens)
        self.num_side_tokens, self.side_save = 0, None
        rows, more = self._rows(num_tokens)
        if more > 0 and self.offloaded:
            direct = self._direct_end(num_tokens)
            if direct > self.num_rows:
                self.buffer_length = max(self.buffer_length, direct)
            self.own = (*self.own, *range(direct, rows))
        self.num_tokens = max(self.num_tokens, num_tokens)
        self.num_ahead = self.geometry.max_ahead_tokens

    def uncache(self, num_blocks: int, *, num_free: int) -> None:
        """Let so many leading positions be uncached, more where too few blocks are free for less.

        Offloaded requests keep what they have.
        """
        wanted = 0 if self.offloaded else min(num_blocks, self.num_full_blocks)
        num_kept = min(self.num_uncached - wanted, num_free // (self.geometry.num_groups - 1 or 1))
        self.num_uncached = wanted if num_kept < 0 else self.num_uncached - num_kept

    # -- moving groups ---------------------------------------------------------------------------

    def offload(self, groups: Iterable[int], *, num_free: int) -> None:
        """Let groups leave the pool, block by block as their copies are complete.

        A group on its way back stays on the host, and what has uncached positions in the pool.
        `num_free` blocks are there for buffers.
        """
        if self.num_uncached:
            return
        for group in groups:
            if group in self.restoring:
                self.restoring.pop(group).cancelled = True
                continue
            if not self.offloaded:
                self.own = tuple(range(self.first, self.num_rows))
                self.buffer_length = self.first
            self.offloaded = tuple(sorted({*self.offloaded, group}))
        self.seal()
        self._assign(num_free=num_free)

    def seal(self) -> None:
        """Give up full blocks of offloaded groups whose copies are complete.

        The first ones of a position become its staging blocks, one per buffer.
        """
        staging = self.num_staging_groups
        if not staging:
            return
        complete = [position for position in self.own if position < self.num_copied_blocks]
        if staging < self.num_buffers:
            complete = [position for position in complete if position < self.buffer_length]
        if complete:
            self.own = self.own[len(complete) :]
            self.buffer_length = max(self.buffer_length, complete[-1] + 1)

    def set_buffers(self, num_buffers: int, *, num_free: int) -> None:
        """Ask for a number of staging buffers; there may be fewer for want of blocks."""
        self.wanted_buffers = num_buffers
        self._assign(num_free=num_free)

    def _assign(self, *, num_free: int) -> None:
        wanted = min(self.wanted_buffers, len(self.offloaded))
        if self.asleep or wanted <= self.num_buffers:
            self.num_buffers = 0 if self.asleep else wanted
        elif not self.num_buffers:
            self.num_buffers = wanted  # of blocks that the groups owned
        elif (wanted - self.num_buffers) * (self.buffer_length - self.first) <= num_free:
            self.num_buffers = wanted

    def sleep(self) -> None:
        """Give the buffers back. It must not run."""
        self.asleep, self.num_buffers = True, 0

    def wake(self, *, num_free: int) -> bool:
        """Take a buffer to run with, or more; False, and nothing changed, if too few are free."""
        if self.num_to_wake > num_free:
            return False
        self.asleep = False
        if self.offloaded:
            self.num_buffers, self.buffer_length = 1, self.first + self.num_staged
            self._assign(num_free=num_free - self.num_staged)
        return True

    def parked(self) -> "KVState | None":
        """Return what is left of it out of the pool: positions that every group has a copy of."""
        if not self.geometry.side_windows:
            return on_host_only(self, self.num_host_blocks) if self.num_host_blocks else None
        if not (self.num_side_tokens or self.is_saved):
            return None
        kept = on_host_only(self, self.num_host_blocks)
        kept.num_side_tokens = self.num_side_tokens or self.num_tokens
        return kept

    def begin_restore(self, group: int, block_bytes: int, *, num_found: int = 0) -> CopyJob:
        """Take the blocks that a group comes back to; return its copy, to be submitted.

        `num_found` of them hold its KV already.
        """
        job = CopyJob(num_bytes=(self.num_staged - num_found) * block_bytes, priority=(RESTORE,))
        self.restoring[group] = job
        return job

    def take_in_restores(self) -> int:
        """Flip the groups whose KV is back; return how many."""
        back = [group for group, job in self.restoring.items() if job.done_s is not None]
        for group in back:
            del self.restoring[group]
        if back:
            self.flip(back)
        return len(back)

    def flip(self, groups: Collection[int]) -> None:
        """Let groups be in the pool again, in blocks that it has."""
        self.offloaded = tuple(group for group in self.offloaded if group not in groups)
        self.own = self.own if self.offloaded else ()
        self._assign(num_free=0)

    # -- copies to the host ----------------------------------------------------------------------

    def take_in_saves(self) -> range:
        """Count copies to the host that are complete; return the positions that are there now."""
        before = self.num_copied_blocks
        while self.saves and self.saves[0][0].done_s is not None:
            self.num_copied_blocks = self.saves.popleft()[1]
        return range(before, self.num_copied_blocks)

    def cancel_restores(self) -> int:
        """Let no group come back; return how many were about to."""
        for job in self.restoring.values():
            job.cancelled = True
        num_cancelled = len(self.restoring)
        self.restoring.clear()
        return num_cancelled

    def cancel_copies(self) -> None:
        """Let no copy begin any more."""
        self.cancel_restores()
        for side in filter(None, (self.side_save, self.side_load)):
            side.cancelled = True
        for job, _ in self.saves:
            job.give_up()
        self.saves.clear()

    def check_integrity(self) -> None:
        """Raise AssertionError if the parts contradict each other."""
        assert self.num_copied_blocks <= self.num_sent_blocks <= self.num_full_blocks
        assert len(self.columns) <= self.num_full_blocks
        assert self.first <= self.num_rows
        assert not (self.first and self.num_uncached)
        assert set(self.restoring) <= set(self.offloaded)
        assert self.mirrored or not self.offloaded
        assert not (self.num_uncached and self.offloaded)
        assert 0 <= self.num_uncached <= self.num_full_blocks
        if self.asleep:
            assert not self.num_buffers
        else:
            assert bool(self.num_buffers) == bool(self.offloaded)
        assert self.num_buffers <= max(1, len(self.offloaded))
        if self.offloaded:
            assert list(self.own) == sorted(set(self.own))
            assert all(self.first <= position < self.num_rows for position in self.own)
            assert not self.num_buffers or self.first + self.num_staged <= self.buffer_length


@dataclass(slots=True, kw_only=True, eq=False)
class Trunk(KVState):
    """A stretch of positions that its users begin with, behind their trunks before it.

    It has columns that its users have, too. Until all of it is on the host, it stays in the pool:
    it counts as not `mirrored`.
    """

    users: dict[KVState, None] = field(default_factory=dict)  # that run, or are on their way back
    floor: LayerPlacement | None = None  # what leaves in any case; None: all may be in the pool

    @property
    def is_parked(self) -> bool:
        return False

    def take_in_saves(self) -> range:
        saved = super(Trunk, self).take_in_saves()
        self.mirrored = self.num_copied_blocks == self.num_rows
        return saved


def on_host_only(old: KVState, num_blocks: int) -> KVState:
    """Return the KV of a request that waits, as `old` but for so many blocks on the host."""
    return KVState(
        request_id=old.request_id,
        geometry=old.geometry,
        num_tokens=num_blocks * old.geometry.block_size,
        offloaded=tuple(range(old.geometry.num_groups)),
        wanted_buffers=old.wanted_buffers,
        asleep=True,
        mirrored=True,
        num_copied_blocks=num_blocks,
        num_sent_blocks=num_blocks,
        columns=old.columns[:num_blocks],
    )
