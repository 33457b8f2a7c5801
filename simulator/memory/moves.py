"""The moves of layer groups that the capacity guard orders, on counted blocks."""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

from services.control.prefixes.trunks import give_up, hold
from services.control.requests.request_record import RequestRecord
from services.control.room.moves import Loading
from services.placement.blocks import (
    RESIDENT,
    BlockGeometry,
    min_request_blocks,
    num_request_blocks,
    side_blocks,
    side_copy_blocks,
)
from services.placement.types import EngineShape, RequestId
from simulator.device.copies import CopyJob, Lane
from simulator.memory import side_copies
from simulator.memory.host import HostLedger
from simulator.memory.kv import KVState, Trunk
from simulator.memory.pool import PoolLedger
from simulator.memory.requests import SimulatedRequest
from simulator.memory.trunks import Trunks


@dataclass(frozen=True, slots=True, kw_only=True)
class WayBack:
    """What one token of KV costs on its way from the host, of all layers."""

    link_frac: float = 1.0  # of the time that its KV would hold the link, (0, 1]
    compute_s: float = 0.0  # that the step under way takes more, >= 0


WHOLE_KV = WayBack()


class CountedMoves:
    """`ReturnMoves` over the `KVState` of requests and trunks."""

    def __init__(
        self,
        shape: EngineShape,
        pool: PoolLedger,
        host: HostLedger,
        live: Callable[[], Sequence[SimulatedRequest]],
        h2d: Lane,
    ) -> None:
        """`live`: all requests that have not ended, those that run first."""
        self.requests: dict[RequestId, SimulatedRequest] = {}  # the same, by id
        self.num_found_groups = 0  # that came back without a copy, into a request that waits
        self.pool, self.host, self.h2d = pool, host, h2d
        self._geometry = shape.geometry
        self._live, self._block_bytes = live, shape.block_bytes
        self.way_back = WHOLE_KV
        self.restored_s = 0.0  # compute that restores have cost so far
        self.trunks = Trunks(pool, host.counters, self._geometry)

    @property
    def geometry(self) -> BlockGeometry:
        return self._geometry

    @property
    def num_blocks(self) -> int:
        """What uncached prefixes save counts as room: requests are counted as if they had none."""
        return self.pool.num_blocks + sum(kv.num_saved for kv in self.all())

    @property
    def num_free(self) -> int:
        return self.pool.num_free

    def all(self) -> Iterator[KVState]:
        """Yield the holders that there are: most requests that wait have no KV."""
        kvs = (request.record.kv for request in self.requests.values())
        return chain((kv for kv in kvs if kv is not None), self.trunks.all)

    def idle(self, but: Collection[RequestRecord[KVState]]) -> list[KVState]:
        live = (r for r in self._live() if r.record.kv and r.record not in but)
        others = [r for r in live if r.kv.num_owned or r.kv.num_side_blocks]
        others = sorted(reversed(others), key=lambda request: -request.record.num_deposited_tokens)
        trunks = [
            trunk
            for trunk in self.trunks.all
            if all(self._request_of(user).record not in but for user in trunk.users)
        ]
        return [*(request.kv for request in others), *trunks]

    def _request_of(self, kv: KVState) -> SimulatedRequest:
        return self.requests[RequestId(kv.request_id)]

    def num_new(self, kv: KVState, num_tokens: int) -> int:
        return max(0, kv.num_new(num_tokens))  # what a window leaves behind is not free yet

    def num_side_blocks(self, kv: KVState) -> int:
        return kv.num_side_blocks

    def num_to_wake(self, kv: KVState) -> int:
        return kv.num_to_wake

    def offload(self, kv: KVState, groups: Sequence[int]) -> None:
        kv.offload(groups, num_free=self.pool.num_free)
        self.refresh(kv)

    def restore(self, kv: KVState, group: int) -> None:
        self._restore(kv, group, num_found=self._find(kv, group))

    def _find(self, kv: KVState, group: int) -> int:
        """Let a group have the blocks that still hold its KV, and return how many it does."""
        staged = kv.columns[kv.first : kv.first + kv.num_staged]
        return self.pool.find([one.uid for one in staged], group)

    def _restore(self, kv: KVState, group: int, *, num_found: int) -> None:
        block_bytes = round(self._block_bytes * self.way_back.link_frac)
        self.host.counters.num_found_blocks += num_found
        self.host.counters.num_loaded_blocks += kv.num_staged - num_found
        job = kv.begin_restore(group, block_bytes, num_found=num_found)
        if job.num_bytes:
            self.h2d.submit(job, self.h2d.now_s)
        else:
            job.done_s = self.h2d.now_s
        num_tokens = (kv.num_staged - num_found) * self._geometry.block_size
        self.restored_s += num_tokens * self.way_back.compute_s / self._geometry.num_groups
        self.refresh(kv)

    def set_staging(self, kv: KVState, num_buffers: int) -> None:
        kv.set_buffers(num_buffers, num_free=self.pool.num_free)
        self.refresh(kv)

    def sleep(self, kv: KVState) -> None:
        kv.sleep()
        self.refresh(kv)

    def give_up_restores(self) -> bool:
        num_free = self.pool.num_free
        for kv in self.all():
            if kv.cancel_restores():
                kv.seal()
                self.refresh(kv)
        return self.pool.num_free > num_free or any(
            (kv.num_staging_groups and kv.saves) or side_copies.is_leaving(kv) for kv in self.all()
        )

    # -- the way back -------------------------------------------------------------------------

    def can_reserve(self, request: SimulatedRequest, num_slots: int) -> bool:
        """Return whether `promise` would succeed."""
        num_droppable = sum(self._num_droppable(one) for one in self._parked(request))
        return self._num_missing(request, num_slots) <= num_droppable

    def promise(self, request: SimulatedRequest, num_slots: int) -> bool:
        """Promise host slots to a request; False: there are too few.

        It is at the cost of parked ones, shortest first. Its own copies it keeps.
        """
        if not self.can_reserve(request, num_slots):
            return False
        for one in self._parked(request):
            if self._num_missing(request, num_slots) <= 0:
                break
            self.drop(one.kv)
        return self.host.set_owned(request.request_id, num_slots - num_shared_slots(request.kv))

    def _num_missing(self, request: SimulatedRequest, num_slots: int) -> int:
        num_held = self.host.owned.get(request.request_id, 0) + num_shared_slots(request.kv)
        return num_slots - num_held - self.host.num_unpromised

    def _num_droppable(self, request: SimulatedRequest) -> int:
        """Return the slots that no other uses."""
        alone = (len(column.slots) for column in request.kv.columns if column.num_users == 1)
        return self.host.owned[request.request_id] + sum(alone)

    def _parked(self, but: SimulatedRequest) -> list[SimulatedRequest]:
        waiting = (one for one in self._live() if not one.num_computed_tokens and one is not but)
        return sorted(
            (one for one in waiting if one.kv.is_parked), key=lambda one: one.kv.num_tokens
        )

    def reserve(self, kv: KVState, num_slots: int) -> bool:
        return self.promise(self._request_of(kv), num_slots)

    def drop(self, kv: KVState) -> None:
        request = self._request_of(kv)
        kv.cancel_copies()
        self.trunks.end(kv)
        self.host.release(request.request_id)
        self.host.give_back(kv.columns)
        request.record.kv = None
        request.record.put_back()

    def num_to_find(self, kv: KVState, groups: Collection[int]) -> int:
        return self.pool.num_to_find([column.uid for column in kv.columns[kv.first :]], groups)

    def num_first_to_load(self, kv: KVState) -> int:
        return side_copy_blocks(self._geometry, num_tokens=kv.num_side_tokens)

    def share(self, kv: KVState) -> None:
        if not kv.trunks:
            self.trunks.join(kv)

    def keep_shared(self, kv: KVState) -> None:
        give_up(kv)
        self.host.give_back(kv.columns[kv.first :])
        self.host.set_owned(RequestId(kv.request_id), 0)
        del kv.columns[kv.first :]
        kv.num_tokens = kv.first * self._geometry.block_size
        kv.num_copied_blocks = kv.num_sent_blocks = kv.first

    def num_to_fit(self, kv: KVState) -> int:
        return 0  # what is not on the host is shared with live requests only

    def stay(self, kv: KVState, num_left: int) -> bool:
        if not kv.trunks:
            return False
        self.keep_shared(kv)
        kv.mirrored = False
        self.begin_load(kv, kv.offloaded, num_buffers=kv.wanted_buffers)
        return True

    def begin_load(self, kv: KVState, groups: Sequence[int], *, num_buffers: int) -> None:
        kv.wanted_buffers = num_buffers
        kv.lacking = list(groups)
        hold(kv)

    def load_on(self, kv: KVState, num_left: int) -> Loading:
        """One whole group after the other; those of trunks in steps come back by themselves."""
        num_first = side_copies.num_lacking(kv)
        if 0 < num_first <= num_left:
            num_left -= side_copies.bring_back(kv, self.h2d, self._block_bytes)
            self.refresh(kv)
        coming = [holder for holder in (*kv.trunks, kv) if holder.asleep]
        for holder in coming:
            num_left -= self._load(holder, num_left)
        return Loading(
            is_complete=not side_copies.is_coming(kv)
            and not any(holder.lacking or holder.restoring for holder in coming),
            lacks_blocks=side_copies.num_lacking(kv) > 0
            or any(holder.lacking for holder in coming),
        )

    def _load(self, holder: KVState, num_left: int) -> int:
        """Let groups of a holder come back into at most so many blocks; return into how many."""
        num_rows = holder.num_own_rows
        coming = holder.lacking[: max(0, num_left) // num_rows if num_rows else None]
        del holder.lacking[: len(coming)]
        # All find theirs before one takes any: it might be what the next would have found.
        found = [self._find(holder, group) for group in coming]
        for group, num_found in zip(coming, found, strict=True):
            self._restore(holder, group, num_found=num_found)
        if num_back := holder.take_in_restores():  # the pool still had all of them
            self.num_found_groups += num_back
            self.refresh(holder)
        return len(coming) * num_rows

    def wake(self, kv: KVState) -> bool:
        is_awake = self.trunks.wake(kv)
        if is_awake and kv.side_load is not None:
            side_copies.show(kv)
            self.refresh(kv)
        return is_awake

    def put_back(self, kv: KVState) -> None:
        request = self._request_of(kv)
        kept = kv.parked()
        kv.cancel_copies()
        give_up(kv)
        self.trunks.leave(kv)
        self.keep(request, kept)
        self.refresh(kept or request.nothing)

    def keep(self, request: SimulatedRequest, kept: KVState | None) -> None:
        """Let that be left of a request's KV."""
        self.host.give_back(request.kv.columns[len(kept.columns) if kept else 0 :])
        request.record.kv = kept

    def refresh(self, kv: KVState) -> None:
        """Let the ledger follow a change of a holder that finds its blocks free."""
        self.trunks.refresh(kv)


def num_host_blocks(geometry: BlockGeometry, request: SimulatedRequest) -> int:
    """Return the host blocks that a request takes until its end."""
    total = request.spec.num_prompt_tokens + request.spec.num_output_tokens
    num_full = geometry.num_groups * -(-total // geometry.block_size)
    return num_full + side_copy_blocks(geometry, num_tokens=total)


def fits_alone(shape: EngineShape, request: SimulatedRequest, *, offloads: bool) -> bool:
    """Return whether an empty engine could bring a request to its end."""
    geometry = shape.geometry
    total = request.spec.num_prompt_tokens + request.spec.num_output_tokens
    ahead = geometry.max_ahead_tokens
    rows = total + ahead
    num_side = side_blocks(geometry, num_tokens=rows, num_new_tokens=rows)
    num_blocks = shape.num_blocks - num_side
    resident = num_request_blocks(geometry, RESIDENT, num_tokens=total, num_ahead=ahead)
    if resident <= num_blocks:
        return True
    least = min_request_blocks(geometry, num_tokens=total, num_ahead=ahead)
    least += 2 * geometry.num_groups  # an open block each, and one on its way to the host
    on_host = num_host_blocks(geometry, request) <= shape.num_host_blocks
    return offloads and on_host and least <= num_blocks


def num_shared_slots(kv: KVState) -> int:
    """Return the host slots of what the prefix cache has of a request."""
    return sum(len(column.slots) for column in kv.columns)


MAX_JOB_BYTES = 64 << 20  # so that the copies of a long prompt are complete bit by bit
OFFLOADED_FIRST, RESIDENT_LATER = (0,), (1,)


def order_saves(
    kv: KVState, d2h: Lane, block_bytes: int, now_s: float, *, num_sent: int = 0
) -> None:
    """Order the copies of the full blocks that none has been ordered for, all groups together.

    `num_sent` blocks of them are in the queue already.
    """
    has_room = kv.mirrored or isinstance(kv, Trunk)
    if not has_room or kv.num_uncached > kv.num_sent_blocks:
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
