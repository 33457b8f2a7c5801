"""The shared block formula, compared with the pool of a running engine."""

from typing import Any

from services.executor.blocks.holder import Holder
from services.executor.blocks.residency import RequestKV
from services.placement.blocks import BlockGeometry, Residency, num_request_blocks


class FormulaCheck:
    """Compares, after a step, what the formula says with what the pool has given away."""

    def __init__(self) -> None:
        self.num_compared = 0  # requests, over all steps
        self.num_staging_seen: set[int] = set()
        self.num_settled = 0  # ... of requests with offloaded groups and no copy under way
        self.num_in_transit = 0  # ... of requests with copies under way

    def after_step(self, scheduler: Any) -> None:
        owner = scheduler.block_owner
        expected = [self._of_holder(holder, owner.geometry) for holder in owner.holders()]
        num_orphaned = sum(map(len, owner.restores.orphans.values()))
        num_deferred = sum(len(blocks) for _, blocks in scheduler.deferred_frees)
        num_taken = owner.pool.num_gpu_blocks - 1 - owner.pool.get_num_free_blocks()
        num_held = owner.quarantine.num_unowned_blocks + owner.sides.num_owned
        num_held += owner.returns.num_owned + owner.late_copies.num_owned
        assert sum(expected) + num_orphaned + num_deferred + num_held == num_taken

    def _of_holder(self, holder: Holder, geometry: BlockGeometry) -> int:
        owned = {block.block_id for block in holder.owned_blocks()}
        if holder.asleep:  # nothing of it need be in the pool; what still is, is on its way
            assert not owned or not (isinstance(holder, RequestKV) and holder.is_parked)
            return len(owned)
        num_in_transit = holder.num_blocks_in_transit()
        num_saved = holder.num_saved if isinstance(holder, RequestKV) else 0
        expected = num_formula_blocks(holder, geometry) + num_in_transit - num_saved
        assert expected == len(owned), f"{holder.request_id}: {expected}, owns {len(owned)}"
        self.num_compared += 1
        self.num_staging_seen.add(len(holder.staging))
        self.num_in_transit += num_in_transit > 0
        self.num_settled += num_in_transit == 0 and bool(holder.staging)
        return expected


def num_formula_blocks(holder: Holder, geometry: BlockGeometry) -> int:
    """Return what planner, scheduler and simulator say that a holder takes."""
    residency = Residency(
        num_offloaded=len(holder.offloaded), num_staging=max(1, len(holder.staging))
    )
    num_ahead = max(0, holder.num_rows * geometry.block_size - holder.num_tokens)
    assert num_ahead < geometry.max_ahead_tokens + geometry.block_size, "more room than drafts take"
    return num_request_blocks(
        geometry, residency, num_tokens=holder.num_own_tokens, num_ahead=num_ahead
    )
