"""Which requests run: held, parked, and coming back. Between vLLM's scheduler and their blocks."""

import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

from vllm.v1.request import Request

from services.control.measures.rates import Rates
from services.control.prefix_cache import Column
from services.control.requests.life import Hold, State
from services.control.requests.request_record import RequestRecord
from services.control.room.capacity_guard import Need
from services.control.room.resumes import Resumes, num_host_tokens
from services.executor.blocks.failures import may_mirror
from services.executor.blocks.residency import RequestKV
from services.executor.blocks.transfers.transfers import Transfers
from services.executor.scheduler.vllm_scheduler import IDLE_WAIT_S, NEVER, VllmScheduler
from services.placement.layer_placement import LayerPlacement
from services.placement.run.resume import LinkAndStep, ResumeWay


class RunControl:
    """Holds running requests back, parks them, and prepares parked ones to run again."""

    def __init__(
        self,
        scheduler: VllmScheduler,
        transfers: Transfers,
        resumes: Resumes[RequestKV],
        rates: Callable[[], Rates],
        *,
        max_hold_s: float,
    ) -> None:
        """`rates`: of the moment; `max_hold_s`: for which a request is held for its reader."""
        self.resumes = resumes
        self._scheduler = scheduler
        self.transfers, self._owner = transfers, transfers.owner
        self._records = transfers.owner.records
        self.guard = resumes.guard
        self._rates, self._max_hold_s = rates, max_hold_s
        self.line: Callable[[], Iterable[Request]] = lambda: scheduler.waiting  # who may come in
        self._is_stuck = False

    def record_of(self, request: Request) -> RequestRecord[RequestKV]:
        return self._records[request.request_id]

    # -- each step --------------------------------------------------------------------------

    def leave(self, record: RequestRecord[RequestKV]) -> None:
        """Send a running request to the queue as soon as no token of it is in flight.

        What is on the host stays there; the rest of its KV is computed again.
        """
        if record.state is State.RUNNING or record.state is State.PAUSED:
            record.enter(State.LEAVING)
            self._owner.counters.num_parks += 1

    def stop_and_start(self) -> None:
        """Tell vLLM which running requests to skip, and send those to the queue that leave."""
        self._release_overdue()
        if self._is_stuck and not self._preempt_idle():
            self._put_back_last()
        for request in list(self._scheduler.running):
            record = self.record_of(request)
            if record.is_held:
                self._stop(request, record)
            elif record.state is State.PAUSED:
                self._start(request, record)

    def _release_overdue(self) -> None:
        """Let requests run whose readers stopped long ago: their gateway may be gone."""
        now_s = time.monotonic()
        for record in self._records.values():
            if now_s - record.holds.get(Hold.READER, math.inf) >= self._max_hold_s:
                record.release(Hold.READER, now_s)
                self._owner.counters.num_overdue_holds += 1

    def _stop(self, request: Request, record: RequestRecord[RequestKV]) -> None:
        request.next_decode_eligible_step = NEVER
        if record.state is State.RUNNING:
            record.enter(State.PAUSED)
            self._owner.counters.num_pauses += 1
        elif record.state is State.LEAVING and request.num_in_flight_tokens == 0:
            self._preempt(request)

    def _start(self, request: Request, record: RequestRecord[RequestKV]) -> None:
        kv = record.kv
        # Wait for its token in flight: the scheduler would read it from the previous step.
        if request.num_in_flight_tokens == 0 and (kv is None or self._owner.staging.take(kv)):
            record.enter(State.RUNNING)
            request.next_decode_eligible_step = 0
            self._owner.counters.num_resumes_in_place += 1

    def _preempt_idle(self) -> bool:
        """Preempt the youngest request that is skipped: the others lack what it holds.

        False if none is skipped.
        """
        skipped = [r for r in self._scheduler.running if self.record_of(r).state.is_skipped]
        if skipped and skipped[-1].num_in_flight_tokens == 0:
            self._preempt(skipped[-1])
        return bool(skipped)

    def _put_back_last(self) -> None:
        """Take back the blocks of the last request in line that has some: those ahead lack them."""
        preparing = [one for one in map(self.record_of, self._eligible()) if one.is_prepared]
        for record in reversed(preparing):
            if self.resumes.put_back(record):
                return

    def _preempt(self, request: Request) -> None:
        self._scheduler.running.remove(request)
        self._scheduler._preempt_request(request, time.monotonic())

    def admitted(self, requests: Iterable[Request]) -> None:
        """Take in which requests run that did not; they own blocks."""
        counters, block_size = self._owner.counters, self._owner.geometry.block_size
        for request in requests:
            record = self.record_of(request)
            assert record.kv is not None
            is_new = not request.num_preemptions
            if record.state is State.READY and is_new:
                counters.num_prefix_hit_tokens += len(record.kv.columns) * block_size
            self.resumes.admitted(record, is_new=is_new)

    # -- the queue --------------------------------------------------------------------------

    def num_host_tokens(self, request: Request) -> int | None:
        """Return how many tokens a waiting request need not compute; None: pass over it now."""
        record = self.record_of(request)
        if record.is_held:
            return None
        self._seek(request, record)
        if record.kv is None and self.resumes.is_short_of_blocks:
            return None  # no request overtakes one that has yet to find room
        return num_host_tokens(record)

    def next_in_line(self) -> list[Request]:
        """Return the requests to make room for: those being prepared, and the first of the rest.

        Nobody while as many run as may run: what they would take is the running requests' own.
        """
        line: list[Request] = []
        if not self._num_places():
            return line
        for request in self._eligible():
            line.append(request)
            if not self.record_of(request).is_prepared:
                break
        return line

    def prepare_resumes(self, num_predicted_slots: Callable[[Request], int]) -> None:
        """Move parked requests at the head of the queue on towards running."""
        self.resumes.is_short_of_blocks = False
        if not self._scheduler.waiting:
            return
        ahead = self.active_needs()  # who is served before the request at hand
        for request in itertools.islice(self._eligible(), self._num_places()):
            record = self.record_of(request)
            self._seek(request, record)
            self.resumes.prepare(
                record,
                partial(self._choose, request, tuple(ahead)),
                num_slots=num_predicted_slots(request),
                num_kept_free=self.guard.num_blocks_of_next_step(ahead),
            )
            if self.resumes.is_short_of_blocks or record.kv is None:
                break
            ahead.append(need_of(request, record))

    def cached_prefix(self, request: Request, record: RequestRecord[RequestKV]) -> Sequence[Column]:
        """Return the columns that a request without KV may begin with: not its last token's."""
        if record.kv is not None or record.way is not None or not may_mirror(record):
            return ()
        if request.skip_reading_prefix_cache:
            return ()
        keys = request.block_hashes  # none any more of a request that has lost its KV
        num_keys = min(len(keys), (request.num_tokens - 1) // self._owner.geometry.block_size)
        return self._owner.host.find(record.prefix, keys, num_keys)

    def _seek(self, request: Request, record: RequestRecord[RequestKV]) -> None:
        """Let a request without KV begin with what is cached of its tokens.

        As late as possible: others may still be computing what it begins with.
        """
        if columns := self.cached_prefix(request, record):
            self._owner.adopt_prefix(record, columns, request.block_hashes)

    def _num_places(self) -> int:
        """Return how many more requests may run."""
        num_places: int = self._scheduler.max_num_active_reqs - len(self._scheduler.running)
        return max(0, num_places)

    def _eligible(self) -> Iterator[Request]:
        return (request for request in self.line() if not self.record_of(request).is_held)

    def _choose(
        self, request: Request, ahead: Sequence[Need[RequestKV]], kv: RequestKV
    ) -> tuple[ResumeWay, LayerPlacement]:
        return self.resumes.choose(
            kv,
            need_of(request, kv.record),
            ahead,
            num_left=request.max_tokens - request.num_output_tokens,
            engine=self._link_and_step(len(ahead)),
        )

    def _link_and_step(self, num_running: int) -> LinkAndStep:
        rates, transfers = self._rates(), self.transfers
        return LinkAndStep(
            h2d_bytes_per_s=rates.h2d_bytes_per_s,
            prompt=rates.prompt,
            step_s=rates.step_s or 0.0,
            step_bytes=transfers.num_step_load_blocks() * self.resumes.block_bytes,
            queue_bytes=transfers.num_restoring_blocks() * self.resumes.block_bytes,
            num_running=num_running,
        )

    def active_needs(self) -> list[Need[RequestKV]]:
        """Return what the running requests that are not held need, in scheduling order."""
        records, running = self._records, self._scheduler.running
        both = [(request, records[request.request_id]) for request in running]
        return [need_of(request, record) for request, record in both if not record.is_held]

    def needs_in_line(self) -> list[Need[RequestKV]]:
        return [need_of(request, self.record_of(request)) for request in self.next_in_line()]

    # -- idle steps -------------------------------------------------------------------------

    def after_step(self, *, num_scheduled: int) -> None:
        """Slow down after a step in which no request ran, if one is held.

        If a request wants to run and no copy is under way that would let it, blocks are missing.
        """
        self._is_stuck = False
        running = self._scheduler.running
        in_flight = any(request.num_in_flight_tokens for request in running)
        if num_scheduled == 0 and not in_flight and not self.transfers.is_busy:
            run = [self.record_of(request) for request in running]
            line = [self.record_of(request) for request in self._eligible()]
            wants = bool(line) or not all(record.is_held for record in run)
            in_the_way = any(one.state.is_skipped for one in run) or any(
                one.is_prepared for one in line
            )
            self._is_stuck = wants and in_the_way
            if any(record.is_held for record in self._records.values()):
                time.sleep(IDLE_WAIT_S)

    def check_integrity(self) -> None:
        """Assert that states are true: of the queue that a request is in, and of its KV."""
        running = {request.request_id for request in self._scheduler.running}
        for request_id, record in self._records.items():
            state, kv = record.state, record.kv
            assert state.is_queued == (request_id not in running), f"{request_id}: {state}"
            assert kv is not None or not record.is_prepared, f"{request_id} has no KV: {state}"
            if kv is not None:
                may_be_asleep = state.is_skipped or state in (State.WAITING, State.LOADING)
                assert may_be_asleep or not kv.asleep, f"{request_id} is asleep: {state}"


def need_of(request: Request, record: RequestRecord[RequestKV]) -> Need[RequestKV]:
    """Return what vLLM makes room for: tokens that are sampled and not yet known count."""
    return Need(record, request.num_tokens + request.num_output_placeholders)
