"""Which requests run: held, sent away, and admitted; told to vLLM's scheduler.

vLLM admits every request in its queue that has room. While it schedules, the queue holds those
alone that the run policy names; the other requests are back in it when the step is made.
"""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager

from vllm.v1.request import Request

from services.control.counters import Counters
from services.control.order.run_order import RunOrder
from services.control.requests.life import Hold, State
from services.control.requests.request_record import RequestRecord
from services.executor.blocks.residency import RequestKV
from services.executor.scheduler.vllm_scheduler import IDLE_WAIT_S, NEVER, VllmScheduler


class RunControl:
    """Has vLLM pass over running requests that are held, preempt some, and admit some only."""

    def __init__(
        self,
        scheduler: VllmScheduler,
        order: RunOrder[Request, RequestKV],
        counters: Counters,
        *,
        max_hold_s: float = math.inf,
    ) -> None:
        """`max_hold_s`: for which a request is held for its reader."""
        self._scheduler, self._order, self._counters = scheduler, order, counters
        self._records = order.engine.records
        self._max_hold_s = max_hold_s

    # -- each step --------------------------------------------------------------------------

    def stop_and_start(self) -> None:
        """Tell vLLM which running requests to skip, and send those to the queue that leave."""
        self._release_overdue()
        for request in list(self._scheduler.running):
            record = self._order.record_of(request)
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
                self._counters.num_overdue_holds += 1

    def _stop(self, request: Request, record: RequestRecord[RequestKV]) -> None:
        request.next_decode_eligible_step = NEVER
        if record.state is State.RUNNING:
            record.enter(State.PAUSED)
            self._counters.num_pauses += 1
        elif (
            record.state is State.LEAVING
            and request.num_in_flight_tokens == 0
            and self._may_leave(request, record)
        ):
            self.preempt(request)

    def _start(self, request: Request, record: RequestRecord[RequestKV]) -> None:
        # Wait for its token in flight: the scheduler would read it from the previous step.
        if request.num_in_flight_tokens == 0 and self._wakes(record):
            record.enter(State.RUNNING)
            request.next_decode_eligible_step = 0
            self._counters.num_resumes_in_place += 1

    def _may_leave(self, _request: Request, _record: RequestRecord[RequestKV]) -> bool:
        """Have what a request takes with it on the host, and return whether it is there."""
        return True

    def _wakes(self, _record: RequestRecord[RequestKV]) -> bool:
        """Have a request's KV ready for a step, and return whether it is."""
        return True

    def preempt(self, request: Request) -> None:
        """Send a running request to the queue, now: no token of it is in flight."""
        self._scheduler.running.remove(request)
        self._scheduler._preempt_request(request, time.monotonic())

    @contextmanager
    def admitting(self) -> Iterator[None]:
        """Let vLLM see those alone that may be admitted, and no more of prompts than the decision's
        chunk.
        """
        decision, scheduler = self._order.decision, self._scheduler
        if decision is None:
            yield
            return
        line = list(self._order.requests())
        named = {request.request_id for request in line}
        queue, all_waiting = scheduler.waiting, list(scheduler.waiting)
        own_budget = scheduler.max_num_scheduled_tokens
        others = [one for one in all_waiting if one.request_id not in named]
        queue.remove_requests(all_waiting)
        for request in line:
            queue.add_request(request)
        config = scheduler.vllm_config.scheduler_config
        # Where prompts are computed whole, a long one would never fit into a piece's budget.
        if decision.chunk_tokens is not None and config.enable_chunked_prefill:
            # Decodes come first: a prompt before them would take their part of the budget.
            scheduler.running.sort(key=_is_prompt)
            decodes = [request for request in scheduler.running if not _is_prompt(request)]
            budget = sum(map(_num_to_schedule, decodes)) + decision.chunk_tokens
            scheduler.max_num_scheduled_tokens = min(own_budget, budget)
        try:
            yield
        finally:
            scheduler.max_num_scheduled_tokens = own_budget
            for request in others:
                queue.add_request(request)

    def after_step(self, *, num_scheduled: int) -> None:
        """Slow down after a step in which no request ran, if one is held."""
        if not num_scheduled and any(record.is_held for record in self._records.values()):
            time.sleep(IDLE_WAIT_S)

    def check_integrity(self) -> None:
        """Assert that states are true: of the queue that a request is in."""
        running = {request.request_id for request in self._scheduler.running}
        for request_id, record in self._records.items():
            queued = record.state.is_queued
            assert queued == (request_id not in running), f"{request_id}: {record.state}"


def _num_to_schedule(request: Request) -> int:
    """Return how many tokens a decode takes of a step: its newest one, and drafts."""
    num_tokens: int = request.num_tokens_with_spec + request.num_output_placeholders
    return max(1, num_tokens - int(request.num_computed_tokens))


def _is_prompt(request: Request) -> bool:
    """Whether more than its newest token is left to compute."""
    return bool(request.num_tokens - request.num_computed_tokens > 1)
