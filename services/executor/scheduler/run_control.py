"""Which requests run: held, sent away, and coming back; told to vLLM's scheduler.

vLLM admits every request in its queue that has room. While it schedules, the queue holds the line
alone; the other requests are back in it when the step is made.
"""

import math
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

from vllm.v1.request import Request

from services.control.line import Line
from services.control.requests.life import Hold, State
from services.control.requests.request_record import RequestRecord
from services.executor.blocks.residency import RequestKV
from services.executor.blocks.transfers.transfers import Transfers
from services.executor.scheduler.vllm_scheduler import IDLE_WAIT_S, NEVER, VllmScheduler


class RunControl:
    """Has vLLM pass over running requests that are held, preempt some, and admit the line only."""

    def __init__(
        self,
        scheduler: VllmScheduler,
        line: Line[Request, RequestKV],
        transfers: Transfers,
        *,
        max_hold_s: float,
    ) -> None:
        """`max_hold_s`: for which a request is held for its reader."""
        self.resumes = line.resumes
        self._scheduler, self._line = scheduler, line
        self._transfers, self._owner = transfers, transfers.owner
        self._records = transfers.owner.records
        self._max_hold_s = max_hold_s
        self._is_stuck = False

    # -- each step --------------------------------------------------------------------------

    def stop_and_start(self) -> None:
        """Tell vLLM which running requests to skip, and send those to the queue that leave."""
        self._release_overdue()
        if self._is_stuck and not self._preempt_idle():
            self._line.put_back_last(self._line.eligible())
        for request in list(self._scheduler.running):
            record = self._line.record_of(request)
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
        if request.num_in_flight_tokens == 0 and (kv is None or self._owner.trunks.wake(kv)):
            record.enter(State.RUNNING)
            request.next_decode_eligible_step = 0
            self._owner.counters.num_resumes_in_place += 1

    def _preempt_idle(self) -> bool:
        """Preempt the youngest request that is skipped: the others lack what it holds.

        False if none is skipped.
        """
        skipped = [r for r in self._scheduler.running if self._line.record_of(r).state.is_skipped]
        if skipped and skipped[-1].num_in_flight_tokens == 0:
            self._preempt(skipped[-1])
        return bool(skipped)

    def _preempt(self, request: Request) -> None:
        self._scheduler.running.remove(request)
        self._scheduler._preempt_request(request, time.monotonic())

    @contextmanager
    def admitting(self) -> Iterator[None]:
        """Let vLLM see the line alone, and no more of prompts than the decision's chunk."""
        decision, scheduler = self._line.decision, self._scheduler
        if decision is None:
            yield
            return
        line = list(self._line.requests())
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
            num_decodes = sum(not _is_prompt(request) for request in scheduler.running)
            budget = num_decodes + decision.chunk_tokens
            scheduler.max_num_scheduled_tokens = min(own_budget, budget)
        try:
            yield
        finally:
            scheduler.max_num_scheduled_tokens = own_budget
            for request in others:
                queue.add_request(request)

    def admitted(self, requests: Iterable[Request], num_scheduled: Mapping[str, int]) -> None:
        """Take in which requests run that did not; they own blocks.

        `num_scheduled`: tokens of the step by request.
        """
        for request in requests:
            record = self._line.record_of(request)
            assert record.kv is not None
            is_new = not request.num_preemptions
            if record.state is State.READY and is_new:
                num_hit = request.num_computed_tokens - num_scheduled[request.request_id]
                self._owner.counters.num_prefix_hit_tokens += num_hit
            self.resumes.admitted(record, is_new=is_new)

    # -- idle steps -------------------------------------------------------------------------

    def after_step(self, *, num_scheduled: int) -> None:
        """Slow down after a step in which no request ran, if one is held.

        If a request wants to run and no copy is under way that would let it, blocks are missing.
        """
        self._is_stuck = False
        running = self._scheduler.running
        in_flight = any(request.num_in_flight_tokens for request in running)
        if num_scheduled == 0 and not in_flight and not self._transfers.is_busy:
            run = [self._line.record_of(request) for request in running]
            line = [self._line.record_of(request) for request in self._line.eligible()]
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


def _is_prompt(request: Request) -> bool:
    """Whether more than its newest token is left to compute."""
    return bool(request.num_tokens - request.num_computed_tokens > 1)
