"""Room for new tokens: which blocks and host slots a request takes as it grows."""

from vllm.v1.core.kv_cache_utils import KVCacheBlock

from services.executor.blocks.holder import GroupKV
from services.executor.blocks.host_pool import HostPool
from services.executor.blocks.pool_blocks import PoolBlocks
from services.executor.blocks.residency import RequestKV
from services.executor.blocks.staging import StagingBuffers


class Growth:
    """Takes blocks for tokens, and host slots for full blocks."""

    def __init__(
        self, blocks: PoolBlocks, host: HostPool, staging: StagingBuffers, *, block_size: int
    ) -> None:
        self._blocks = blocks
        self._host = host
        self._staging = staging
        self._block_size = block_size

    def num_new_blocks(self, kv: RequestKV, *, num_tokens: int, num_accepted: int) -> int:
        """Return how many blocks `grow` will take from the pool."""
        num_have, num_want = kv.num_rows, self._num_blocks(num_tokens)
        if num_want <= num_have:
            return 0
        direct_end = self._direct_end(kv, num_accepted)
        num_staging_groups = sum(group.stages for group in kv.groups)
        num_new = (len(kv.groups) - num_staging_groups) * (num_want - num_have)
        num_new += num_staging_groups * (num_want - direct_end)
        if direct_end > num_have:
            num_new += sum(max(0, direct_end - len(buffer)) for buffer in kv.staging)
            if kv.asleep:  # it will wake up with one buffer
                num_new += direct_end - num_have
        return num_new

    def grow(
        self, kv: RequestKV, *, num_tokens: int, num_accepted: int
    ) -> tuple[list[KVCacheBlock], ...]:
        """Make room for `num_tokens` tokens; return what each group's row gains.

        Those behind `num_accepted` are drafts: a later step may compute others in their place.

        The pool must have `num_new_blocks`: otherwise it raises, and some of them are taken.
        Blocks that the step fills completely go straight to staging in offloaded groups: the
        prefill of a prompt never holds more than its placement does.
        """
        num_have, num_want = kv.num_rows, self._num_blocks(num_tokens)
        if num_want <= num_have:
            return tuple([] for _ in kv.groups)
        direct_end = self._direct_end(kv, num_accepted)
        if direct_end > num_have:
            self._staging.extend(kv, direct_end)
        return tuple(self._grow_group(kv, group, direct_end, num_want) for group in kv.groups)

    def take_slots(self, kv: RequestKV, group: GroupKV, length: int) -> bool:
        """Give the group's first `length` positions slots; False if the host pool is full."""
        num_missing = length - len(group.host_slots)
        if num_missing <= 0:
            return True
        slots = self._host.take(kv.promise, num_missing)
        if slots is None:
            return False
        group.host_slots.extend(slots)
        return True

    def _grow_group(
        self, kv: RequestKV, group: GroupKV, direct_end: int, num_want: int
    ) -> list[KVCacheBlock]:
        gained: list[KVCacheBlock] = []
        num_have = len(group.row)
        if group.stages and direct_end > num_have:
            gained.extend(kv.staging[group.buffer][num_have:direct_end])
            self.take_slots(kv, group, direct_end)
        own = self._blocks.take_open(num_want - num_have - len(gained))
        if group.offloaded:
            first = num_have + len(gained)
            group.own.update(enumerate(own, start=first))
        gained.extend(own)
        group.row.extend(gained)
        return gained

    def _direct_end(self, kv: RequestKV, num_accepted: int) -> int:
        """Return the position up to which new blocks are staging blocks in offloaded groups."""
        num_have = kv.num_rows
        num_full = num_accepted // self._block_size
        staging_groups = [group for group in kv.groups if group.stages]
        if num_full <= num_have or not staging_groups:
            return num_have
        num_slots = sum(max(0, num_full - len(group.host_slots)) for group in staging_groups)
        if not self._host.can_take(kv.promise, num_slots):
            return num_have
        return num_full

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)
