"""Describes each step as it leaves vLLM's scheduler, at a cost that does not grow with contexts."""

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from services.control.requests.request_record import RequestRecord, Stage
from services.control.types import ScheduledStep, Trigger
from services.executor.blocks.residency import RequestKV
from services.executor.step_messages import StepFeedback, StepTransfers
from services.placement.step_time.batch import SEALING_STEPS

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request


class StepWatch:
    """Remembers what the step before was like, and restores under way."""

    def __init__(self, records: Mapping[str, RequestRecord[RequestKV]]) -> None:
        """`records`: of all live requests."""
        self._records = records
        self._last_ids: list[str] = []
        self._restores: set[int] = set()

    def scheduled(self, output: "SchedulerOutput", scheduled_s: float) -> ScheduledStep:
        """Take in a step; requests it admits are prefilling from now on."""
        cached, new = output.scheduled_cached_reqs, output.scheduled_new_reqs
        for request_id in (*(request.req_id for request in new), *cached.resumed_req_ids):
            self._records[request_id].stage = Stage.PREFILL
        same_batch = not new and not self._moves(output) and cached.req_ids == self._last_ids
        self._last_ids = [*cached.req_ids, *(request.req_id for request in new)]
        num_computed = sum(cached.num_computed_tokens) + sum(r.num_computed_tokens for r in new)
        prefilling = {
            name: num_tokens
            for name, num_tokens in output.num_scheduled_tokens.items()
            if self._records[name].stage is Stage.PREFILL
        }
        transfers = output.kv_connector_metadata
        return ScheduledStep(
            request_ids=tuple(output.num_scheduled_tokens),
            number=transfers.step if isinstance(transfers, StepTransfers) else 0,
            scheduled_s=scheduled_s,
            num_tokens=output.total_num_scheduled_tokens,
            num_context_tokens=num_computed + output.total_num_scheduled_tokens,
            num_prefill_tokens=sum(prefilling.values()),
            num_prefill_pairs=_num_pairs(output, prefilling) if prefilling else 0,
            same_batch=same_batch,
            undisturbed=not self._restores,
        )

    def _moves(self, output: "SchedulerOutput") -> bool:
        """Return whether the step changes where some request's layers are."""
        transfers = output.kv_connector_metadata
        if not isinstance(transfers, StepTransfers):
            return False
        self._restores.update(order.restore_id for order in transfers.restores)
        self._restores.difference_update(transfers.cancelled_restores)
        return bool(
            transfers.dropped_tables
            or transfers.num_staging
            or any(update.replace for update in transfers.table_updates)
        )

    def progress(
        self, output: "SchedulerOutput", running: "Iterable[Request]"
    ) -> Iterator[Trigger]:
        """Yield which requests came in, begin to decode, and have a complete copy, each once."""
        for _ in (*output.scheduled_new_reqs, *output.scheduled_cached_reqs.resumed_req_ids):
            yield Trigger.ADMITTED
        for request in running:
            record = self._records[request.request_id]
            if record.stage is Stage.PREFILL and request.num_computed_tokens >= request.num_tokens:
                record.stage = Stage.DECODES
                yield Trigger.PREFILLED
            if record.stage is Stage.DECODES and _has_caught_up(record.kv):
                record.stage = Stage.MIRRORED
                if record.kv is not None and record.kv.mirrored:
                    yield Trigger.MIRRORED

    def ended(self, feedback: StepFeedback) -> None:
        """Take in which restores are complete, or have failed, on some rank."""
        self._restores.difference_update(feedback.num_ranks_done)
        self._restores.difference_update(feedback.failed_restores)


def _num_pairs(output: "SchedulerOutput", chunks: Mapping[str, int]) -> int:
    """Return how many tokens those of the chunks attend to, all together."""
    cached, new = output.scheduled_cached_reqs, output.scheduled_new_reqs
    computed = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    computed |= {request.req_id: request.num_computed_tokens for request in new}
    return sum(chunk * computed[name] + chunk * (chunk + 1) // 2 for name, chunk in chunks.items())


def _has_caught_up(kv: RequestKV | None) -> bool:
    """Return whether the host copy, if there is one, lacks the newest blocks at most."""
    if kv is None or not kv.mirrored:
        return True
    return kv.num_host_blocks >= kv.num_full_blocks - SEALING_STEPS
