"""What of each holder is on the host, so may leave the pool without a wait.

Only what is mirrored may be offloaded. A group that lacks few blocks counts as mirrored, because
write-through is about to copy them: as many as the last steps can have filled, or, where the
snapshot says the budget of write-through, what a request's even share of it copies within the
shortest window. Until then the missing blocks stay in the pool, and are counted there.
"""

from dataclasses import dataclass

from services.placement.step_time.batch import (
    SEALING_STEPS,
    demand_of,
    holders_of,
    members,
    placed_pattern,
    pool_need,
)
from services.placement.step_time.patterns import Pattern
from services.placement.types import EngineShape, Holder, Snapshot

NEVER = 2**62  # blocks: of a group that has no room on the host


@dataclass(frozen=True, slots=True, kw_only=True)
class Mirror:
    """The state of write-through of a snapshot's members, and of the prefixes they begin with."""

    missing: dict[str, tuple[int, ...]]  # by holder: full blocks per group not on the host
    num_soon: int  # blocks of one request that are copied within the shortest window

    def allows(self, holder: Holder, pattern: Pattern) -> bool:
        """Say whether every offloaded group is on the host, or is about to be."""
        missing = self.missing[holder.holder_id]
        lacking = [missing[group] for group in pattern.offloaded]
        few = max(lacking, default=0) <= SEALING_STEPS
        return few or sum(lacking) <= self.num_soon

    def possible(self, holder: Holder, pattern: Pattern) -> bool:
        """Say whether the host has room for every offloaded group."""
        missing = self.missing[holder.holder_id]
        return all(missing[group] < NEVER for group in pattern.offloaded)

    def late_blocks(self, holder: Holder, pattern: Pattern) -> int:
        """Return the pool blocks that a pattern needs until its groups are on the host."""
        missing = self.missing[holder.holder_id]
        return sum(missing[group] for group in pattern.offloaded)

    def offloadable(self, holder: Holder) -> tuple[int, ...]:
        """Return the groups that may be offloaded, each by itself."""
        limit = max(SEALING_STEPS, self.num_soon)
        missing = self.missing[holder.holder_id]
        if max(missing) <= limit:
            return tuple(range(len(missing)))
        return tuple(group for group, lacking in enumerate(missing) if lacking <= limit)


def blocks_with_mirror(
    holder: Holder, pattern: Pattern, mirror: Mirror, engine: EngineShape
) -> int:
    """Return the pool blocks of one holder in the next step, with those on their way out."""
    need = pool_need(demand_of(holder, engine, growth=1), pattern)
    return need + mirror.late_blocks(holder, pattern)


def mirror_of(snapshot: Snapshot) -> Mirror:
    holders = holders_of(snapshot, members(snapshot))
    missing = {one.holder_id: _missing(one, snapshot.engine) for one in holders}
    num_lagging = sum(
        max(of_one) > SEALING_STEPS and any(SEALING_STEPS < lacking < NEVER for lacking in of_one)
        for of_one in missing.values()
    )
    budget = snapshot.num_write_through_blocks * snapshot.parameters.min_window
    return Mirror(missing=missing, num_soon=budget // max(1, num_lagging))


def _missing(holder: Holder, engine: EngineShape) -> tuple[int, ...]:
    """Return per group the full blocks without a host copy; 0 where the group is offloaded."""
    num_full = holder.num_computed_tokens // engine.block_size
    given = holder.num_host_blocks
    if given and min(given) >= num_full:
        return (0,) * engine.num_groups
    if given:
        missing = [max(0, num_full - mirrored) for mirrored in given]
    else:
        missing = [NEVER if holder.num_tokens >= engine.block_size else 0] * engine.num_groups
    for group in placed_pattern(holder, engine).offloaded:
        missing[group] = 0
    return tuple(missing)
