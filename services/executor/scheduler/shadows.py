"""Shadow rows: the uncached prefixes of requests, computed anew in the same step.

A shadow is a row of the batch that vLLM's scheduler knows nothing of: the first tokens of a request
that the step computes a token of, over the scratch blocks that the request's own row shows. Every
layer writes the KV of all rows before any row's attention reads, so that the request finds its
prefix there. A row whose prompt is longer than what the step computes of it samples nothing.

Shadows live for a step: the next one tells the ranks that they have ended.
"""

from collections.abc import Mapping

from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput
from vllm.v1.request import Request

from services.executor.blocks.block_owner import BlockOwner
from services.executor.blocks.residency import RequestKV
from services.executor.scheduler.vllm_scheduler import VllmScheduler
from services.placement.types import RequestId

SUFFIX = "\0shadow"  # no request's id holds this character
NOT_COMPUTED = 0  # stands for the token behind what a shadow computes


class Shadows:
    """Decides how long uncached prefixes are, and adds to each step what computes them."""

    def __init__(self, scheduler: VllmScheduler, owner: BlockOwner) -> None:
        self.num_rows = 0  # added, since the start
        self._scheduler, self._owner = scheduler, owner
        self._uncached, self._block_size = owner.uncached, owner.geometry.block_size
        self._most = scheduler.max_num_scheduled_tokens  # of a step
        self._last: dict[str, RequestKV] = {}  # rows of the step before, and whose they were

    def uncache(self, wanted: Mapping[RequestId, int]) -> None:
        """Follow the wanted lengths, in blocks; leave the step what room their tokens do not take.

        Every request that runs keeps room for a token, so that all go on whatever is wanted.
        """
        for kv in self._last.values():
            if kv.retiring and kv in self._uncached.kvs:
                self._uncached.settle(kv)
        num_left = (self._most - self._scheduler.max_num_active_reqs) // self._block_size
        num_left -= sum(kv.num_recomputed for kv in self._uncached.kvs)
        if wanted or self._uncached.kvs:
            for request in self._scheduler.running:
                num_left -= self._follow(
                    request, wanted.get(RequestId(request.request_id), 0), num_left
                )
        num_tokens = sum(self._num_tokens(kv) for kv in self._uncached.kvs)
        self._scheduler.max_num_scheduled_tokens = self._most - num_tokens

    def _follow(self, request: Request, num_wanted: int, num_left: int) -> int:
        """Return how many blocks more of a request a step computes anew."""
        record = self._owner.records[request.request_id]
        kv = record.kv
        if kv is None or record.is_held or record.state.is_skipped or not _may_drop(request):
            return 0
        before = kv.num_recomputed
        num_most = len(kv.uncached) + max(0, num_left)
        num_known = int(request.num_tokens)
        self._uncached.set_length(kv, min(num_wanted, num_most), num_known=num_known)
        return kv.num_recomputed - before

    def _num_tokens(self, kv: RequestKV) -> int:
        return kv.num_recomputed * self._block_size

    def add_to(self, output: SchedulerOutput) -> list[int]:
        """Add a row for each request of a step that has something uncached; return their tokens.

        Call it last: earlier readers of the step must not see shadow rows.
        """
        output.finished_req_ids.update(self._last)
        self._last = {}
        chunks = []
        for kv in self._uncached.kvs:
            if kv.request_id in output.num_scheduled_tokens:
                shadow_id, num_tokens = kv.request_id + SUFFIX, self._num_tokens(kv)
                output.scheduled_new_reqs.append(self._row(shadow_id, kv))
                output.num_scheduled_tokens[shadow_id] = num_tokens
                self._last[shadow_id] = kv
                chunks.append(num_tokens)
        self.num_rows += len(chunks)
        output.total_num_scheduled_tokens += sum(chunks)
        return chunks

    def _row(self, shadow_id: str, kv: RequestKV) -> NewRequestData:
        request = self._scheduler.requests[kv.request_id]
        tokens = [*request.all_token_ids[: self._num_tokens(kv)], NOT_COMPUTED]
        rows = (kv.recomputed_row(index) for index in range(len(kv.groups)))
        return NewRequestData(
            req_id=shadow_id,
            prompt_token_ids=tokens,
            prefill_token_ids=tokens,
            mm_features=[],
            sampling_params=SamplingParams(temperature=0.0, max_tokens=1),
            pooling_params=None,
            block_ids=tuple([block.block_id for block in row] for row in rows),
            num_computed_tokens=0,
            lora_request=request.lora_request,
        )


def _may_drop(request: Request) -> bool:
    """Return whether a request decodes, and its tokens say all that its KV is computed from."""
    decodes = request.num_output_tokens and request.num_tokens - request.num_computed_tokens <= 1
    return bool(decodes and not request.mm_features and request.prompt_embeds is None)
