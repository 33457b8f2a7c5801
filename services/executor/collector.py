"""Takes the place of vLLM's `RequestOutputCollector`, so that no delta waits for a task.

vLLM's own collector merges the steps that its one consumer was too slow to read. This one passes
every delta on at once, from inside vLLM's output loop.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import structlog

from services.executor.logprobs import PromptOutput, VllmLogprob, prompt_logprobs, token_logprobs
from services.executor.types import Delta, Ending, Failure, FinishReason, Token

log = structlog.get_logger()

DeltaSink = Callable[[Delta], None]

FINISH_REASONS: dict[str, Ending] = {
    "stop": FinishReason.STOP,
    "repetition": FinishReason.STOP,
    "length": FinishReason.LENGTH,
    "abort": FinishReason.CANCELLED,
    "error": Failure(message="the engine lost the request's state", retryable=True),
}


class Completion(Protocol):
    """The part of vLLM's `CompletionOutput` that is read here."""

    text: str
    token_ids: Sequence[int]
    finish_reason: str | None
    logprobs: Sequence[Mapping[int, VllmLogprob]] | None  # one per token


class StepOutput(PromptOutput, Protocol):
    """The part of vLLM's `RequestOutput` that is read here."""

    outputs: Sequence[Completion]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reporting:
    """What a request wants to know beside its tokens, where vLLM reports it."""

    num_logprobs: int = 0  # likeliest tokens of each place
    first_prompt_token: str = ""  # text that vLLM does not report


TOKENS_ONLY = Reporting()


class StepCollector:
    """Hands each step's delta of one request to `sink`, synchronously; after the end, nothing."""

    def __init__(
        self, request_id: str, sink: DeltaSink, reporting: Reporting = TOKENS_ONLY
    ) -> None:
        self.request_id = request_id
        self._sink = sink
        self._reporting = reporting
        self._ended = False

    def put(self, output: StepOutput | Exception) -> None:
        """Take what vLLM's output loop has for this request. Never blocks."""
        if self._ended:
            return
        if isinstance(output, Exception):
            delta = self._failed(output)
        else:
            delta = to_delta(output, self._reporting)
        self._ended = delta.ending is not None
        self._sink(delta)

    def close(self) -> None:
        """Do nothing: there is no input stream to stop."""

    def _failed(self, error: Exception) -> Delta:
        log.warning("request_failed", engine_request_id=self.request_id, error=repr(error))
        return Delta((), Failure(message="the engine failed", retryable=True))


def to_delta(output: StepOutput, reporting: Reporting = TOKENS_ONLY) -> Delta:
    """Return one step of a request; the text of several tokens of a step is the last one's.

    Text without a token (held back for a stop string when the request was aborted) is dropped.
    """
    (completion,) = output.outputs
    reason = completion.finish_reason
    return Delta(
        _tokens(completion, reporting.num_logprobs),
        None if reason is None else FINISH_REASONS[reason],
        prompt_logprobs(output, reporting.num_logprobs, reporting.first_prompt_token),
    )


def _tokens(completion: Completion, num_logprobs: int) -> tuple[Token, ...]:
    ids, places = completion.token_ids, completion.logprobs
    last = len(ids) - 1
    texts = (completion.text if i == last else "" for i in range(len(ids)))
    if places is None:
        return tuple(map(Token, ids, texts))
    return tuple(
        Token(id, text, token_logprobs(id, place, num_logprobs))
        for id, text, place in zip(ids, texts, places, strict=True)
    )
