"""Prompts that are computed in chunks: how much of one a step computes and reads again.

A step has room for `max_num_batched_tokens`. Running requests take one token each; what is left
goes to prompts in scheduling order, at most `max_prefill_chunk_tokens` to each. A prompt that gets
nothing is not part of the step. Each chunk attends to all earlier ones, so it copies back the
blocks of its offloaded layers that earlier chunks filled.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from services.placement.types import EngineShape, RequestPhase, RequestState


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """What one request computes in the steps to come."""

    num_tokens: int  # whose KV the first step reads
    num_left: int = 0  # tokens of its prompt that are not computed yet
    chunk: int = 0  # prompt tokens per step

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
        return not self.waits and step >= self.num_chunk_steps

    def tokens_read_at(self, step: int) -> int:
        """Return the tokens whose KV the step reads and does not compute."""
        if self.waits:
            return 0
        if step < self.num_chunk_steps:
            return self.num_tokens + step * self.chunk
        return self.num_tokens + self.num_left + step - self.num_chunk_steps


def progress_of(batch: Sequence[RequestState], engine: EngineShape) -> list[Progress]:
    """Return what each request of a batch computes, in its order."""
    prefills = [num_left_of(request) > 0 for request in batch]
    room = engine.max_num_batched_tokens - (len(batch) - sum(prefills))
    found = []
    for request, prefill in zip(batch, prefills, strict=True):
        if not prefill:
            found.append(Progress(num_tokens=request.num_tokens))
            continue
        chunk = max(0, min(room, largest_chunk(request, engine)))
        room -= chunk
        found.append(
            Progress(
                num_tokens=request.num_computed_tokens,
                num_left=num_left_of(request),
                chunk=chunk,
            )
        )
    return found


def num_left_of(request: RequestState) -> int:
    """Return the tokens of a prompt under computation that are not computed yet."""
    if request.phase is not RequestPhase.PREFILL:
        return 0
    return max(0, request.num_prompt_tokens - request.num_computed_tokens)


def largest_chunk(request: RequestState, engine: EngineShape) -> int:
    """Return the most prompt tokens that a step may compute of a request."""
    limit = engine.max_prefill_chunk_tokens or engine.max_num_batched_tokens
    return min(num_left_of(request), limit, engine.max_num_batched_tokens)
