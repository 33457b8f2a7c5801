"""Which requests run: pause, park, and coming back. Between vLLM's scheduler and their blocks."""

import itertools
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

from vllm.v1.request import Request

from services.control.capacity_guard import Need
from services.control.rates import Rates
from services.control.resumes import Resumes
from services.executor.blocks.residency import RequestKV
from services.executor.blocks.transfer_planner import TransferPlanner
from services.executor.scheduler.holds import IDLE_WAIT_S, NEVER, HoldKind, Holds
from services.executor.scheduler.vllm_scheduler import VllmScheduler
from services.placement.layer_placement import LayerPlacement
from services.placement.run.resume import (
    LinkAndStep,
    ResumeWay,
)


class RunControl:
    """Holds running requests back, parks them, and prepares parked ones to run again."""

    def __init__(
        self,
        scheduler: VllmScheduler,
        transfers: TransferPlanner,
        holds: Holds,
        resumes: Resumes[RequestKV],
        rates: Callable[[], Rates],
    ) -> None:
        """`rates`: of the moment."""
        self.holds = holds
        self.resumes = resumes
        self._scheduler = scheduler
        self.transfers, self._owner = transfers, transfers.owner
        self.guard = resumes.guard
        self._rates = rates
        self.line: Callable[[], Iterable[Request]] = lambda: scheduler.waiting  # who may come in
        self._stopped: set[str] = set()  # running requests that vLLM was told to skip
        self._is_stuck = False
        self._wake = threading.Event()

    # -- orders -----------------------------------------------------------------------------

    def place(self, request_id: str, placement: LayerPlacement) -> None:
        """Say where a request's layer groups belong, from the next step on."""
        if self.knows(request_id):
            self.guard.give(request_id, placement)

    def pause(self, request_id: str) -> None:
        """Keep a request from running; it keeps its place, others may take its blocks."""
        if self.knows(request_id):
            self.holds.pause(request_id)

    def park(self, request_id: str) -> None:
        """Send a request to the queue, with its KV on the host, as soon as its copies are there."""
        if self.knows(request_id):
            self.holds.park(request_id)

    def leave(self, request_id: str) -> None:
        """Send a request to the queue at once, with what of its KV is on the host already."""
        if self.knows(request_id):
            self.holds.leave(request_id)

    def resume(self, request_id: str) -> None:
        """End a pause or park: the request runs again as soon as there is room."""
        if self.knows(request_id):
            self.holds.release(request_id)
            self._wake.set()

    def knows(self, request_id: str) -> bool:
        """Whether an order is about somebody who is there; counts those that are not."""
        known = request_id in self._scheduler.requests
        self._owner.counters.num_unknown_ids += not known
        return known

    def forget(self, request_id: str) -> None:
        self.holds.release(request_id)
        self.resumes.forget(request_id)
        self._stopped.discard(request_id)

    # -- each step --------------------------------------------------------------------------

    def stop_and_start(self) -> None:
        """Tell vLLM which running requests to skip, and park those that are ready for it."""
        self.holds.release_overdue()
        if self._is_stuck and not self._preempt_idle():
            self._put_back_last()
        if not self.holds and not self._stopped:
            return
        for request in list(self._scheduler.running):
            if request.request_id in self.holds:
                self._stop(request)
            elif request.request_id in self._stopped:
                self._start(request)

    def _stop(self, request: Request) -> None:
        self._stopped.add(request.request_id)
        request.next_decode_eligible_step = NEVER
        kv = self._owner.requests.get(request.request_id)
        match self.holds.kind(request.request_id):
            case HoldKind.PARK:
                if kv is not None and kv.mirrored:
                    self._drain(kv)
                if request.num_in_flight_tokens == 0 and (kv is None or self._is_drained(kv)):
                    self._preempt(request)
            case HoldKind.LEAVE if request.num_in_flight_tokens == 0:
                self._preempt(request)
                self.holds.release(request.request_id)

    def _start(self, request: Request) -> None:
        kv = self._owner.requests.get(request.request_id)
        # Wait for its token in flight: the scheduler would read it from the previous step.
        if request.num_in_flight_tokens == 0 and (kv is None or self._owner.staging.take(kv)):
            self._stopped.discard(request.request_id)
            request.next_decode_eligible_step = 0
            self._owner.counters.num_resumes_in_place += 1

    def _drain(self, kv: RequestKV) -> None:
        """Have all full blocks leave the pool, each as soon as its copy is complete."""
        resident = [i for i, g in enumerate(kv.groups) if not g.offloaded or g.restore is not None]
        if resident or not kv.asleep:
            self._owner.staging.drop(kv)
            self._owner.offload(kv, resident)
            self.transfers.note_offloaded(kv)

    def _is_drained(self, kv: RequestKV) -> bool:
        """Whether waiting longer would not save another block."""
        num_full = kv.num_full_blocks
        if not kv.mirrored or kv.num_host_blocks >= num_full:
            return True
        if any(group.num_host_blocks < group.num_saves_sent for group in kv.groups):
            return False
        num_missing = sum(num_full - len(group.host_slots) for group in kv.groups)
        return not self._owner.host.can_take(kv.request_id, num_missing)

    def _preempt_idle(self) -> bool:
        """Preempt the youngest request that is stopped: nobody runs for want of what it holds.

        False if nobody is stopped.
        """
        stopped = [r for r in self._scheduler.running if r.request_id in self._stopped]
        if stopped and stopped[-1].num_in_flight_tokens == 0:
            self._preempt(stopped[-1])
        return bool(stopped)

    def _put_back_last(self) -> None:
        """Take back the blocks of the last request in line that has some: those ahead lack them."""
        preparing = [r for r in self._eligible() if self.resumes.is_preparing(r.request_id)]
        for request in reversed(preparing):
            if self.resumes.put_back(request.request_id):
                return

    def _preempt(self, request: Request) -> None:
        self._scheduler.running.remove(request)
        self._scheduler._preempt_request(request, time.monotonic())

    def admitted(self, request_ids: Sequence[str]) -> None:
        """Take in which requests run again after a preemption; they own blocks."""
        for request_id in request_ids:
            self._owner.requests[request_id].waiting = False
        self.resumes.admitted(request_ids)

    def preempted(self, request: Request) -> None:
        """A running request has gone back to the queue."""
        self._stopped.discard(request.request_id)
        request.next_decode_eligible_step = 0

    # -- the queue --------------------------------------------------------------------------

    def num_host_tokens(self, request: Request) -> int | None:
        """Return how many tokens a waiting request need not compute; None: pass over it now."""
        if request.request_id in self.holds:
            return None
        if request.request_id not in self._owner.requests and self.resumes.is_short_of_blocks:
            return None  # nobody overtakes a request that has yet to find room
        return self.resumes.num_host_tokens(request.request_id)

    def next_in_line(self) -> list[Request]:
        """Return the requests to make room for: those being prepared, and the first of the rest.

        Nobody while as many run as may run: what they would take is the running requests' own.
        """
        line: list[Request] = []
        if not self._num_places():
            return line
        for request in self._eligible():
            line.append(request)
            if not self.resumes.is_preparing(request.request_id):
                break
        return line

    def prepare_resumes(self, num_predicted_slots: Callable[[Request], int]) -> None:
        """Move parked requests at the head of the queue on towards running."""
        self.resumes.is_short_of_blocks = False
        if not self._scheduler.waiting:
            return
        ahead = self.active_needs()  # who is served before the request at hand
        for request in itertools.islice(self._eligible(), self._num_places()):
            self.resumes.prepare(
                request.request_id,
                partial(self._choose, request, tuple(ahead)),
                num_slots=num_predicted_slots(request),
                num_kept_free=self.guard.num_blocks_of_next_step(ahead),
            )
            if self.resumes.is_short_of_blocks or request.request_id not in self._owner.requests:
                break
            ahead.append(need_of(request))

    def _num_places(self) -> int:
        """Return how many more requests may run."""
        num_places: int = self._scheduler.max_num_running_reqs - len(self._scheduler.running)
        return max(0, num_places)

    def _eligible(self) -> Iterator[Request]:
        return (request for request in self.line() if request.request_id not in self.holds)

    def _choose(
        self, request: Request, ahead: Sequence[Need], kv: RequestKV
    ) -> tuple[ResumeWay, LayerPlacement]:
        return self.resumes.choose(
            kv,
            need_of(request),
            ahead,
            num_left=request.max_tokens - request.num_output_tokens,
            engine=self._link_and_step(len(ahead)),
        )

    def _link_and_step(self, num_running: int) -> LinkAndStep:
        rates, transfers = self._rates(), self.transfers
        return LinkAndStep(
            h2d_bytes_per_s=rates.h2d_bytes_per_s,
            prefill_tokens_per_s=rates.prefill_tokens_per_s,
            step_s=rates.step_s or 0.0,
            step_bytes=transfers.num_step_load_blocks() * self.resumes.block_bytes,
            queue_bytes=transfers.num_restoring_blocks() * self.resumes.block_bytes,
            num_running=num_running,
        )

    def active_needs(self) -> list[Need]:
        """Return what the running requests that are not held need, in scheduling order."""
        running, holds = self._scheduler.running, self.holds
        if not holds:
            return [need_of(request) for request in running]
        return [need_of(request) for request in running if request.request_id not in holds]

    # -- idle steps -------------------------------------------------------------------------

    def after_step(self, *, num_scheduled: int) -> None:
        """Slow down after a step in which nobody ran, if somebody is held, until a resume.

        If somebody wants to run and no copy is under way that would let it, blocks are missing.
        """
        self._is_stuck = False
        running = self._scheduler.running
        in_flight = any(request.num_in_flight_tokens for request in running)
        if num_scheduled == 0 and not in_flight and not self.transfers.is_busy:
            wants = any(request.request_id not in self.holds for request in running)
            wants = wants or any(True for _ in self._eligible())
            self._is_stuck = wants and (bool(self._stopped) or self._is_anybody_preparing())
            if self.holds:
                self._wake.wait(IDLE_WAIT_S)
        self._wake.clear()

    def _is_anybody_preparing(self) -> bool:
        return any(self.resumes.is_preparing(r.request_id) for r in self._eligible())

    def check_integrity(self) -> None:
        """Assert that who is asleep does not run, and that nothing is known of who is gone."""
        running = {request.request_id for request in self._scheduler.running}
        assert self._stopped <= running, "a request is stopped that does not run"
        gone = self.holds.known - self._scheduler.requests.keys()
        assert not gone, f"holds of requests that are gone: {sorted(gone)}"
        for request_id, kv in self._owner.requests.items():
            assert not kv.asleep or kv.waiting or request_id in self._stopped, (
                f"{request_id} is asleep and may run"
            )
            assert kv.waiting == (request_id not in running), f"{request_id} is in the wrong queue"


def need_of(request: Request) -> Need:
    """Return what vLLM makes room for: tokens that are sampled and not yet known count."""
    return Need(request.request_id, request.num_tokens + request.num_output_placeholders)
