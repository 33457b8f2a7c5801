"""One gateway's stream: its live requests, from submit to ending."""

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import structlog

from services.executor.metrics import FRAME_TOKENS, FRAMES, REQUESTS
from services.executor.serving.load import Newcomers
from services.executor.serving.next_prefixes import NextPrefixes, PrefixEngine, answer_of
from services.executor.serving.progress import ProgressSink, status_after
from services.executor.serving.request_trace import RequestTrace
from services.executor.serving.step_stream import Acceptance, Frame, StepStream
from services.executor.serving.streamed_request import (
    StreamedRequest,
    echoed_prompt,
    result_label,
)
from services.executor.serving.tool_waits import ToolWaits
from services.executor.types import (
    Delta,
    Ending,
    Failure,
    PreparedRequest,
    RejectCode,
    RejectedError,
    Rejection,
    Submission,
)
from services.generation.conversation import ToolCall
from services.generation.finish import FinishReason
from services.generation.lifecycle import RequestStatus
from services.kit.rpc import bind_request_id
from services.kit.telemetry.tracing import Tracing
from services.pacing.types import ServiceLevel
from services.reporting.load import ExecutorLoad

log = structlog.get_logger()

CANCELLED = Delta((), FinishReason.CANCELLED)
LOST = Delta((), Failure(message="the engine lost the request", retryable=True))
DUPLICATE = Rejection(code=RejectCode.DUPLICATE, message="a live request has the same id")
INTERNAL = Rejection(code=RejectCode.INTERNAL, message="internal error")


class GenerationEngine(PrefixEngine, Protocol):
    """What a session needs of an engine; see `services.executor.engine.engine.Engine`."""

    def deliver(self, engine_id: str, num_delivered: int) -> None: ...
    def turn(self, engine_id: str, index: int, *, reads: bool) -> None: ...
    def hold(self, engine_id: str, held: bool) -> None: ...
    def num_steps(self) -> int: ...
    def repace(self, engine_id: str, service_level: ServiceLevel) -> None: ...
    def keep_turn(self, engine_id: str, seconds: float) -> None: ...


@dataclass(frozen=True, slots=True)
class Gateway:
    """Whose a session is."""

    id: str
    epoch: int = 0  # number of the session among those of the gateway; 0: they have none


@dataclass(frozen=True, slots=True)
class Admission:
    """The front's hand on the requests of all gateways."""

    why_not: Callable[[Sequence[Submission]], Rejection | None]  # None: all may come in
    ended: Callable[[], None]  # called for each one that came in
    newcomers: Newcomers
    tool_waits: ToolWaits
    next_prefixes: NextPrefixes


