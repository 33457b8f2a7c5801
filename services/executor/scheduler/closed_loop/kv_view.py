"""One request's KV in the planner's terms."""

from services.control.requests.request_state import KVView
from services.executor.blocks.residency import GroupKV, RequestKV


def view_of(kv: RequestKV) -> KVView:
    """Return the view of a request that holds KV."""
    chain = kv.offloaded
    num_blocks = [_num_owned(group) for group in kv.groups]
    num_blocks[0] += kv.num_recomputed
    for index, buffer in zip(chain, kv.staging, strict=False):
        num_blocks[index] += len(buffer) - len(kv.uncached)
    return KVView(
        offloaded=tuple(chain),
        num_buffers=len(kv.staging) or min(1, len(chain)),
        num_blocks=tuple(num_blocks),
        num_host_blocks=tuple(group.num_host_blocks for group in kv.groups),
    )


def num_leaving_blocks(kv: RequestKV) -> int:
    """Return how many of a request's blocks are on their way to the host."""
    return sum(group.num_saves_sent - group.num_host_blocks for group in kv.groups)


def num_returning_blocks(kv: RequestKV) -> int:
    """Return how many of a request's blocks are on their way back to the pool."""
    restores = (group.restore for group in kv.groups)
    return sum(
        len(blocks)
        for restore in restores
        if restore is not None
        for blocks in restore.under_way.values()
    )


def _num_owned(group: GroupKV) -> int:
    own = len(group.own) if group.offloaded else len(group.row) - group.num_uncached
    return own + (len(group.restore.targets) if group.restore is not None else 0)


def has_caught_up(kv: RequestKV, *, slack_blocks: int) -> bool:
    """Return whether the host copy lacks no more than the newest blocks of every group."""
    return kv.num_host_blocks >= kv.num_full_blocks - slack_blocks
