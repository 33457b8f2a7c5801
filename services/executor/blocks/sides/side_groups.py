"""Rows of the layer groups that never leave the pool: they keep a window of KV, or one state.

A *window group's* row is as long as the request's others. Below the window it shows the null block:
what no token to come attends to is given back. A *state group's* row is one block, whatever the
length. When a request leaves the pool, copies of both go with it (`side_copies.py`).

All blocks are taken and given back through `PoolBlocks`, as everybody's are: attention multiplies
what stands behind a row's end by zero, and zero times NaN is NaN.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from vllm.v1.core.kv_cache_utils import KVCacheBlock

from services.executor.blocks.pool_blocks import PoolBlocks
from services.placement.blocks import STATE, BlockGeometry, side_blocks


@dataclass(slots=True)
class SideRow:
    """A request's row of one side group."""

    blocks: list[KVCacheBlock]
    num_gone: int = 0  # leading positions that show the null block

    @property
    def owned(self) -> list[KVCacheBlock]:
        return self.blocks[self.num_gone :]


class SideGroups:
    """The side groups' blocks of all requests that have some, by request id.

        sides.grow("r1", num_tokens=200)
        sides.slide("r1", num_tokens=130)  # gives back what token 130 does not attend to
        sides.pop("r1")

    Without side groups there is nothing to ask: callers look at `windows` first.
    """

    def __init__(self, blocks: PoolBlocks, geometry: BlockGeometry) -> None:
        self.windows = geometry.side_windows
        self._blocks, self._geometry = blocks, geometry
        self._size = geometry.window_block_size
        self._rows: dict[str, list[SideRow]] = {}
        # Of each request: tokens that it has room for, and those of them that are processed.
        self._lengths: dict[str, tuple[int, int]] = {}

    # -- how many ---------------------------------------------------------------------------

    @property
    def num_owned(self) -> int:
        return sum(map(self.num_owned_by, self._rows))

    def num_owned_by(self, request_id: str) -> int:
        return sum(len(row.blocks) - row.num_gone for row in self._rows.get(request_id, ()))

    def has_any_of(self, request_id: str, block_ids: Collection[int]) -> bool:
        """Return whether one of these blocks is a request's."""
        rows = self._rows.get(request_id, ())
        return any(block.block_id in block_ids for row in rows for block in row.owned)

    def num_new(self, request_id: str, *, num_tokens: int) -> int:
        """Return how many blocks `grow` will take from the pool."""
        rows = self._rows.get(request_id)
        if rows is None:
            return sum(self._length(window, num_tokens) for window in self.windows)
        return sum(
            max(0, self._length(window, num_tokens) - len(row.blocks))
            for window, row in zip(self.windows, rows, strict=True)
        )

    def num_to_come(self, request_id: str, *, num_tokens: int) -> int:
        """Return how many blocks more a request will own at most, on its way to `num_tokens`."""
        _, num_processed = self._lengths.get(request_id, (0, 0))
        most = side_blocks(
            self._geometry, num_tokens=num_tokens, num_new_tokens=num_tokens - num_processed
        )
        return max(0, most - self.num_owned_by(request_id))

    def _length(self, window: int, num_tokens: int) -> int:
        return 1 if window == STATE else -(-num_tokens // self._size)

    # -- a request's blocks -----------------------------------------------------------------

    def rows(self, request_id: str) -> tuple[list[KVCacheBlock], ...]:
        """Return what its block tables show, by side group."""
        rows = self._rows.get(request_id)
        return tuple([] for _ in self.windows) if rows is None else tuple(r.blocks for r in rows)

    def grow(self, request_id: str, *, num_tokens: int) -> tuple[list[KVCacheBlock], ...]:
        """Make room for `num_tokens` tokens; return what each row gains.

        The pool must have `num_new` blocks.
        """
        rows = self._rows.get(request_id)
        if rows is None:
            rows = self._rows[request_id] = [SideRow([]) for _ in self.windows]
        length, num_processed = self._lengths.get(request_id, (0, 0))
        # Drafts that are rejected leave their room, and the next step may have fewer.
        self._lengths[request_id] = max(length, num_tokens), num_processed
        gained = []
        for window, row in zip(self.windows, rows, strict=True):
            num_missing = self._length(window, num_tokens) - len(row.blocks)
            gained.append(self._blocks.take_open(num_missing) if num_missing > 0 else [])
            row.blocks.extend(gained[-1])
        return tuple(gained)

    def put(
        self, request_id: str, blocks: Sequence[list[KVCacheBlock]], *, num_tokens: int
    ) -> None:
        """Let a request without blocks have these, by group: the last ones of each row.

        They hold what the token behind `num_tokens` attends to.
        """
        assert request_id not in self._rows
        self._lengths[request_id] = num_tokens, num_tokens
        self._rows[request_id] = rows = []
        for window, last in zip(self.windows, blocks, strict=True):
            num_gone = self._length(window, num_tokens) - len(last)
            rows.append(SideRow([*[self._blocks.null] * num_gone, *last], num_gone))

    def slide(self, request_id: str, *, num_tokens: int) -> None:
        """Give back the blocks that no token from `num_tokens` on attends to.

        All before it are processed: steps in flight compute none of them.
        """
        rows = self._rows.get(request_id)
        if rows is None:
            return
        length, _ = self._lengths[request_id]
        self._lengths[request_id] = length, num_tokens
        for window, row in zip(self.windows, rows, strict=True):
            if window == STATE:
                continue
            num_gone = min(max(0, num_tokens - window + 1) // self._size, len(row.blocks))
            if num_gone > row.num_gone:
                self._blocks.release(row.blocks[row.num_gone : num_gone][::-1])
                null = [self._blocks.null] * (num_gone - row.num_gone)
                row.blocks[row.num_gone : num_gone] = null
                row.num_gone = num_gone

    def pop(self, request_id: str) -> list[KVCacheBlock]:
        """End a request's rows and return its blocks, which the caller gives to the pool."""
        self._lengths.pop(request_id, None)
        ended = [block for row in self._rows.pop(request_id, ()) for block in row.owned]
        self._blocks.poison(ended)
        return ended

    def hand_over(self, request_id: str, positions: Sequence[range]) -> list[KVCacheBlock]:
        """End a request's rows and return their blocks at `positions`, which are of no row now.

        The others are given to the pool.
        """
        del self._lengths[request_id]
        kept: list[KVCacheBlock] = []
        for row, stretch in zip(self._rows.pop(request_id), positions, strict=True):
            kept.extend(row.blocks[stretch.start : stretch.stop])
            self._blocks.release(
                [*row.blocks[row.num_gone : stretch.start], *row.blocks[stretch.stop :]]
            )
        return kept

    def check_integrity(self) -> list[KVCacheBlock]:
        """Assert that no request has more blocks than `side_blocks`; return them all."""
        for request_id, rows in self._rows.items():
            num_tokens, num_processed = self._lengths[request_id]
            most = side_blocks(
                self._geometry, num_tokens=num_tokens, num_new_tokens=num_tokens - num_processed
            )
            assert self.num_owned_by(request_id) <= most, f"{request_id} owns more than {most}"
            for window, row in zip(self.windows, rows, strict=True):
                assert len(row.blocks) == self._length(window, num_tokens)
                assert all(block is self._blocks.null for block in row.blocks[: row.num_gone])
        return [block for rows in self._rows.values() for row in rows for block in row.owned]
