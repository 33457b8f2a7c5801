"""One request's KV in the planner's terms."""

from dataclasses import dataclass

from services.executor.blocks.residency import GroupKV, RequestKV


@dataclass(frozen=True, slots=True, kw_only=True)
class KVView:
    """Where a request's blocks are, per layer group."""

    offloaded: tuple[int, ...] = ()  # layer groups in host memory, ascending
    num_buffers: int = 0  # staging; asleep: what it wakes up with; 0 iff nothing is offloaded
    num_blocks: tuple[int, ...] = ()  # of the pool; staging counts with the first groups it serves
    num_host_blocks: tuple[int, ...] = ()  # leading full blocks whose host copy is complete
    num_leaving_blocks: int = 0  # copies to the host under way
    num_returning_blocks: int = 0  # copies of restores under way


NOTHING = KVView()


def view_of(kv: RequestKV) -> KVView:
    """Return the view of a request that holds KV."""
    chain = kv.offloaded
    num_blocks = [_num_owned(group) for group in kv.groups]
    for index, buffer in zip(chain, kv.staging, strict=False):
        num_blocks[index] += len(buffer)
    return KVView(
        offloaded=tuple(chain),
        num_buffers=len(kv.staging) or min(1, len(chain)),
        num_blocks=tuple(num_blocks),
        num_host_blocks=tuple(group.num_host_blocks for group in kv.groups),
        num_leaving_blocks=sum(g.num_saves_sent - g.num_host_blocks for g in kv.groups),
        num_returning_blocks=sum(
            len(blocks)
            for group in kv.groups
            if group.restore is not None
            for blocks in group.restore.under_way.values()
        ),
    )


def _num_owned(group: GroupKV) -> int:
    own = len(group.own) if group.offloaded else len(group.row)
    return own + (len(group.restore.targets) if group.restore is not None else 0)


def has_caught_up(kv: RequestKV, *, slack_blocks: int) -> bool:
    """Return whether the host copy lacks no more than the newest blocks of every group."""
    return kv.num_host_blocks >= kv.num_full_blocks - slack_blocks
