"""What goes with a request that leaves, where groups keep a window or a state: counted, as jobs.

The executor's rules (`services/executor/blocks/sides/side_copies.py`): windows, states and open
blocks are copied once no token of their request is on its way, and it keeps its blocks until they
are there; when it comes back their blocks are taken together.
"""

from services.placement.blocks import side_blocks, side_copy_positions
from simulator.device.copies import RESTORE, CopyJob, Lane
from simulator.memory.kv import KVState

LEAVES = (-1,)  # before all other copies to the host: blocks come free with it


def may_leave(kv: KVState, d2h: Lane, block_bytes: int) -> bool:
    """Return whether what a request takes with it is on the host; begin to copy it at first.

    Without room there it takes nothing.
    """
    if not kv.geometry.side_windows or not kv.mirrored:
        return True
    if kv.side_save is None:
        kv.side_save = CopyJob(
            num_bytes=num_blocks(kv, kv.num_tokens) * block_bytes, priority=LEAVES
        )
        d2h.submit(kv.side_save, d2h.now_s)
    return kv.is_saved


def num_blocks(kv: KVState, num_tokens: int) -> int:
    """Return how many blocks are copied beside the full ones of so many tokens."""
    return sum(map(len, side_copy_positions(kv.geometry, num_tokens=num_tokens)))


def num_lacking(kv: KVState) -> int:
    """Return how many blocks `bring_back` takes."""
    is_away = kv.num_side_tokens and not kv.num_side_blocks
    return num_blocks(kv, kv.num_side_tokens) if is_away else 0


def is_coming(kv: KVState) -> bool:
    """Return whether blocks are still to be taken, or to be filled."""
    return bool(num_lacking(kv)) or (kv.side_load is not None and kv.side_load.done_s is None)


def is_leaving(kv: KVState) -> bool:
    """Return whether a request's blocks come free once copies are complete."""
    return kv.side_save is not None and not kv.is_saved


def bring_back(kv: KVState, h2d: Lane, block_bytes: int) -> int:
    """Take blocks for all that comes first, and begin to copy it; return how many."""
    kv.num_side_blocks = num_taken = num_lacking(kv)
    kv.side_load = CopyJob(num_bytes=num_taken * block_bytes, priority=(RESTORE, -1))
    h2d.submit(kv.side_load, h2d.now_s)
    return num_taken


def show(kv: KVState) -> None:
    """Let a request that wakes up have all of its tokens."""
    if kv.side_load is None:
        return
    kv.side_load = None
    num_rows = kv.num_rows
    kv.num_tokens = kv.num_side_tokens
    if kv.offloaded:
        kv.own = (*kv.own, *range(num_rows, kv.num_rows))
    kv.num_side_blocks = side_blocks(kv.geometry, num_tokens=kv.num_tokens, num_new_tokens=0)
