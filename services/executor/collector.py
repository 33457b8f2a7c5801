"""Takes the place of vLLM's `RequestOutputCollector`, so that no delta waits for a task.

vLLM's own collector merges the steps that its one consumer was too slow to read. This one passes
every delta on at once, from inside vLLM's output loop.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import structlog

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


class StepOutput(Protocol):
    """The part of vLLM's `RequestOutput` that is read here."""

    outputs: Sequence[Completion]


class StepCollector:
    """Hands each step's delta of one request to `sink`, synchronously; after the end, nothing."""

    def __init__(self, request_id: str, sink: DeltaSink) -> None:
        self.request_id = request_id
        self._sink = sink
        self._ended = False

    def put(self, output: StepOutput | Exception) -> None:
        """Take what vLLM's output loop has for this request. Never blocks."""
        if self._ended:
            return
        delta = self._failed(output) if isinstance(output, Exception) else to_delta(output)
        self._ended = delta.ending is not None
        self._sink(delta)

    def close(self) -> None:
        """Do nothing: there is no input stream to stop."""

    def _failed(self, error: Exception) -> Delta:
        log.warning("request_failed", engine_request_id=self.request_id, error=repr(error))
        return Delta((), Failure(message="the engine failed", retryable=True))


def to_delta(output: StepOutput) -> Delta:
    """Return one step of a request; the text of several tokens of a step is the last one's.

    Text without a token (held back for a stop string when the request was aborted) is dropped.
    """
    (completion,) = output.outputs
    ids = completion.token_ids
    last = len(ids) - 1
    tokens = tuple(Token(id, completion.text if i == last else "") for i, id in enumerate(ids))
    reason = completion.finish_reason
    return Delta(tokens, None if reason is None else FINISH_REASONS[reason])
