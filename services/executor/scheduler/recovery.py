"""What the scheduler does when copies go wrong on a rank.

Ranks report by request; whatever one rank reports holds for all of them, because all of them act
on the scheduler's next message only. A request whose KV is wrong somewhere loses the tokens of the
steps concerned, its blocks and its host copies, and is computed anew. Everybody else runs on.
"""

import time
from collections import Counter

import structlog
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from services.executor.blocks.block_owner import BlockOwner
from services.executor.blocks.failures import FailureLedger, Verdict
from services.executor.blocks.residency import RequestKV
from services.executor.blocks.transfer_planner import TransferPlanner
from services.executor.scheduler.run_control import RunControl
from services.executor.step_messages import StepFeedback
from services.executor.transfer_types import FailureCause

log = structlog.get_logger()

STEPS_BEFORE_RETRY = 16  # of a restore that failed; twice as many after each further failure


class Recovery:
    """Turns reports of failed copies into requests that must begin anew, and keeps the rest."""

    def __init__(self, owner: BlockOwner, transfers: TransferPlanner) -> None:
        self.ledger = FailureLedger(owner.counters)
        self._owner = owner
        self._transfers = transfers

    def absorb(self, feedback: StepFeedback) -> dict[str, FailureCause]:
        """Take in a step's failures, before its saves are confirmed and its tokens are looked at.

        Returns the requests whose tokens from this step on are worthless. Those among them that
        have KV must be freed before the next step is scheduled.
        """
        lost = {
            request_id: cause
            for request_id, cause in feedback.lost_requests.items()
            if not self._has_begun_anew(request_id, feedback.step)
        }
        for restore_id, cause in feedback.failed_restores.items():
            lost |= self._end_restore(restore_id, cause)
        lost |= self._retract_saves(feedback)
        new_blocks, new_slots = self._owner.quarantine.update(
            feedback.hung_blocks, feedback.hung_slots
        )
        if new_blocks or new_slots:
            for request in self._owner.requests.values():
                if request.request_id not in lost and uses(request, new_blocks, new_slots):
                    lost[request.request_id] = FailureCause.HUNG
        return lost

    def _has_begun_anew(self, request_id: str, step: int) -> bool:
        """Return whether a request runs, and did not yet use its present blocks in a step."""
        request = self._owner.requests.get(request_id)
        return request is not None and not request.waiting and request.first_step > step

    def _end_restore(self, restore_id: int, cause: FailureCause) -> dict[str, FailureCause]:
        self.ledger.note_failed_restore()
        for request in self._owner.requests.values():
            for index, group in enumerate(request.groups):
                if group.restore is None or restore_id not in group.restore.under_way:
                    continue
                self._owner.restores.cancel(request, index)
                group.restore_from_step = self._owner.orders.next_step + (
                    STEPS_BEFORE_RETRY << min(group.num_failed_restores, 8)
                )
                group.num_failed_restores += 1
                # Bytes that came back wrong may be wrong on the host, and there is no other copy.
                is_lost = cause is FailureCause.CORRUPT
                return {request.request_id: cause} if is_lost else {}
        return {}

    def _retract_saves(self, feedback: StepFeedback) -> dict[str, FailureCause]:
        lost: dict[str, FailureCause] = {}
        num_retracted: Counter[str] = Counter()
        for (step, request_id, group), cause in feedback.failed_saves.items():
            match self._transfers.write_through.retract(step, request_id, group):
                case None:
                    lost[request_id] = cause
                case True:
                    num_retracted[request_id] += 1
        for request_id, num_saves in num_retracted.items():
            if self.ledger.note_failed_saves(request_id, num_saves) and request_id not in lost:
                request = self._owner.requests[request_id]
                log.warning("kv_request_unmirrored", request_id=request_id)
                if request.chain():  # part of it is on the host only
                    lost[request_id] = FailureCause.FAILED
                else:
                    self._transfers.write_through.unmirror(request)
        return lost


def uses(request: RequestKV, block_ids: frozenset[int], slots: frozenset[int]) -> bool:
    """Return whether any of a request's KV is, or will be, in one of these."""
    return any(not slots.isdisjoint(group.host_slots) for group in request.groups) or any(
        block.block_id in block_ids for block in request.owned_blocks()
    )


class RecoverySchedulerMixin:
    """Over one of vLLM's schedulers with layer-wise KV."""

    recovery: Recovery
    control: RunControl
    block_owner: BlockOwner

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        transferred = model_runner_output.kv_connector_output
        feedback = transferred and transferred.kv_connector_worker_meta
        # Before vLLM looks at the step's tokens: what is preempted here loses them.
        given_up = self._recover(feedback) if isinstance(feedback, StepFeedback) else []
        outputs: dict[int, EngineCoreOutputs] = super().update_from_output(  # type: ignore[misc]
            scheduler_output, model_runner_output
        )
        for request in given_up:
            outputs.setdefault(request.client_index, EngineCoreOutputs()).outputs.append(
                EngineCoreOutput(
                    request_id=request.request_id,
                    new_token_ids=[],
                    finish_reason=request.get_finished_reason(),
                    events=request.take_events(),
                    trace_headers=request.trace_headers,
                )
            )
        return outputs

    def _recover(self, feedback: StepFeedback) -> list[Request]:
        """Let requests whose KV is lost begin anew; return those that were ended instead."""
        requests: dict[str, Request] = self.requests  # type: ignore[attr-defined]
        hopeless = []
        for request_id, cause in self.recovery.absorb(feedback).items():
            request = requests.get(request_id)
            if request is None or request.is_finished():
                continue
            verdict = self.recovery.ledger.note_loss(
                request_id, cause, may_run_again=self._may_run_again(request)
            )
            log.warning("kv_lost", request_id=request_id, cause=cause.value, verdict=verdict.value)
            self._begin_anew(request)
            if verdict is Verdict.GIVE_UP:
                hopeless.append(request_id)
        if not hopeless:
            return []
        ended: list[Request] = self.finish_requests(  # type: ignore[attr-defined]
            hopeless, RequestStatus.FINISHED_ERROR
        )
        return ended

    def _begin_anew(self, request: Request) -> None:
        """Drop a request's KV, and its tokens that are sampled or under way in steps sent."""
        if request.status == RequestStatus.RUNNING:
            self.running.remove(request)  # type: ignore[attr-defined]
            self._preempt_request(  # type: ignore[attr-defined]
                request, time.monotonic(), drop_stale_output=True
            )
            # It may be resumed in the very next step: send its tokens whole, not what is new.
            self.prev_step_scheduled_req_ids.discard(request.request_id)  # type: ignore[attr-defined]
            return
        # Preempted already: its last tokens may still be under way, its copies on the host.
        if request.num_stale_output_tokens:
            request.drop_stale_output = True
        self.control.resumes.forget(request.request_id)
        self.block_owner.forget(request.request_id)

    def _may_run_again(self, request: Request) -> bool:
        """Return whether a request fits the pool in full, if it cannot have copies any more."""
        if self.recovery.ledger.may_mirror(request.request_id):
            return True
        num_tokens = min(
            request.num_prompt_tokens + request.max_tokens,
            self.max_model_len,  # type: ignore[attr-defined]
        )
        geometry = self.block_owner.geometry
        num_blocks = geometry.num_groups * -(-num_tokens // geometry.block_size)
        return bool(num_blocks <= self.block_owner.pool.num_gpu_blocks - 1)
