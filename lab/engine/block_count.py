"""The shared block formula, compared with the pool of a running engine."""

from typing import Any

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
        expected = [self._of_request(request, owner.geometry) for request in owner.kvs]
        num_orphaned = sum(map(len, owner.restores.orphans.values()))
        num_deferred = sum(len(blocks) for _, blocks in scheduler.deferred_frees)
        num_taken = owner.pool.num_gpu_blocks - 1 - owner.pool.get_num_free_blocks()
        num_held = owner.quarantine.num_unowned_blocks
        assert sum(expected) + num_orphaned + num_deferred + num_held == num_taken

    def _of_request(self, request: RequestKV, geometry: BlockGeometry) -> int:
        owned = {block.block_id for block in request.owned_blocks()}
        if request.asleep:  # nothing of it need be in the pool; what still is, is on its way
            assert not owned or not request.is_parked
            return len(owned)
        num_in_transit = request.num_blocks_in_transit()
        expected = num_formula_blocks(request, geometry) + num_in_transit - request.num_saved
        assert expected == len(owned), f"{request.request_id}: {expected}, owns {len(owned)}"
        self.num_compared += 1
        self.num_staging_seen.add(len(request.staging))
        self.num_in_transit += num_in_transit > 0
        self.num_settled += num_in_transit == 0 and bool(request.staging)
        return expected


def num_formula_blocks(request: RequestKV, geometry: BlockGeometry) -> int:
    """Return what planner, scheduler and simulator say that a request takes."""
    residency = Residency(
        num_offloaded=len(request.offloaded), num_staging=max(1, len(request.staging))
    )
    return num_request_blocks(geometry, residency, num_tokens=request.num_tokens)
