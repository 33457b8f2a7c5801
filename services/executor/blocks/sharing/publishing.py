"""What live requests let others begin with: their full blocks, as columns of the prefix cache."""

from bisect import bisect_left
from collections.abc import Hashable, Sequence

from vllm.v1.core.kv_cache_utils import BlockHash

from services.control.prefixes.prefix_cache import NO_SLOT, Column
from services.control.prefixes.shared_prefixes import Stretch
from services.control.requests.life import State
from services.executor.blocks.growth import Growth
from services.executor.blocks.holder import Holder
from services.executor.blocks.host_pool import HostPool
from services.executor.blocks.residency import RequestKV, Trunk
from services.executor.blocks.sharing.trunks import Trunks


class Publishing:
    """Makes columns: of what a step fills for those that share it, complete once it is copied."""

    def __init__(self, host: HostPool, growth: Growth, trunks: Trunks) -> None:
        self._host, self._growth, self._trunks = host, growth, trunks
        self._coming: dict[Hashable, RequestKV] = {}  # whose steps will fill a block
        self._expected: dict[RequestKV, list[BlockHash]] = {}  # of each, some are filled by now

    def filled(self, kv: RequestKV) -> None:
        """Let others share the full blocks of a request with all layers in the pool.

        The steps sent so far fill them. They get their slots on the host, if the request has room
        there; one that has used up its room waits for more.
        """
        end = min(kv.num_full_blocks, len(kv.keys))
        if kv.offloaded or not self._trunks.is_on or end <= len(kv.columns):
            return
        num_missing = sum(max(0, end - len(group.host_slots)) for group in kv.groups)
        if kv.mirrored and not self._host.can_take(kv.promise, num_missing):
            return
        for group in kv.groups:
            if kv.mirrored:
                self._growth.take_slots(kv, group, end)
            else:
                group.host_slots.extend([NO_SLOT] * (end - len(group.host_slots)))
        self._publish(kv, end)

    def copied(self, holder: Holder) -> None:
        """Let others begin with what is on the host of a live holder."""
        if isinstance(holder, Trunk):
            holder.mirrored = holder.num_copied_blocks == holder.end
        if isinstance(holder, RequestKV):
            self._publish(holder, min(holder.num_copied_blocks, len(holder.keys)))
        num_copied = min(holder.num_copied_blocks, len(holder.columns))
        for position in reversed(range(holder.first, num_copied)):
            if holder.columns[position].is_complete:
                return
            holder.columns[position].is_complete = True

    def _publish(self, kv: RequestKV, end: int) -> None:
        for position in range(len(kv.columns), end):
            column = Column(
                kv.keys[position],
                tuple(g.host_slots[position] for g in kv.groups) if kv.mirrored else (),
                kv.uid(position),
                is_complete=False,
                author=kv.request_id,
            )
            self._host.cache.publish(column)
            kv.columns.append(column)
            column.holder = kv
            self._forget(kv, column.key)

    # -- what is not there yet ----------------------------------------------------------------

    def expect(self, kv: RequestKV) -> None:
        """Let others wait for what a request computes from now on of its known tokens."""
        self.end(kv)
        self._expected[kv] = keys = list(kv.keys[len(kv.columns) :])
        for key in keys:
            self._coming.setdefault(key, kv)

    def end(self, kv: RequestKV) -> None:
        """Let no other wait for a request any more."""
        for key in self._expected.pop(kv, ()):
            self._forget(kv, key)

    def _forget(self, kv: RequestKV, key: Hashable) -> None:
        if self._coming.get(key) is kv:
            del self._coming[key]

    def coming(self, keys: Sequence[BlockHash], *, first: int, end: int) -> Stretch | None:
        """Return whose prompt's steps will fill the blocks `[first, end)`, and up to where.

        None if no request's do, or what could be shared of it is too short.
        """
        at = first + self._trunks.num_least - 1
        kv = self._coming.get(keys[at]) if at < end and self._trunks.is_on else None
        if kv is None or kv.num_full_blocks > at or kv.offloaded:
            return None
        # One that is admitted in this very step still waits.
        if kv.record.is_held or kv.record.state not in (State.RUNNING, State.WAITING):
            return None
        length = min(end, len(kv.keys))  # a key stands for all those before it
        return Stretch(
            kv.request_id,
            bisect_left(range(length), True, lo=at, key=lambda n: kv.keys[n] != keys[n]),
        )
