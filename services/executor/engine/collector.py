"""Takes the place of vLLM's `RequestOutputCollector`, so that no delta waits for a task.

vLLM's own collector merges the steps that its one consumer was too slow to read. This one passes
every delta on at once, from inside vLLM's output loop.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import structlog

from services.executor.engine.logprobs import (
    PromptOutput,
    VllmLogprob,
    prompt_logprobs,
    token_logprobs,
)
from services.executor.request_tag import from_transfer_params, retained_from_params
from services.executor.types import Delta, Ending, Failure, Said, Token
from services.generation.conversation import ToolCall
from services.generation.finish import FinishReason
from services.generation.logprobs import TokenLogprobs
from services.generation.retention import RejectedRetention, Retained, RetentionStatus

log = structlog.get_logger()

DeltaSink = Callable[[Delta], None]

DEAD_END = Failure(
    message="the answer came to where the form asked for allows no next token", retryable=False
)
UNREADABLE = Failure(message="the answer could not be read", retryable=False)
NOT_KEPT = Retained(status=RetentionStatus.REJECTED, reason=RejectedRetention.NO_HOST_CACHE)

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
    stop_reason: int | str | None  # the token or the string that the answer came to
    logprobs: Sequence[Mapping[int, VllmLogprob]] | None  # one per token


class StepOutput(PromptOutput, Protocol):
    """The part of vLLM's `RequestOutput` that is read here."""

    outputs: Sequence[Completion]
    num_cached_tokens: int | None  # of the prompt
    kv_transfer_params: Mapping[str, Any] | None  # with why the step's token is late, if it is


class StepParser(Protocol):
    """Tells what a step says; see `services.executor.prompts.answer_parser.AnswerParser`."""

    @property
    def chose_calls(self) -> bool: ...
    @property
    def num_reasoning_tokens(self) -> int | None: ...
    @property
    def tool_calls(self) -> tuple[ToolCall, ...]: ...
    @property
    def is_read(self) -> bool: ...
    def parse(self, text: str, token_ids: Sequence[int], *, is_last: bool) -> Said: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Reporting:
    """What a request wants to know beside its tokens, and how its text is read."""

    num_logprobs: int = 0  # likeliest tokens of each place
    first_prompt_token: str = ""  # text that vLLM does not report
    parser: StepParser | None = None  # None: all text is the answer's content
    has_form: bool = False  # the answer is held to a grammar
    reads: bool = True  # where there is no parser: a person reads the answer
    num_cached_tokens: int | None = None  # of the prompt; None: what vLLM says
    asks_to_keep: bool = False  # its KV: the ending tells what is kept


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
        self._retained: Retained | None = NOT_KEPT if reporting.asks_to_keep else None

    def put(self, output: StepOutput | Exception) -> None:
        """Take what vLLM's output loop has for this request. Never blocks."""
        if self._ended:
            return
        delta = self._failed(output) if isinstance(output, Exception) else self._read(output)
        self._ended = delta.ending is not None
        self._sink(delta)

    def close(self) -> None:
        """Do nothing: there is no input stream to stop."""

    def _read(self, output: StepOutput) -> Delta:
        """Return a step; a failure if it cannot be read: vLLM's output loop is every request's."""
        try:
            return self._with_kept(to_delta(output, self._reporting))
        except Exception:
            log.exception("answer_not_read", engine_request_id=self.request_id)
            return Delta((), UNREADABLE)

    def _with_kept(self, delta: Delta) -> Delta:
        """Return a step that tells, if it is the last, what was last said to be kept."""
        self._retained = delta.retained or self._retained
        told = None if delta.ending is None else self._retained
        return delta if delta.retained is told else replace(delta, retained=told)

    def _failed(self, error: Exception) -> Delta:
        log.warning("request_failed", engine_request_id=self.request_id, error=repr(error))
        return Delta((), Failure(message="the engine failed", retryable=True))


def to_delta(output: StepOutput, reporting: Reporting = TOKENS_ONLY) -> Delta:
    """Return one step of a request; the text of several tokens of a step is the last one's.

    Text without a token (held back for a stop string when the request was aborted) is dropped.
    """
    (completion,) = output.outputs
    tokens = _tokens(completion, reporting)
    delay = from_transfer_params(output.kv_transfer_params)
    if delay is not None and tokens:
        tokens = (replace(tokens[0], delay=delay), *tokens[1:])
    ending, parser = _ending(completion, reporting), reporting.parser
    num_cached = reporting.num_cached_tokens
    if num_cached is None:
        num_cached = output.num_cached_tokens or 0
    return Delta(
        tokens,
        ending,
        _scored_prompt(output, reporting) if tokens else (),
        parser.num_reasoning_tokens if parser is not None and ending is not None else None,
        num_cached if ending is not None else 0,
        completion.stop_reason if isinstance(completion.stop_reason, str) else "",
        retained_from_params(output.kv_transfer_params),
        tool_calls_of(ending, reporting),
    )


def _scored_prompt(output: StepOutput, reporting: Reporting) -> tuple[TokenLogprobs, ...]:
    """Return how likely the prompt was. Before the first token vLLM has not scored all of it."""
    return prompt_logprobs(output, reporting.num_logprobs, reporting.first_prompt_token)


def _tokens(completion: Completion, reporting: Reporting) -> tuple[Token, ...]:
    ids, places = completion.token_ids, completion.logprobs
    if not ids:
        return ()
    parser = reporting.parser
    said = _said(completion, parser)
    is_read = reporting.reads if parser is None else parser.is_read
    tokens = [Token(id, "", is_read=is_read) for id in ids[:-1]]
    tokens.append(Token(ids[-1], said.text, None, said.reasoning, said.tool_calls, is_read=is_read))
    if places is None:
        return tuple(tokens)
    return tuple(
        replace(token, logprobs=token_logprobs(token.id, place, reporting.num_logprobs))
        for token, place in zip(tokens, places, strict=True)
    )


def _said(completion: Completion, parser: StepParser | None) -> Said:
    if parser is None:
        return Said(completion.text)
    is_last = completion.finish_reason is not None
    return parser.parse(completion.text, completion.token_ids, is_last=is_last)


def _ending(completion: Completion, reporting: Reporting) -> Ending | None:
    """Return how an answer ended, after its last step was parsed; None if it goes on."""
    if completion.finish_reason is None:
        return None
    ending = ending_of(completion.finish_reason, reporting)
    # What is lost has no new token; one that the grammar does not allow was drawn for want of any.
    if isinstance(ending, Failure) and reporting.has_form and completion.token_ids:
        return DEAD_END
    return ending


def ending_of(finish_reason: str, reporting: Reporting) -> Ending:
    """Return how an answer ended whose last step was parsed; the reason as vLLM names it."""
    ending, parser = FINISH_REASONS[finish_reason], reporting.parser
    if ending is FinishReason.STOP and parser is not None and parser.chose_calls:
        return FinishReason.TOOL_CALLS
    return ending


def tool_calls_of(ending: Ending | None, reporting: Reporting) -> tuple[ToolCall, ...]:
    """Return the calls of an answer that has ended by itself: none of them lacks a part."""
    if reporting.parser is None or ending not in (FinishReason.STOP, FinishReason.TOOL_CALLS):
        return ()
    return reporting.parser.tool_calls
