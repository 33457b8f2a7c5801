"""How many blocks of a pool each owner has."""

from dataclasses import dataclass, field

from services.placement.types import RequestId


@dataclass(slots=True, kw_only=True)
class BlockLedger:
    """A pool of equal blocks: only how many belong to each owner."""

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
        """Take back all blocks of `owner`, which may have none."""
        self.num_free += self.owned.pop(owner, 0)

    def check_integrity(self) -> None:
        """Raise AssertionError if blocks were lost or made."""
        assert self.num_free >= 0
        assert all(count >= 0 for count in self.owned.values())
        assert self.num_free + sum(self.owned.values()) == self.num_blocks
