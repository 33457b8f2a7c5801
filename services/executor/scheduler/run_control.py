"""Which requests run: held, parked, and coming back. Between vLLM's scheduler and their blocks."""

import itertools
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

from vllm.v1.request import Request

from services.control.measures.rates import Rates
from services.control.prefix_cache import Column
from services.control.requests.holds import Holds
from services.control.requests.request_record import HoldKind, RequestRecord
from services.control.room.capacity_guard import Need
from services.control.room.resumes import Resumes, is_preparing, num_host_tokens
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
        holds: Holds,
        resumes: Resumes[RequestKV],
        rates: Callable[[], Rates],
    ) -> None:
        """`rates`: of the moment."""
        self.holds = holds
        self.resumes = resumes
        self._scheduler = scheduler
        self.transfers, self._owner = transfers, transfers.owner
        self._records = transfers.owner.records
        self.guard = resumes.guard
        self._rates = rates
        self.line: Callable[[], Iterable[Request]] = lambda: scheduler.waiting  # who may come in
        self._is_stuck = False
        self._wake = threading.Event()

    def resume(self, record: RequestRecord[RequestKV]) -> None:
        """End a hold: the request runs again as soon as there is room."""
        record.hold = None
        self._wake.set()

    def record_of(self, request: Request) -> RequestRecord[RequestKV]:
        return self._records[request.request_id]

    # -- each step --------------------------------------------------------------------------

    def stop_and_start(self) -> None:
        """Tell vLLM which running requests to skip, and park those that are ready for it."""
        self.holds.release_overdue()
        if self._is_stuck and not self._preempt_idle():
            self._put_back_last()
        for request in list(self._scheduler.running):
            record = self.record_of(request)
            if record.hold is not None:
                self._stop(request, record, record.hold.kind)
            elif record.skipped:
                self._start(request, record)

    def _stop(self, request: Request, record: RequestRecord[RequestKV], kind: HoldKind) -> None:
        record.skipped, kv = True, record.kv
        request.next_decode_eligible_step = NEVER
        match kind:
            case HoldKind.PARK:
                if kv is not None and kv.mirrored:
                    self._drain(kv)
                if request.num_in_flight_tokens == 0 and (kv is None or self._is_drained(kv)):
                    self._preempt(request)
            case HoldKind.LEAVE if request.num_in_flight_tokens == 0:
                self._preempt(request)
                record.hold = None

    def _start(self, request: Request, record: RequestRecord[RequestKV]) -> None:
        kv = record.kv
        # Wait for its token in flight: the scheduler would read it from the previous step.
        if request.num_in_flight_tokens == 0 and (kv is None or self._owner.staging.take(kv)):
            record.skipped = False
            request.next_decode_eligible_step = 0
            self._owner.counters.num_resumes_in_place += 1

    def _drain(self, kv: RequestKV) -> None:
        """Have all full blocks leave the pool, each as soon as its copy is complete."""
        resident = [i for i, g in enumerate(kv.groups) if not g.offloaded or g.restore is not None]
        if resident or not kv.asleep:
            self._owner.staging.drop(kv)
            self._owner.offload(kv, resident)
            self.transfers.write_through.note(kv)

    def _is_drained(self, kv: RequestKV) -> bool:
        """Whether waiting longer would not save another block."""
        num_full = kv.num_full_blocks
        if not kv.mirrored or kv.num_host_blocks >= num_full:
            return True
        if any(group.num_host_blocks < group.num_saves_sent for group in kv.groups):
            return False
        num_missing = sum(num_full - len(group.host_slots) for group in kv.groups)
        return not self._owner.host.can_take(kv.promise, num_missing)

    def _preempt_idle(self) -> bool:
        """Preempt the youngest request that is skipped: the others lack what it holds.

        False if none is skipped.
        """
        skipped = [r for r in self._scheduler.running if self.record_of(r).skipped]
        if skipped and skipped[-1].num_in_flight_tokens == 0:
            self._preempt(skipped[-1])
        return bool(skipped)

    def _put_back_last(self) -> None:
        """Take back the blocks of the last request in line that has some: those ahead lack them."""
        preparing = [one for one in map(self.record_of, self._eligible()) if is_preparing(one)]
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
            if record.kv.waiting and is_new:
                counters.num_prefix_hit_tokens += len(record.kv.columns) * block_size
            record.kv.waiting = False
            self.resumes.admitted(record, is_new=is_new)

    def preempted(self, request: Request) -> None:
        """A running request has gone back to the queue."""
        self.record_of(request).skipped = False
        request.next_decode_eligible_step = 0

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
            if not is_preparing(self.record_of(request)):
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
        return [need_of(request, record) for request, record in both if record.hold is None]

    def needs_in_line(self) -> list[Need[RequestKV]]:
        return [need_of(request, self.record_of(request)) for request in self.next_in_line()]

    # -- idle steps -------------------------------------------------------------------------

    def after_step(self, *, num_scheduled: int) -> None:
        """Slow down after a step in which no request ran, if one is held, until a resume.

        If a request wants to run and no copy is under way that would let it, blocks are missing.
        """
        self._is_stuck = False
        running = self._scheduler.running
        in_flight = any(request.num_in_flight_tokens for request in running)
        if num_scheduled == 0 and not in_flight and not self.transfers.is_busy:
            run = [self.record_of(request) for request in running]
            line = [self.record_of(request) for request in self._eligible()]
            wants = bool(line) or not all(record.is_held for record in run)
            in_the_way = any(one.skipped for one in run) or any(map(is_preparing, line))
            self._is_stuck = wants and in_the_way
            if any(record.is_held for record in self._records.values()):
                self._wake.wait(IDLE_WAIT_S)
        self._wake.clear()

    def check_integrity(self) -> None:
        """Assert that a request that is asleep does not run, and only running ones are skipped."""
        running = {request.request_id for request in self._scheduler.running}
        for request_id, record in self._records.items():
            assert not record.skipped or request_id in running, f"{request_id} does not run"
            kv = record.kv
            if kv is None:
                continue
            may_run = not (kv.waiting or record.skipped)
            assert not (kv.asleep and may_run), f"{request_id} is asleep and may run"
            assert kv.waiting == (request_id not in running), f"{request_id} is in the wrong queue"


def need_of(request: Request, record: RequestRecord[RequestKV]) -> Need[RequestKV]:
    """Return what vLLM makes room for: tokens that are sampled and not yet known count."""
    return Need(record, request.num_tokens + request.num_output_placeholders)