class Session:
    """Moves requests of one gateway into the engine and their tokens out, as frames.

    Everything but `frames` returns at once. `close` may be called at any time and any number of
    times; after it nothing of this gateway is left in the engine.
    """

    def __init__(
        self,
        engine: GenerationEngine,
        *,
        gateway: Gateway,
        progress: ProgressSink,
        admission: Admission,
        tracing: Tracing,
    ) -> None:
        """`tracing` makes the spans of requests."""
        self.gateway = gateway
        self._engine = engine
        self._progress = progress
        self._admission, self._tracing = admission, tracing
        self._stream = StepStream(engine.num_steps)
        self._live: dict[str, StreamedRequest] = {}
        self._preparing: dict[str, asyncio.Task[None]] = {}
        self._input_ended = False
        self._closed = False

    @property
    def num_live(self) -> int:
        return len(self._live)

    @property
    def request_ids(self) -> dict[str, str]:
        """Return the ids of requests that the engine has: the client's by the engine's."""
        return {
            live.engine_id: request_id for request_id, live in self._live.items() if live.engine_id
        }

    @property
    def num_deposited(self) -> int:
        """Return the tokens generated and not yet delivered, over all live requests."""
        return sum(live.num_deposited for live in self._live.values())

    async def frames(self) -> AsyncIterator[Frame]:
        """Yield frames until the session ends; raises the error it was ended with."""
        while (frame := await self._stream.next_frame()) is not None:
            FRAMES.inc()
            if frame.has_news:
                FRAME_TOKENS.observe(frame.num_tokens)
            yield frame

    def submit(self, submissions: Sequence[Submission]) -> None:
        """Take requests for one prompt, all or none; what becomes of each comes with a frame."""
        if self._closed:
            return
        request_ids = [submission.request_id for submission in submissions]
        if rejection := self._why_not(submissions, request_ids):
            self.reject(request_ids, rejection)
            return
        self._admission.next_prefixes.stop()
        self._admission.tool_waits.arrived(submissions[0])
        answers = [self._enter(submission) for submission in submissions]
        self._live |= dict(zip(request_ids, answers, strict=True))
        task = asyncio.create_task(self._start(answers), name=f"start-{request_ids[0]}")
        self._preparing |= dict.fromkeys(request_ids, task)
        task.add_done_callback(partial(self._on_started, answers))

    def _why_not(
        self, submissions: Sequence[Submission], request_ids: Sequence[str]
    ) -> Rejection | None:
        if any(map(self._is_taken, request_ids)) or len(set(request_ids)) < len(request_ids):
            return DUPLICATE
        return self._admission.why_not(submissions)

    def _enter(self, submission: Submission) -> StreamedRequest:
        trace = RequestTrace(submission, self._tracing)
        submission = replace(submission, trace=trace.context)
        live = StreamedRequest(submission=submission, trace=trace, answer=answer_of(submission))
        live.pace(submission.service_level)
        return live

    def _is_taken(self, request_id: str) -> bool:
        return request_id in self._live or self._stream.knows(request_id)

    def reject(self, request_ids: Iterable[str], rejection: Rejection) -> None:
        """Refuse requests that are not live."""
        for request_id in request_ids:
            REQUESTS.labels(rejection.code.value).inc()
            log.info("request_rejected", request_id=request_id, code=rejection.code.value)
            self._stream.reject(request_id, rejection)

    async def _start(self, answers: Sequence[StreamedRequest]) -> None:
        bind_request_id(answers[0].submission.request_id)  # the stream's call has another
        try:
            prepared = await self._prepare(answers)
        except RejectedError as error:
            for live in filter(self._is_live, answers):
                self._refuse(live, error.rejection)
            return
        for live, one in zip(answers, prepared, strict=True):
            if self._is_live(live):
                await self._add(live, one)
                await asyncio.sleep(0)  # many answers leave turns to all else

    async def _prepare(self, answers: Sequence[StreamedRequest]) -> Sequence[PreparedRequest]:
        try:
            return await self._engine.prepare([live.submission for live in answers])
        finally:
            for live in filter(self._is_live, answers):
                self._preparing.pop(live.submission.request_id, None)

    async def _add(self, live: StreamedRequest, prepared: PreparedRequest) -> None:
        live.trace.prepared(prepared.num_prompt_tokens)
        acceptance = Acceptance(
            prepared.num_prompt_tokens, prepared.max_tokens, prepared.prompt_digest
        )
        if resume := prepared.resume:
            live.num_generated = len(resume.output_ids) - resume.num_retold_tokens
            live.num_delivered = resume.num_delivered_tokens
        self._stream.accept(live.submission.request_id, acceptance, num_known=live.num_generated)
        self._note(live, RequestStatus.QUEUED)
        live.num_awaited = prepared.num_prompt_tokens + live.num_generated
        self._admission.newcomers.came(live.num_awaited)
        live.engine_id = prepared.engine_id
        live.prompt, live.reads = echoed_prompt(live.submission, prepared), prepared.reads
        if prepared.retold:
            self._push(live, Delta(prepared.retold))
        await self._engine.add(prepared, partial(self._on_delta, live))

    def _is_live(self, live: StreamedRequest) -> bool:
        return self._live.get(live.submission.request_id) is live

    def _on_started(self, answers: Sequence[StreamedRequest], task: asyncio.Task[None]) -> None:
        """Answer for a start that crashed: the other requests of the stream go on."""
        error = None if task.cancelled() else task.exception()
        if error is None:
            return
        for live in filter(self._is_live, answers):
            request_id = live.submission.request_id
            log.error("request_start_crashed", request_id=request_id, exc_info=error)
            if live.engine_id:
                self._on_delta(live, Delta((), Failure(message="internal error", retryable=False)))
                self._engine.abort([live.engine_id])
            else:
                self._refuse(live, INTERNAL)

    def _on_delta(self, live: StreamedRequest, delta: Delta) -> None:
        if not self._is_live(live):
            return
        self._note_turn(live, delta)
        if delta.tokens and live.num_awaited:
            self._admission.newcomers.served(live.num_awaited)
            live.num_awaited = 0
        self._push(live, delta)
        self._note(live, status_after(delta, live.num_generated))
        if delta.tool_calls:
            self._keep_turn(live, delta.tool_calls)
        if delta.ending is not None:
            self._end(live, delta.ending)
            if live.answer is not None:
                self._admission.next_prefixes.ended(
                    self._engine, live.submission, live.answer, delta
                )

    def _push(self, live: StreamedRequest, delta: Delta) -> None:
        prompt, num_covering = live.echo(delta), live.num_covering
        request_id = live.submission.request_id
        self._stream.push(request_id, delta, prompt=prompt, num_covering=num_covering)
        live.take(delta)

    def _note_turn(self, live: StreamedRequest, delta: Delta) -> None:
        """Tell the scheduler where an answer begins to be read, or is not any more."""
        if delta.tokens and delta.tokens[0].is_read is not live.reads:
            live.reads = not live.reads
            self._engine.turn(live.engine_id, live.num_generated, reads=live.reads)

    def _keep_turn(self, live: StreamedRequest, calls: Sequence[ToolCall]) -> None:
        """Have the KV of an answer that ends with calls kept until their results are likely to
        have come.
        """
        seconds = self._admission.tool_waits.ended(live.submission, calls)
        self._engine.keep_turn(live.engine_id, seconds)

    def _note(self, live: StreamedRequest, status: RequestStatus) -> None:
        self._progress.note(
            live.submission.request_id,
            generation=live.submission.generation,
            num_generated=live.num_generated,
            status=status,
        )

    def _end(self, live: StreamedRequest, ending: Ending) -> None:
        """Count and log how a request that the engine took has ended, and let go of it."""
        live.trace.ended(ending, live.num_generated)
        result = result_label(ending)
        REQUESTS.labels(result).inc()
        log.info(
            "request_ended",
            request_id=live.submission.request_id,
            result=result,
            num_output_tokens=live.num_generated,
        )
        self._forget(live)

    def _refuse(self, live: StreamedRequest, rejection: Rejection) -> None:
        """Reject a live request, which the engine does not have."""
        live.trace.rejected(rejection)
        self._forget(live)
        self.reject([live.submission.request_id], rejection)

    def _forget(self, live: StreamedRequest) -> None:
        del self._live[live.submission.request_id]
        if live.num_awaited:
            self._admission.newcomers.left(live.num_awaited)
        self._admission.ended()
        if self._input_ended and not self._live:
            self._stream.end()

    def abort(self, request_id: str) -> None:
        """End a request early; unknown and finished ones are ignored."""
        live = self._live.get(request_id)
        if live is None:
            return
        if live.engine_id:
            self._engine.abort([live.engine_id])
            return
        task = self._preparing.pop(request_id, None)
        if task is not None and task not in self._preparing.values():
            task.cancel()  # no other answer waits for the prompt
        self._stream.accept(request_id, Acceptance())
        self._on_delta(live, CANCELLED)

    def take_delivered(self, counts: Iterable[tuple[str, int]]) -> None:
        """Note how many tokens of each request its reader has; counts never fall."""
        for request_id, num_delivered in counts:
            if live := self._live.get(request_id):
                live.num_delivered = max(live.num_delivered, num_delivered)
                if live.engine_id:
                    self._engine.deliver(live.engine_id, live.num_delivered)

    def hold(self, holds: Iterable[tuple[str, bool]]) -> None:
        """Hold requests whose readers have stopped, or let them go on; unknown ones are ignored."""
        for request_id, held in holds:
            live = self._live.get(request_id)
            if live is not None and live.engine_id:
                self._engine.hold(live.engine_id, held)

    def repace(self, paces: Iterable[tuple[str, ServiceLevel]]) -> None:
        """Have requests keep other promises from now on; unknown ones are ignored."""
        for request_id, service_level in paces:
            live = self._live.get(request_id)
            if live is not None and live.engine_id:
                live.pace(service_level)
                self._stream.beat()  # what was covered may not be any more
                self._engine.repace(live.engine_id, service_level)

    def end_input(self) -> None:
        """Say that the gateway will send nothing more: the session ends with its last request."""
        self._input_ended = True
        if not self._live:
            self._stream.end()

    @property
    def live(self) -> Collection[StreamedRequest]:
        return self._live.values()

    def beat(self, load: ExecutorLoad) -> None:
        """Send a frame soon if requests are live: the gateway learns that their engine steps; and
        if it has not heard of this load.
        """
        self._stream.tell(load)
        if self._live:
            self._stream.beat()

    def leave(self) -> None:
        """Tell the gateway that the executor is leaving."""
        self._stream.leave()

    def end(self, error: Exception | None = None) -> None:
        """End the session after what is pending; live requests are aborted by `close`."""
        self._stream.end(error)

    def fail_all(self, message: str) -> None:
        """End every live request with a retryable failure."""
        failure = Delta((), Failure(message=message, retryable=True))
        unavailable = Rejection(code=RejectCode.UNAVAILABLE, message=message)
        self._cancel_preparing()
        engine_ids = self._engine_ids()
        for live in list(self._live.values()):
            if live.engine_id:
                self._on_delta(live, failure)
            else:
                self._refuse(live, unavailable)
        self._engine.abort(engine_ids)

    def lose(self, engine_ids: Collection[str]) -> None:
        """End requests that the engine does not have any more; other sessions' are ignored."""
        for live in [one for one in self._live.values() if one.engine_id in engine_ids]:
            self._on_delta(live, LOST)

    def close(self) -> None:
        """Abort whatever is live: the gateway is gone, or its stream has ended."""
        if self._closed:
            return
        self._closed = True
        self._cancel_preparing()
        engine_ids = self._engine_ids()
        for live in list(self._live.values()):
            if live.engine_id:
                self._note(live, RequestStatus.CANCELLED)
            self._end(live, FinishReason.CANCELLED)
        self._engine.abort(engine_ids)
        self._stream.end()

    def _engine_ids(self) -> list[str]:
        return [live.engine_id for live in self._live.values() if live.engine_id]

    def _cancel_preparing(self) -> None:
        for task in set(self._preparing.values()):
            task.cancel()
        self._preparing.clear()
