"""What the scheduler does when copies go wrong on a rank.

A request whose KV is wrong somewhere loses the tokens of the steps concerned, its blocks and its
host copies, and is computed anew. All others run on.
"""

import time

import structlog
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.request import Request, RequestStatus

from services.executor.blocks.block_owner import BlockOwner
from services.executor.blocks.failures import Fate, may_mirror, note_loss
from services.executor.blocks.transfers.losses import Losses
from services.executor.scheduler.vllm_scheduler import VllmScheduler
from services.executor.step_messages import StepFeedback

log = structlog.get_logger()


class Recovery:
    """Lets requests whose KV is lost begin anew, on vLLM's scheduler."""

    def __init__(
        self,
        scheduler: VllmScheduler,
        owner: BlockOwner,
        losses: Losses,
    ) -> None:
        self.losses = losses
        self._scheduler = scheduler
        self._owner = owner

    def recover(self, feedback: StepFeedback) -> list[Request]:
        """Let requests whose KV is lost begin anew; return those that were ended instead.

        Before vLLM looks at the step's tokens: one preempted here loses them.
        """
        hopeless = []
        for request_id, cause in self.losses.absorb(feedback).items():
            request = self._scheduler.requests.get(request_id)
            if request is None or request.is_finished():
                continue
            verdict = note_loss(
                self._owner.records[request_id],
                self._owner.counters,
                cause,
                may_run_again=self._may_run_again(request),
            )
            log.warning("kv_lost", request_id=request_id, cause=cause.value, verdict=verdict.value)
            self._begin_anew(request)
            if verdict is Fate.GIVE_UP:
                hopeless.append(request_id)
        if not hopeless:
            return []
        return self._scheduler.finish_requests(hopeless, RequestStatus.FINISHED_ERROR)

    def _begin_anew(self, request: Request) -> None:
        """Drop a request's KV, and its tokens that are sampled or under way in steps sent."""
        share_nothing(request)
        scheduler = self._scheduler
        if request.status == RequestStatus.RUNNING:
            scheduler.running.remove(request)
            scheduler._preempt_request(request, time.monotonic(), drop_stale_output=True)
            # It may be resumed in the very next step: send its tokens whole, not what is new.
            scheduler.prev_step_scheduled_req_ids.discard(request.request_id)
            return
        # Preempted already: its last tokens may still be under way, its copies on the host.
        if request.num_stale_output_tokens:
            request.drop_stale_output = True
        record = self._owner.records[request.request_id]
        record.way = None
        if record.kv is not None:
            self._owner.forget(record.kv)

    def _may_run_again(self, request: Request) -> bool:
        """Return whether a request fits the pool in full, if it cannot have copies any more."""
        if may_mirror(self._owner.records[request.request_id]):
            return True
        num_tokens = min(
            request.num_prompt_tokens + request.max_tokens, self._scheduler.max_model_len
        )
        geometry = self._owner.geometry
        num_tokens += geometry.max_ahead_tokens
        num_blocks = geometry.num_groups * -(-num_tokens // geometry.block_size)
        return bool(num_blocks <= self._owner.pool.num_gpu_blocks - 1)


def share_nothing(request: Request) -> None:
    """Let a request find no cached prefix, and leave none, from now on."""
    request._block_hasher = None
    request.block_hashes.clear()


def error_output(request: Request) -> EngineCoreOutput:
    """Return what tells the front that a request was ended."""
    return EngineCoreOutput(
        request_id=request.request_id,
        new_token_ids=[],
        finish_reason=request.get_finished_reason(),
        events=request.take_events(),
        trace_headers=request.trace_headers,
    )
