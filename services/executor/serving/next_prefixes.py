"""What next turns begin with, computed in time that no request needs.

An answer's own KV is in the prefix cache already. The next turn finds it as long as the chat
template writes the answer as the model did; where it leaves thoughts out, or writes calls in
another form, the next prompt parts with it there. So the conversation is rendered with the answer
in it and computed as a request of its own, of the lowest priority and with one token, which is
thrown away.
"""

import asyncio
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import structlog

from services.executor.engine.collector import DeltaSink
from services.executor.metrics import NEXT_PREFIXES
from services.executor.types import (
    LOWEST_PRIORITY,
    Delta,
    PreparedRequest,
    RejectedError,
    Submission,
    Token,
)
from services.generation.conversation import ChatMessage, ToolCall
from services.generation.finish import FinishReason
from services.generation.prompts import (
    ChatPrompt,
    TextPrompt,
    Tokenization,
    TokenizeOptions,
    TokenPrompt,
)
from services.generation.sampling_params import SamplingParams

log = structlog.get_logger()

WHATEVER_COMES = "."  # what the turn behind the answer says: templates look at its role
ENDS = (FinishReason.STOP, FinishReason.LENGTH, FinishReason.TOOL_CALLS)


class PrefixEngine(Protocol):
    """What computes prefixes; see `services.executor.engine.engine.Engine`."""

    async def tokenize(
        self, prompt: TextPrompt | ChatPrompt, options: TokenizeOptions
    ) -> Tokenization: ...
    async def prepare(self, submissions: Sequence[Submission]) -> list[PreparedRequest]: ...
    async def add(self, prepared: PreparedRequest, sink: DeltaSink) -> None: ...
    def abort(self, engine_ids: Sequence[str]) -> None: ...


@dataclass(slots=True)
class AnswerSoFar:
    """What an answer has said, for a conversation that goes on behind it."""

    text: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)

    def take(self, tokens: Sequence[Token]) -> None:
        for token in tokens:
            self.text.append(token.text)
            self.reasoning.append(token.reasoning)

    def turn(self, calls: Sequence[ToolCall]) -> ChatMessage:
        """Return the answer as a turn of the conversation."""
        return ChatMessage(
            role="assistant",
            content="".join(self.text),
            reasoning="".join(self.reasoning),
            tool_calls=tuple(calls),
        )


def answer_of(submission: Submission) -> AnswerSoFar | None:
    """Return what is to be told of a request's answer; None if nothing is: its next prefix is not
    asked for, or is there with the answer, or the answer's beginning is known by its ids alone.
    """
    hint, prompt = submission.retention, submission.prompt
    if hint is None or not hint.next_prefix or submission.resume is not None:
        return None
    if not isinstance(prompt, ChatPrompt) or prompt.options.continues_final_message:
        return None
    return AnswerSoFar()


@dataclass(slots=True)
class _Computation:
    """One prefix that is computed."""

    over: asyncio.Event = field(default_factory=asyncio.Event)  # computed, or let go of
    is_computed: bool = False
    engine_id: str = ""  # of the request, once the engine may have it

    def take(self, delta: Delta) -> None:
        """Take what the engine has of the request: its token is not looked at."""
        if delta.ending is not None:
            self.is_computed = delta.ending is FinishReason.LENGTH
            self.over.set()


class NextPrefixes:
    """Computes one prefix at a time, as long as no request comes; others are dropped."""

    def __init__(self, is_idle: Callable[[], bool]) -> None:
        """`is_idle` says whether no request waits for its first token, or to go on."""
        self._is_idle = is_idle
        self._now: _Computation | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def engine_ids(self) -> frozenset[str]:
        """Return the engine's id of the request that computes a prefix, if there is one."""
        return frozenset((self._now.engine_id,) if self._now and self._now.engine_id else ())

    def ended(
        self, engine: PrefixEngine, submission: Submission, answer: AnswerSoFar, last: Delta
    ) -> None:
        """Compute what the turn behind an answer begins with, unless there is other work."""
        if last.ending not in ENDS:
            return
        if self._now is not None:
            NEXT_PREFIXES.labels("dropped").inc()
            return
        self._now = _Computation()
        prompt = _behind(submission.prompt, answer.turn(last.tool_calls))
        self._task = asyncio.create_task(
            self._run(engine, submission, prompt, self._now), name=f"next-{submission.request_id}"
        )

    async def _run(
        self, engine: PrefixEngine, submission: Submission, prompt: ChatPrompt, now: _Computation
    ) -> None:
        try:
            await asyncio.sleep(0)  # the engine's step is taken in by then
            await self._compute(engine, submission, prompt, now)
        except RejectedError:
            pass  # it is too long, or the template does not write it
        except Exception:
            log.exception("next_prefix_crashed", request_id=submission.request_id)
        finally:
            self._now = None
            NEXT_PREFIXES.labels("computed" if now.is_computed else "dropped").inc()

    async def _compute(
        self, engine: PrefixEngine, submission: Submission, prompt: ChatPrompt, now: _Computation
    ) -> None:
        if not self._may_go_on(now):
            return
        options = TokenizeOptions(omits_generation_prompt=True, fair_key=submission.fair_key)
        ids = (await engine.tokenize(prompt, options)).ids
        (prepared,) = await engine.prepare([_spare(submission, ids)])
        if not self._may_go_on(now):
            return
        now.engine_id = prepared.engine_id
        await engine.add(prepared, now.take)
        await now.over.wait()
        if not now.is_computed:
            engine.abort([now.engine_id])

    def _may_go_on(self, now: _Computation) -> bool:
        return not now.over.is_set() and self._is_idle()

    def stop(self) -> None:
        """Let go of the prefix that is computed: the engine has other work, or is about to end."""
        if self._now is not None:
            self._now.over.set()

    def lose(self, engine_ids: Collection[str]) -> None:
        """Let go of a request that the engine does not have any more."""
        if not self.engine_ids.isdisjoint(engine_ids):
            self.stop()


def _spare(submission: Submission, ids: tuple[int, ...]) -> Submission:
    """Return a request for the KV of a prompt, beside one that has ended."""
    return Submission(
        request_id=f"next-{submission.request_id}",
        generation=1,
        model=submission.model,
        prompt=TokenPrompt(ids),
        sampling=SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True),
        priority=LOWEST_PRIORITY,
        cache_salt=submission.cache_salt,
        fair_key=submission.fair_key,
    )


def _behind(prompt: object, answer: ChatMessage) -> ChatPrompt:
    """Return a conversation with an answer and any turn behind it: how templates write an answer
    depends on what follows.
    """
    assert isinstance(prompt, ChatPrompt)
    following = tuple(
        ChatMessage(role="tool", content=WHATEVER_COMES, tool_call_id=call.id)
        for call in answer.tool_calls
    ) or (ChatMessage(role="user", content=WHATEVER_COMES),)
    options = replace(prompt.options, omits_generation_prompt=True, continues_final_message=False)
    return ChatPrompt((*prompt.messages, answer, *following), options)
