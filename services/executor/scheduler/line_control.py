"""`RunControl` where requests come back from the host: the line is prepared before it runs."""

import time
from collections.abc import Iterable, Mapping

from vllm.v1.request import Request

from services.control.order.line import Line
from services.control.requests.life import State
from services.control.requests.request_record import RequestRecord
from services.executor.blocks.residency import RequestKV
from services.executor.blocks.transfers.transfers import Transfers
from services.executor.scheduler.retaining import tool_turn
from services.executor.scheduler.run_control import RunControl
from services.executor.scheduler.vllm_scheduler import COPY_WAIT_S, NEVER, VllmScheduler


class LineControl(RunControl):
    """Takes blocks back where requests that do not run have what others lack."""

    def __init__(
        self,
        scheduler: VllmScheduler,
        line: Line[Request, RequestKV],
        transfers: Transfers,
        *,
        max_hold_s: float,
    ) -> None:
        """`max_hold_s`: for which a request is held for its reader."""
        super().__init__(scheduler, line, transfers.owner.counters, max_hold_s=max_hold_s)
        self.resumes = line.resumes
        self._line, self._transfers = line, transfers
        self._is_stuck = self._is_idle = False

    def stop_and_start(self) -> None:
        if self._is_stuck and not self._preempt_idle():
            self._line.put_back_last(self._line.eligible())
        super().stop_and_start()
        if self._transfers.owner.side_copies.are_needed:
            self._stand_at_prompts_ends()

    def _stand_at_prompts_ends(self) -> None:
        """Have requests that may call tools stand still while their prompts' anchors are copied."""
        for request in self._scheduler.running:
            record = self._line.record_of(request)
            kv = record.kv
            at_end = request.num_computed_tokens == request.num_prompt_tokens
            if not at_end or kv is None or tool_turn(request) is None:
                continue
            is_drained = request.num_in_flight_tokens == 0
            prompt = request.prompt_token_ids or ()
            if self._transfers.prompt_ends.stands(kv, prompt, is_drained=is_drained):
                request.next_decode_eligible_step = NEVER
            elif request.next_decode_eligible_step == NEVER and record.state is State.RUNNING:
                request.next_decode_eligible_step = 0

    def _may_leave(self, request: Request, record: RequestRecord[RequestKV]) -> bool:
        if record.kv is None or request.skip_reading_prefix_cache:  # it takes nothing
            return True
        return self._transfers.may_leave(record.kv)

    def _wakes(self, record: RequestRecord[RequestKV]) -> bool:
        return record.kv is None or self._transfers.owner.trunks.wake(record.kv)

    def _preempt_idle(self) -> bool:
        """Preempt the youngest request that is skipped: the others lack what it holds.

        False if none is skipped.
        """
        skipped = [r for r in self._scheduler.running if self._line.record_of(r).state.is_skipped]
        if skipped and skipped[-1].num_in_flight_tokens == 0:
            last = skipped[-1]
            if self._may_leave(last, self._line.record_of(last)):
                self.preempt(last)
        return bool(skipped)

    def admitted(self, requests: Iterable[Request], num_scheduled: Mapping[str, int]) -> None:
        """Take in which requests run that did not; they own blocks.

        `num_scheduled`: tokens of the step by request.
        """
        for request in requests:
            record = self._line.record_of(request)
            assert record.kv is not None
            is_new = not record.has_run  # one that was begun elsewhere counts as preempted to vLLM
            if record.state is State.READY and is_new:
                num_hit = request.num_computed_tokens - num_scheduled[request.request_id]
                self._counters.num_prefix_hit_tokens += num_hit
            self.resumes.admitted(record, is_new=is_new)

    def after_step(self, *, num_scheduled: int) -> None:
        """Find out whether blocks are missing: a request wants to run and no copy would let it.

        After a step in which none runs copies have the processor: on a CPU they are threads.
        """
        self._is_stuck = False
        running = self._scheduler.running
        in_flight = any(request.num_in_flight_tokens for request in running)
        was_idle, self._is_idle = self._is_idle, not (num_scheduled or in_flight)
        if not self._is_idle:
            return
        if self._transfers.is_busy:
            if was_idle:  # else this step may have orders
                time.sleep(COPY_WAIT_S)
            return
        run = [self._line.record_of(request) for request in running]
        line = [self._line.record_of(request) for request in self._line.eligible()]
        wants = bool(line) or not all(record.is_held for record in run)
        in_the_way = any(one.state.is_skipped for one in run) or any(
            one.is_prepared for one in line
        )
        self._is_stuck = wants and in_the_way
        super().after_step(num_scheduled=num_scheduled)

    def check_integrity(self) -> None:
        """Assert that states are true: of the queue that a request is in, and of its KV."""
        super().check_integrity()
        for request_id, record in self._records.items():
            state, kv = record.state, record.kv
            assert kv is not None or not record.is_prepared, f"{request_id} has no KV: {state}"
            if kv is not None:
                may_be_asleep = state.is_skipped or state in (State.WAITING, State.LOADING)
                assert may_be_asleep or not kv.asleep, f"{request_id} is asleep: {state}"
