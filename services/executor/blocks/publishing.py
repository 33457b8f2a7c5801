"""What live requests let others begin with: their full blocks, as columns of the prefix cache."""

from services.control.prefix_cache import Column
from services.executor.blocks.growth import Growth
from services.executor.blocks.holder import Holder
from services.executor.blocks.host_pool import HostPool
from services.executor.blocks.residency import RequestKV, Trunk
from services.executor.blocks.trunks import Trunks, users_of


class Publishing:
    """Makes columns: of what a step fills for those who share it, complete once it is copied."""

    def __init__(self, host: HostPool, growth: Growth, trunks: Trunks) -> None:
        self._host, self._growth, self._trunks = host, growth, trunks

    def filled(self, kv: RequestKV) -> None:
        """Let others share the full blocks of a request with all layers in the pool.

        The steps sent so far fill them. They get their slots on the host, if there are as many.
        """
        end = min(kv.num_full_blocks, len(kv.keys))
        if kv.offloaded or not self._trunks.is_on or end <= len(kv.columns):
            return
        num_missing = sum(max(0, end - len(group.host_slots)) for group in kv.groups)
        if self._host.can_take(kv.promise, num_missing):
            for group in kv.groups:
                self._growth.take_slots(kv, group, end)
            self._publish(kv, end)

    def copied(self, holder: Holder) -> None:
        """Let others begin with what is on the host of a live holder."""
        if isinstance(holder, Trunk):
            holder.mirrored = holder.num_copied_blocks == holder.end
        for kv in users_of(holder):
            num_host_blocks = kv.num_host_blocks
            self._publish(kv, min(num_host_blocks, len(kv.keys)))
            _complete(kv, min(num_host_blocks, len(kv.columns)))

    def _publish(self, kv: RequestKV, end: int) -> None:
        for position in range(len(kv.columns), end):
            column = Column(
                kv.keys[position],
                tuple(group.host_slots[position] for group in kv.groups),
                kv.uid(position),
                is_complete=False,
            )
            self._host.cache.publish(column)
            kv.columns.append(column)
            column.holder = kv


def _complete(kv: RequestKV, end: int) -> None:
    """Take in that a request's columns before `end` are complete."""
    for position in range(end - 1, -1, -1):
        if kv.columns[position].is_complete:
            return
        kv.columns[position].is_complete = True
