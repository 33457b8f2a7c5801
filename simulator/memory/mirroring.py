"""Write-through: every full block goes to the host soon after it is filled."""

from simulator.device.copies import CopyJob, Lane
from simulator.memory.kv import KVState

MAX_JOB_BYTES = 64 << 20  # so that the copies of a long prompt are complete bit by bit
OFFLOADED_FIRST, RESIDENT_LATER = (0,), (1,)


def order_saves(
    kv: KVState, d2h: Lane, block_bytes: int, now_s: float, *, num_sent: int = 0
) -> None:
    """Order the copies of the full blocks that none has been ordered for, all groups together.

    `num_sent` blocks of them are in the queue already.
    """
    if not kv.mirrored or kv.num_uncached > kv.num_sent_blocks:
        return  # what is uncached is in no block for long
    position_bytes = block_bytes * kv.geometry.num_groups
    at_once = max(1, MAX_JOB_BYTES // position_bytes)
    sent_bytes = num_sent * block_bytes
    while kv.num_sent_blocks < kv.num_full_blocks:
        upto = min(kv.num_full_blocks, kv.num_sent_blocks + at_once)
        num_bytes = (upto - kv.num_sent_blocks) * position_bytes
        skipped = min(num_bytes, sent_bytes)
        sent_bytes -= skipped
        priority = OFFLOADED_FIRST if kv.offloaded else RESIDENT_LATER
        # Not before what is in the queue: a byte at least.
        job = CopyJob(num_bytes=max(1, num_bytes - skipped), priority=priority)
        d2h.submit(job, now_s)
        kv.saves.append((job, upto))
        kv.num_sent_blocks = upto
