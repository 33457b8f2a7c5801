"""What the capacity guard sees of KV, and what it may order: on the executor's blocks, or counted.

A request's *row* has the same length in every layer group. What an offloaded group has on the host
is staged in the request's buffers; a group on its way back is offloaded until it is there.
A request that does not run may be *asleep*: without buffers.
"""

from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple, Protocol, TypeVar

from services.placement.blocks import BlockGeometry


class KV(Protocol):
    """One request's KV, in blocks of the pool."""

    @property
    def request_id(self) -> str: ...

    @property
    def mirrored(self) -> bool:
        """Whether it has room on the host; without, nothing of it may leave the pool."""

    @property
    def asleep(self) -> bool: ...

    @property
    def offloaded(self) -> Sequence[int]:
        """Layer groups in host memory, ascending; those on their way back are among them."""

    @property
    def restoring(self) -> Collection[int]:
        """Layer groups on their way back."""

    @property
    def is_parked(self) -> bool:
        """Whether it waits, all of it is on the host, and nothing is on its way back."""

    @property
    def num_tokens(self) -> int:
        """Tokens that have a place, in the pool or on the host."""

    @property
    def num_host_blocks(self) -> int:
        """Leading blocks with a complete host copy in every group."""

    @property
    def num_rows(self) -> int:
        """Blocks of a row, the open one included."""

    @property
    def num_buffers(self) -> int: ...

    @property
    def num_owned(self) -> int: ...

    @property
    def num_owned_when_copied(self) -> int:
        """What it owns once copies to the host that are under way are complete."""

    @property
    def num_unmovable(self) -> int:
        """What it keeps even when all that can be taken from it is."""


KVT = TypeVar("KVT", bound=KV)


class Moves(Protocol[KVT]):
    """All KV of an engine, and the moves that there are."""

    @property
    def geometry(self) -> BlockGeometry: ...

    @property
    def num_blocks(self) -> int:
        """Blocks of the pool."""

    @property
    def num_free(self) -> int: ...

    def find(self, request_id: str) -> KVT | None:
        """Return a request's KV; None if it has none, in the pool or on the host."""

    def all(self) -> Iterable[KVT]: ...

    def idle(self, but: Collection[str]) -> list[KVT]:
        """Return the KV of all requests `but` some, the likeliest victim of a preemption first."""

    def num_new(self, kv: KVT, num_tokens: int) -> int:
        """Return the blocks that room for so many tokens takes, those to wake up not counted."""

    def num_to_wake(self, kv: KVT) -> int:
        """Return the blocks that a request takes to run again; 0 if it is not asleep."""

    def offload(self, kv: KVT, groups: Sequence[int]) -> None:
        """Let groups leave, block by block as copies are complete; a restore is given up."""

    def restore(self, kv: KVT, group: int) -> None:
        """Begin to bring a group back, if it may come."""

    def set_staging(self, kv: KVT, num_buffers: int) -> None: ...

    def sleep(self, kv: KVT) -> None:
        """Give buffers back. It must not run."""

    def give_up_restores(self) -> bool:
        """Let no group come back; return whether blocks will come free by themselves."""


class Loading(NamedTuple):
    """How far a request's way back is."""

    is_complete: bool
    lacks_blocks: bool


class Returns(Moves[KVT], Protocol[KVT]):
    """The moves of requests that come back from the host."""

    def reserve(self, kv: KVT, num_slots: int) -> bool:
        """Promise host slots to a parked request, at the cost of other parked ones."""

    def drop(self, kv: KVT) -> None:
        """Give up a parked request's copies: it is computed again."""

    def begin_load(self, kv: KVT, groups: Sequence[int], *, num_buffers: int) -> None:
        """Let groups come back as blocks come free; the request asks for so many buffers."""

    def load_on(self, kv: KVT, num_left: int) -> Loading:
        """Order loads into at most so many free blocks."""

    def wake(self, kv: KVT) -> bool:
        """Take a buffer to run with; False, and nothing changed, if too few blocks are free."""

    def put_back(self, kv: KVT) -> None:
        """Give back the blocks of a request that waits; its copies stay."""
