"""Prompts that are computed in chunks: how much of one a step computes and reads again.

A step has room for `max_num_batched_tokens`. Running requests take one token each; what is left
goes to prompts in scheduling order, at most `max_prefill_chunk_tokens` to each. A prompt that gets
nothing is not part of the step. Each chunk attends to all earlier ones, so it copies back the
blocks of its offloaded layers that earlier chunks filled.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from services.placement.types import (
    EngineShape,
    Holder,
    PrefixId,
    PrefixState,
    RequestPhase,
    RequestState,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """What one request computes in the steps to come; or a prefix, which computes nothing."""

    num_tokens: int  # whose KV the first step reads, of its own
    num_left: int = 0  # tokens of its prompt that are not computed yet
    chunk: int = 0  # prompt tokens per step
    num_shared: int = 0  # tokens of its prefixes
    tokens_per_step: float = 1.0  # once it decodes
    is_prefix: bool = False

    @property
    def num_chunk_steps(self) -> int:
        """Steps until the prompt is complete; 0 for a prompt that waits for its turn, too."""
        return math.ceil(self.num_left / self.chunk) if self.chunk else 0

    @property
    def waits(self) -> bool:
        """Whether it is no part of any step: a prompt without a turn."""
        return self.num_left > 0 and self.chunk == 0

    def chunk_at(self, step: int) -> int:
        """Return the prompt tokens of step `step`, counted from 0; a last one counts in full."""
        return self.chunk if step < self.num_chunk_steps else 0

    def decodes_at(self, step: int) -> bool:
        return not self.is_prefix and not self.waits and step >= self.num_chunk_steps

    def context_at(self, step: int) -> int:
        """Return the tokens that the step attends to for it: its own, and its prefixes'."""
        return 0 if self.waits else self.tokens_read_at(step) + self.num_shared

    def tokens_read_at(self, step: int) -> int:
        """Return the tokens of its own whose KV the step reads and does not compute."""
        if self.is_prefix:
            return self.num_tokens
        if self.waits:
            return 0
        if step < self.num_chunk_steps:
            return self.num_tokens + step * self.chunk
        num_decoded = math.ceil((step - self.num_chunk_steps) * self.tokens_per_step)
        return self.num_tokens + self.num_left + num_decoded


def progress_of(batch: Sequence[Holder], engine: EngineShape) -> list[Progress]:
    """Return what each request of a batch computes, in its order, and what is read of prefixes.

    A prefix that no request of a step begins with is not read.
    """
    lengths = {one.prefix_id: one.num_tokens for one in batch if isinstance(one, PrefixState)}
    requests = [one for one in batch if isinstance(one, RequestState)]
    found = _requests_progress(requests, lengths, engine)
    if not lengths:
        return found
    progress = dict(zip((one.request_id for one in requests), found, strict=True))
    read = {
        prefix
        for request, one in zip(requests, found, strict=True)
        if not one.waits
        for prefix in request.prefix_ids
    }
    return [
        progress[one.request_id]
        if isinstance(one, RequestState)
        else Progress(num_tokens=one.num_tokens if one.prefix_id in read else 0, is_prefix=True)
        for one in batch
    ]


def _requests_progress(
    requests: Sequence[RequestState], lengths: Mapping[PrefixId, int], engine: EngineShape
) -> list[Progress]:
    prefills = [num_left_of(request) > 0 for request in requests]
    room = engine.max_num_batched_tokens - (len(requests) - sum(prefills))
    found = []
    for request, prefill in zip(requests, prefills, strict=True):
        num_shared = sum(lengths.get(prefix, 0) for prefix in request.prefix_ids)
        if not prefill:
            found.append(
                Progress(
                    num_tokens=request.num_tokens,
                    num_shared=num_shared,
                    tokens_per_step=request.tokens_per_step,
                )
            )
            continue
        chunk = max(0, min(room, largest_chunk(request, engine)))
        room -= chunk
        found.append(
            Progress(
                num_tokens=request.num_computed_tokens,
                num_left=num_left_of(request),
                chunk=chunk,
                num_shared=num_shared,
                tokens_per_step=request.tokens_per_step,
            )
        )
    return found


def num_left_of(holder: Holder) -> int:
    """Return the tokens of a prompt under computation that are not computed yet."""
    if isinstance(holder, PrefixState) or holder.phase is not RequestPhase.PREFILL:
        return 0
    return max(0, holder.num_prompt_tokens - holder.num_computed_tokens)


def largest_chunk(holder: Holder, engine: EngineShape) -> int:
    """Return the most prompt tokens that a step may compute of a request."""
    limit = engine.max_prefill_chunk_tokens or engine.max_num_batched_tokens
    return min(num_left_of(holder), limit, engine.max_num_batched_tokens)
