"""One request's KV as the capacity guard sees it: the executor's blocks, or counted ones.

A request's *row* has the same length in every layer group. What an offloaded group has on the host
is staged in the request's buffers; a group on its way back is offloaded until it is there.
A request that does not run may be *asleep*: without buffers.

Requests that begin alike may share a *trunk*, a stretch of positions whose blocks are none of
theirs. It is placed as requests are; both are *holders* of blocks.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar


@dataclass(frozen=True, slots=True, kw_only=True)
class KVView:
    """Where a request's blocks are, per layer group."""

    offloaded: tuple[int, ...] = ()  # layer groups in host memory, ascending
    num_buffers: int = 0  # staging; asleep: what it wakes up with; 0 iff nothing is offloaded
    num_blocks: tuple[int, ...] = ()  # of the pool; staging counts with the first groups it serves
    # Leading full blocks whose host copy is complete; (): it has no room there.
    num_host_blocks: tuple[int, ...] = ()


NOTHING = KVView()


class KV(Protocol):
    """One holder's KV, in blocks of the pool: a request's own part, or a trunk's."""

    @property
    def request_id(self) -> str: ...

    @property
    def trunks(self) -> Sequence[Any]:
        """What it begins with that several requests have once.

        Each is a `KV` of its own, and has the `floor` that a record has for a request.
        """

    @property
    def num_shared(self) -> int:
        """Leading blocks of a row that are not its own, but trunks'."""

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
        """Tokens that have a place, in the pool or on the host, those of its trunks included."""

    @property
    def num_own_tokens(self) -> int:
        """Those that are not its trunks'."""

    @property
    def num_host_blocks(self) -> int:
        """Leading blocks with a complete host copy in every group."""

    @property
    def num_side_tokens(self) -> int:
        """Tokens up to which windows, states and open blocks are on the host; 0: they are not."""

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

    @property
    def view(self) -> KVView:
        """Where its blocks are, while it runs."""


KVT = TypeVar("KVT", bound=KV)


def trunks_of(kvs: Iterable[KVT | None]) -> dict[str, Any]:
    """Return the trunks that requests begin with, by their names."""
    return {trunk.request_id: trunk for kv in kvs if kv is not None for trunk in kv.trunks}


def only_shares(kv: KV) -> bool:
    """Return whether all that a request has is trunks'."""
    return bool(kv.trunks) and kv.num_rows == kv.num_shared


def is_whole(kv: KV | None) -> bool:
    """Return whether no layer group of a request is in host memory, nor of its trunks."""
    return kv is None or not any(holder.offloaded for holder in (*kv.trunks, kv))


def holders_of(kvs: Iterable[KVT]) -> Iterator[Any]:
    """Yield requests' own parts and the trunks that they begin with, each once."""
    seen = set[Any]()
    for kv in kvs:
        new = [trunk for trunk in kv.trunks if trunk not in seen]
        seen.update(new)
        yield from new
        yield kv
