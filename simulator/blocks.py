"""Who owns how many blocks of a pool, and how many blocks a request's KV takes."""

from dataclasses import dataclass, field

from services.placement.blocks import BlockGeometry, Residency, num_request_blocks
from services.placement.types import RequestId


@dataclass(slots=True, kw_only=True)
class BlockLedger:
    """A pool of equal blocks: only how many belong to whom."""

    num_blocks: int  # >= 0
    num_free: int = -1
    owned: dict[RequestId, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.num_free = self.num_blocks

    def set_owned(self, owner: RequestId, num_blocks: int) -> bool:
        """Let `owner` have so many blocks. False, and nothing changed, where too few are free."""
        more = num_blocks - self.owned.get(owner, 0)
        if more > self.num_free:
            return False
        self.num_free -= more
        self.owned[owner] = num_blocks
        return True

    def release(self, owner: RequestId) -> None:
        """Take back all blocks of `owner`, who may have none."""
        self.num_free += self.owned.pop(owner, 0)

    def check_integrity(self) -> None:
        """Raise AssertionError if blocks were lost or made."""
        assert self.num_free >= 0
        assert all(count >= 0 for count in self.owned.values())
        assert self.num_free + sum(self.owned.values()) == self.num_blocks


@dataclass(frozen=True, slots=True, kw_only=True)
class Occupancy:
    """What decides the pool blocks of one request."""

    num_tokens: int  # whose KV has a place, >= 0
    num_offloaded: int = 0  # layer groups on the host
    num_buffers: int = 0  # staging buffers; 0: nothing is staged
    num_host_blocks: int = 0  # full blocks of every group whose host copy is complete
    num_restoring: int = 0  # groups on their way back: still offloaded, their targets are taken


def num_owned_blocks(geometry: BlockGeometry, held: Occupancy) -> int:
    """Return the pool blocks: the shared formula, late host copies, and targets of restores."""
    residency = Residency(num_offloaded=held.num_offloaded, num_staging=held.num_buffers)
    num_full = held.num_tokens // geometry.block_size
    num_late = held.num_offloaded * max(0, num_full - held.num_host_blocks)
    own = num_request_blocks(geometry, residency, num_tokens=held.num_tokens)
    return own + num_late + held.num_restoring * num_full
