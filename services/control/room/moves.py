"""The moves of KV that the capacity guard and the resumes may order."""

from collections.abc import Collection, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

from services.control.kv import KVT
from services.control.requests.request_record import RequestRecord
from services.placement.blocks import BlockGeometry


class Moves(Protocol[KVT]):
    """All KV of an engine, and the moves that there are: of requests' own parts, and of trunks."""

    @property
    def geometry(self) -> BlockGeometry: ...

    @property
    def num_blocks(self) -> int:
        """Blocks of the pool."""

    @property
    def num_free(self) -> int: ...

    def all(self) -> Iterable[Any]:
        """Return all holders."""

    def idle(self, but: Collection[RequestRecord[KVT]]) -> list[Any]:
        """Return the KV of all requests `but` some, the likeliest victim of a preemption first.

        Trunks that none of those some begins with come last.
        """

    def num_new(self, kv: KVT, num_tokens: int) -> int:
        """Return the blocks that room for so many tokens takes, and for drafts behind them.

        Those to wake up are not counted.
        """

    def num_side_blocks(self, kv: Any) -> int:
        """Return the blocks that a holder has in groups that never leave."""

    def num_to_wake(self, kv: Any) -> int:
        """Return the blocks that a holder takes to be in a step again; 0 if it is not asleep."""

    def offload(self, kv: Any, groups: Sequence[int]) -> None:
        """Let groups leave, block by block as copies are complete; a restore is given up."""

    def restore(self, kv: Any, group: int) -> None:
        """Begin to bring a group back, if it may come."""

    def set_staging(self, kv: Any, num_buffers: int) -> None: ...

    def sleep(self, kv: Any) -> None:
        """Give buffers back. It must be in no step."""

    def give_up_restores(self) -> bool:
        """Let no group come back; return whether blocks will come free by themselves."""


class Loading(NamedTuple):
    """How far a request's way back is."""

    is_complete: bool
    lacks_blocks: bool


class ReturnMoves(Moves[KVT], Protocol[KVT]):
    """The moves of requests that come back from the host."""

    def reserve(self, kv: KVT, num_slots: int) -> bool:
        """Promise host slots to a parked request, at the cost of other parked ones."""

    def drop(self, kv: KVT) -> None:
        """Give up a parked request's copies: it is computed again."""

    def num_to_find(self, kv: KVT, groups: Collection[int]) -> int:
        """Return how many blocks of these groups are still in free blocks of the pool."""

    def num_first_to_load(self, kv: KVT) -> int:
        """Return how many blocks are copied before it runs, whatever stays on the host."""

    def share(self, kv: KVT) -> None:
        """Let a request that comes back begin with what others have in the pool."""

    def keep_shared(self, kv: KVT) -> None:
        """Give up a request's copies behind what it shares: that is computed again."""

    def num_to_fit(self, kv: KVT) -> int:
        """Return how many blocks a parked request takes that finds much in the pool only.

        0 if it does not.
        """

    def stay(self, kv: KVT, num_left: int) -> bool:
        """Let a request have what it can share, and no room on the host for what it computes.

        At most `num_left` blocks are taken. False, and nothing changed, if there is nothing to
        share.
        """

    def begin_load(self, kv: KVT, groups: Sequence[int], *, num_buffers: int) -> None:
        """Let groups come back as blocks come free; the request asks for so many buffers."""

    def load_on(self, kv: KVT, num_left: int) -> Loading:
        """Order loads into at most so many free blocks."""

    def wake(self, kv: KVT) -> bool:
        """Take a buffer to run with; False, and nothing changed, if too few blocks are free."""

    def put_back(self, kv: KVT) -> None:
        """Give back the blocks of a request that waits; its copies stay."""
