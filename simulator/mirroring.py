"""Write-through: every full block goes to the host soon after it is filled."""

from simulator.copies import CopyJob, Lane
from simulator.requests import KVState

MAX_JOB_BYTES = 64 << 20  # so that the copies of a long prompt are complete bit by bit
OFFLOADED_FIRST, RESIDENT_LATER = (0,), (1,)


def order_saves(kv: KVState, d2h: Lane, block_bytes: int, now_s: float) -> None:
    """Order the copies of the full blocks that none has been ordered for, all groups together."""
    if not kv.mirrored:
        return
    position_bytes = block_bytes * kv.geometry.num_groups
    at_once = max(1, MAX_JOB_BYTES // position_bytes)
    while kv.num_sent_blocks < kv.num_full_blocks:
        upto = min(kv.num_full_blocks, kv.num_sent_blocks + at_once)
        num_bytes = (upto - kv.num_sent_blocks) * position_bytes
        priority = OFFLOADED_FIRST if kv.offloaded else RESIDENT_LATER
        job = CopyJob(num_bytes=num_bytes, priority=priority)
        d2h.submit(job, now_s)
        kv.saves.append((job, upto))
        kv.num_sent_blocks = upto
