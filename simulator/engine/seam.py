"""`Engine` on the simulated scheduler: what the step loop and its parts see of it."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from services.control.kv import holders_of
from services.control.measures.link_rate import LinkRate
from services.control.measures.rates import MAX_MIRRORED_BLOCKS
from services.control.prefixes.anchors import ComingTurn
from services.control.prefixes.prefix_cache import Column
from services.control.prefixes.shared_prefixes import Stretch, behind
from services.control.requests.life import State
from services.control.requests.request_record import RequestRecord
from services.control.room.capacity_guard import Need
from services.control.types import Links
from services.placement.types import EngineShape
from simulator.device.copies import Lane
from simulator.memory.kv import KVState, on_host_only
from simulator.memory.moves import num_host_blocks
from simulator.memory.requests import SimulatedRequest

if TYPE_CHECKING:
    from simulator.engine.scheduler import Scheduler


class SimulatedEngine:
    """Reads a scheduler and its lanes, and gives it orders."""

    def __init__(self, scheduler: "Scheduler", h2d: Lane, d2h: Lane) -> None:
        self._scheduler, self._moves = scheduler, scheduler.moves
        self._h2d, self._d2h = h2d, d2h

    @property
    def shape(self) -> EngineShape:
        return self._scheduler.shape

    # -- its requests --------------------------------------------------------------------------

    @property
    def records(self) -> Mapping[str, RequestRecord[KVState]]:
        return self._scheduler.records

    @property
    def running(self) -> Sequence[SimulatedRequest]:
        return self._scheduler.running

    @property
    def waiting(self) -> Sequence[SimulatedRequest]:
        return self._scheduler.waiting

    @property
    def live(self) -> Sequence[SimulatedRequest]:
        return self._scheduler.live

    @property
    def num_places(self) -> int:
        return self._scheduler.num_places

    def need_of(self, request: SimulatedRequest) -> Need[KVState]:
        num_processed = max(request.num_computed_tokens, request.kv.num_side_tokens)
        return Need(request.record, request.num_tokens, num_processed_tokens=num_processed)

    def park(self, record: RequestRecord[KVState]) -> None:
        if record.state is State.RUNNING or record.state is State.PAUSED:
            record.enter(State.LEAVING)
            self._scheduler.counters.num_parks += 1

    # -- their KV ------------------------------------------------------------------------------

    @property
    def num_free_blocks(self) -> int:
        return max(0, self._moves.num_free - self._scheduler.guard.num_spare)

    @property
    def num_write_through_blocks(self) -> int:
        return MAX_MIRRORED_BLOCKS

    def num_predicted_slots(self, request: SimulatedRequest) -> int:
        return num_host_blocks(self._moves.geometry, request)

    def cached_prefix(self, request: SimulatedRequest) -> Sequence[Column]:
        block_size, host = self.shape.block_size, self._moves.host
        num_blocks = self._num_keys(request)
        keys = request.spec.block_keys(block_size)
        cached = host.cache.find_again(request.record.prefix, keys, num_blocks)
        filled = (request.spec.shared_key(n, block_size) for n in range(len(cached), num_blocks))
        return self._moves.trunks.reached(cached, host.filled(filled))

    def _num_keys(self, request: SimulatedRequest) -> int:
        """Return with how many blocks a request may begin that others computed."""
        return (request.num_tokens - 1) // self.shape.block_size

    def stretches(self, request: SimulatedRequest) -> Sequence[Stretch]:
        record, trunks = request.record, self._moves.trunks
        if record.kv is not None:
            return trunks.stretches(record.kv)
        if record.way is not None:  # one that is to be computed begins with nothing
            return []
        cached = self.cached_prefix(request)
        return behind(trunks.found(cached), self._coming(request, cached))

    def coming_prefix(self, request: SimulatedRequest) -> Stretch | None:
        return self._coming(request, self.cached_prefix(request))

    def coming_turn(self, _request: SimulatedRequest) -> ComingTurn | None:
        return None  # no request begins where windows and states would have to be there

    def _coming(self, request: SimulatedRequest, cached: Sequence[Column]) -> Stretch | None:
        block_size, num_keys = self.shape.block_size, self._num_keys(request)
        at = len(cached) + self._moves.trunks.num_least - 1
        if at >= num_keys or not self._moves.trunks.is_on:
            return None
        for other in self._scheduler.running:
            if _fills(other, at, block_size) and _is_alike(request, other, at, block_size):
                numbers = range(at + 1, num_keys)
                end = next(
                    (n for n in numbers if not _is_alike(request, other, n, block_size)), num_keys
                )
                return Stretch(other.request_id, end)
        return None

    def num_to_share(self, request: SimulatedRequest) -> int:
        kv, trunks = request.record.kv, self._moves.trunks
        if kv is not None:
            return trunks.num_shared(kv.columns) if kv.is_parked else kv.num_shared
        cached = self.cached_prefix(request)
        coming = self._coming(request, cached)
        return trunks.num_shared(cached) if coming is None else coming.end

    def adopt_prefix(self, request: SimulatedRequest, columns: Sequence[Column]) -> None:
        self._moves.host.cache.share(columns)
        self._moves.host.set_owned(request.request_id, 0)
        nothing = KVState(
            request_id=request.request_id, geometry=self._moves.geometry, columns=list(columns)
        )
        request.record.kv = on_host_only(nothing, len(columns))
        self._moves.trunks.join(request.kv)  # some of it may be nowhere else

    # -- copies --------------------------------------------------------------------------------

    def links(self, h2d: LinkRate, d2h: LinkRate) -> Links:
        returning = sum(
            job.num_left_bytes for kv in self._moves.all() for job in kv.restoring.values()
        )
        leaving, chunk_bytes = self._d2h.num_queued_bytes, self._h2d.chunk_bytes
        return Links(
            h2d=h2d.link(chunk_bytes=chunk_bytes, num_queued_bytes=returning),
            d2h=d2h.link(chunk_bytes=chunk_bytes, num_queued_bytes=leaving),
        )

    def num_returning_bytes(self) -> int:
        return self._h2d.num_queued_bytes  # between two steps: restores only

    def num_step_load_blocks(self, needs: Sequence[Need[KVState]]) -> int:
        kvs = [need.record.kv for need in needs if need.record.kv is not None]
        return sum(one.num_staged * one.num_staging_groups for one in holders_of(kvs))


def _fills(request: SimulatedRequest, number: int, block_size: int) -> bool:
    """Return whether the next steps of a running request fill a block, for others to share."""
    kv = request.kv
    goes_on = request.num_left_tokens > 1 and not request.is_paused
    is_ahead = request.num_computed_tokens // block_size <= number
    return goes_on and is_ahead and kv.mirrored and not kv.offloaded


def _is_alike(one: SimulatedRequest, other: SimulatedRequest, number: int, block_size: int) -> bool:
    """Return whether two requests are the same up to the end of a block."""
    key = one.spec.shared_key(number, block_size)
    return key is not None and key == other.spec.shared_key(number, block_size)
