"""One live request: takes tokens from its executor, gives them to its reader when they are due."""

import asyncio
import math
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace

import structlog

from services.gateway import metrics
from services.gateway.access.api_keys import current_caller
from services.gateway.errors import GenerationFailedError, LeavingError, ReaderStoppedError
from services.gateway.live.continuation import Continuation
from services.gateway.live.delivery import DeliveryRecord
from services.gateway.live.ends import NOBODY, Holder, Outlet
from services.gateway.live.pacer import DueToken, Pacer
from services.gateway.live.reader import Reader, ReaderLimits
from services.gateway.types import (
    Delivery,
    Finish,
    GenerationRequest,
    Resume,
    Token,
    estimated_num_tokens,
)
from services.generation.finish import FinishReason
from services.generation.logprobs import EchoedPrompt
from services.generation.retention import Retained
from services.kit.clock import Clock
from services.kit.errors import ServiceError
from services.pacing.deposit import max_held_s, release_interval_s
from services.pacing.types import ServiceLevel

log = structlog.get_logger()


class Generation:
    """Stands between one executor and one reader, which gets tokens by `write_to`, or by `batches`.

    As a `RequestSink` it hears its executor; `answered` tells when the executor has taken it.
    """

    def __init__(
        self,
        request: GenerationRequest,
        *,
        pacer: Pacer,
        clock: Clock,
        arrived_s: float,
        limits: ReaderLimits,
    ) -> None:
        self.request = request
        self.finish: Finish | None = None  # set when `batches` has ended
        self.num_prompt_tokens = 0  # known once it is answered
        self.clipped_max_tokens: int | None = None  # then, too; None: as asked for
        self.prompt: EchoedPrompt | None = None  # known with the first token, if asked for
        self.caller = current_caller()
        self.continuation = Continuation(limits.max_kept_tokens, request.begun)
        self._holder: Holder = NOBODY
        self._clock = clock
        self._arrived_s = arrived_s
        self._loop = asyncio.get_running_loop()
        self._answer: asyncio.Future[None] = self._loop.create_future()
        is_paced = request.delivery is Delivery.STREAMED
        interval_s = release_interval_s(request.service_level) if is_paced else 0.0
        held_s = max_held_s(request.service_level)
        self._interval_s = interval_s
        self._paced = pacer.open(interval_s, self._release, max_held_s=held_s)
        self._max_pace_tail_s = limits.max_pace_tail_s
        self._tail_until_s: float | None = None  # set when a tail begins
        self._reader = Reader(
            max_undelivered_tokens=limits.max_undelivered_tokens,
            max_deposited_tokens=limits.max_deposited_tokens(request.sampling.logprobs),
            on_hold=lambda hold: self._holder.lags(hold),
        )
        self._record = DeliveryRecord(request, interval_s=interval_s, arrived_s=arrived_s)
        self._outlet: Outlet | None = None
        self._ready: list[DueToken] = []  # due, and not taken
        self._ready_since_s = 0.0
        self._waiter: asyncio.Future[None] | None = None  # of the reader; an Event costs more
        self._num_generated = 0
        self._num_reasoning_tokens: int | None = None
        self._num_cached_tokens = 0
        self._stop_string = ""
        self._retained: Retained | None = None
        self._reason: FinishReason | None = None
        self._error: Exception | None = None

    # The executor's side

    def accepted(self, num_prompt_tokens: int, max_tokens: int = 0, prompt_digest: int = 0) -> None:
        self.num_prompt_tokens = num_prompt_tokens or self.num_prompt_tokens
        self.continuation.max_tokens = max_tokens or self.continuation.max_tokens
        self.continuation.prompt_digest = prompt_digest or self.continuation.prompt_digest
        asked_for = self.request.sampling.max_tokens
        if asked_for is not None and 0 < max_tokens < asked_for:
            self.clipped_max_tokens = max_tokens
        if not self._answer.done():
            self._answer.set_result(None)
        self._holder.taken()
        if self._reader.is_held:
            self._holder.lags(True)

    def rejected(self, error: ServiceError) -> None:
        self.failed(error)

    def echoed(self, prompt: EchoedPrompt) -> None:
        self.prompt = prompt if self.prompt is None else self.prompt + prompt

    def extended(self, tokens: Sequence[Token], generated_s: float) -> None:
        if self.continuation.overlaps and not (tokens := self._without_overlap(tokens)):
            return
        self._num_generated += len(tokens)
        if not (tokens := self.continuation.add(tokens, generated_s)):
            return
        if self.continuation.gap_since_s is not None:
            tokens = self.continuation.end_gap(tokens, generated_s, self.runs_dry_s)
        num_held = self._paced.push(tokens, generated_s)
        if num_held and not tokens[-1].is_read and any(token.tool_calls for token in tokens):
            self._paced.flush()  # a program waits for the call, and for the text before it
            num_held = 0
        self._record.generated(len(tokens), num_held, generated_s)
        if num_held:
            self._reader.deposited(num_held)

    def retained(self, retained: Retained) -> None:
        self._retained = retained

    def ended(
        self,
        reason: FinishReason,
        num_reasoning_tokens: int | None = None,
        num_cached_tokens: int = 0,
        stop_string: str = "",
    ) -> None:
        if self.is_over:
            return
        if reason is FinishReason.CANCELLED and self._holder.lost(LeavingError()) is None:
            return  # it was aborted there to go on elsewhere
        self._reason, self._num_reasoning_tokens = reason, num_reasoning_tokens
        self._num_cached_tokens, self._stop_string = num_cached_tokens, stop_string
        if self.request.service_level.pace_tail:
            self._tail_until_s = self._clock() + self._max_pace_tail_s
            self._paced.hasten(self._tail_until_s)
        else:
            self._paced.flush()
        self._wake()

    def failed(self, error: ServiceError) -> None:
        final = error if self.is_over else self._holder.lost(error)
        if final is not None:
            self.fail(final)

    def is_waited_for(self, now_s: float) -> bool:
        if self.is_over or self._reader.is_held or self._ready:
            return False
        return self.request.delivery is Delivery.WHOLE or self.runs_dry_s <= now_s

    # Between executors

    def resume(self) -> Resume | None:
        """Return what hands the answer over to another executor; None: it begins there."""
        now_s, turn_s = self._clock(), self._paced.turn_s
        if turn_s is None:
            turn_s = self._arrived_s + self._interval_s * self.request.num_undelivered_tokens
        return self.continuation.resume(
            num_delivered=self._record.num_delivered,
            last_due_age_s=now_s - turn_s,
            arrived_age_s=now_s - self._arrived_s,
        )

    def begin_again(self) -> None:
        """Forget all tokens: there are none, or they are of a whole answer, whose reader has none.
        The next one has index 0.
        """
        self.prompt, self._num_generated = None, 0
        self.continuation.forget()
        self._record.forget()
        self._reader.took(len(self._ready))
        self._ready.clear()

    @property
    def num_generated(self) -> int:
        """Return how many tokens came so far."""
        return self._num_generated

    @property
    def runs_dry_s(self) -> float:
        """Return when the reader will have read all that is here: one without a pace when it came,
        that of a whole answer never.
        """
        if self.request.delivery is Delivery.WHOLE:
            return math.inf
        turn_s, written_s = self._paced.turn_s, self._record.runs_dry_s
        return written_s if turn_s is None else max(written_s, turn_s + self._interval_s)

    def fail(self, error: ServiceError) -> None:
        """End with `error`, unless generation has ended; tokens that are here go out at once."""
        if not self._answer.done():
            self._answer.set_exception(error)
            return
        if not self.is_over:
            self._error = error
        self.end_pace()

    # The reader's side

    async def answered(self) -> None:
        """Wait until the executor has taken the request; raises why it has not."""
        await asyncio.shield(self._answer)

    def reset(self) -> None:
        """Forget a refusal, to ask another executor."""
        self._see_refusal()
        self._answer = self._loop.create_future()

    @property
    def keeps_its_pace(self) -> bool:
        """Say whether nothing but the reader's pace keeps this from its end."""
        return self._reason is not None and self._paced.num_held > 0

    def repace(self, level: ServiceLevel) -> None:
        """Keep other promises from now on, to a streamed answer; a tail ends when it would have."""
        self.request = replace(self.request, service_level=level)
        self._record.repace(level)
        self._interval_s = release_interval_s(level)
        self._paced.repace(self._interval_s)
        if self._tail_until_s is not None:
            self._paced.hasten(self._tail_until_s)

    def end_pace(self) -> None:
        """Give the reader all that is left at once."""
        self._paced.flush()
        self._wake()

    def cancel(self) -> None:
        """End now; tokens that the reader does not have yet are dropped."""
        self._drop_rest()
        self._error = None
        self._reason = FinishReason.CANCELLED
        self._wake()

    def give_up(self, error: Exception) -> None:
        """End with `error` now, even after the last token: the reader does not take the rest."""
        self._drop_rest()
        self._error, self._reason = error, None
        self._wake()

    def left(self) -> None:
        """Note how much of the answer its reader has read, now that it leaves before the end."""
        self._record.left(self._paced.num_held + len(self._ready), self._clock())

    def close(self) -> None:
        """Release nothing more. May be called twice.

        What refers to this object forgets it, so that its memory is free when its last user is
        gone: the garbage collector would find it late.
        """
        self._drop_rest()
        self._reader.close()
        self._holder = NOBODY
        self._see_refusal()

    def held_by(self, holder: Holder) -> None:
        """Tell `holder` from now on."""
        self._holder = holder

    async def write_to(self, outlet: Outlet) -> None:
        """Write tokens when they become due: from the pacer's timer while `outlet` is open, so
        that none waits for this task's turn; from here after it was closed. When this is cancelled
        what is due waits for the next call.

        Raises what ended the request abnormally, after its last token.
        """
        self._outlet = outlet
        try:
            while await self._some_are_ready():
                lags = not outlet.is_open
                self._reader.handed(self._clock())
                await outlet.opened()
                there_s, batch = self._take_ready()
                outlet.write([due.token for due in batch], as_one=lags)
                self._note_written(batch, there_s)
                self._reader.took(len(batch))
        finally:
            self._outlet = None  # whoever gave it up may write something else now
            self._reader.took(0)  # and one that has left is not waited for
        self._complete()

    async def batches(self) -> AsyncIterator[Sequence[Token]]:
        """Yield tokens as they become due; a batch counts as written when the next is asked for.

        Raises what ended the request abnormally, after its last token.
        """
        while await self._some_are_ready():
            there_s, batch = self._take_ready()
            self._reader.handed(self._clock())
            yield [due.token for due in batch]
            self._note_written(batch, there_s)
            self._reader.took(len(batch))
        self._complete()

    def _without_overlap(self, tokens: Sequence[Token]) -> Sequence[Token]:
        """As `Continuation.without_overlap`; a difference ends the request."""
        try:
            return self.continuation.without_overlap(tokens)
        except GenerationFailedError as error:
            log.error("overlap_differs", request_id=self.request.request_id, detail=str(error))
            self.give_up(error)
            return ()

    def _complete(self) -> None:
        """Note that the reader has the last token."""
        self._record.finish()
        num_new = max(0, self._num_generated - self.request.num_begun_tokens)
        num_content = min(num_new, self._num_generated - (self._num_reasoning_tokens or 0))
        metrics.REASONING_TOKENS.inc(num_new - num_content)  # thoughts come first
        metrics.CONTENT_TOKENS.inc(num_content)
        assert self._reason is not None
        self.finish = Finish(
            reason=self._reason,
            num_prompt_tokens=self.num_prompt_tokens,
            num_output_tokens=self._num_generated,
            num_reasoning_tokens=self._num_reasoning_tokens,
            num_cached_tokens=self._num_cached_tokens,
            stop_string=self._stop_string,
            clipped_max_tokens=self.clipped_max_tokens,
            moves=self.continuation.moves,
            continued=self.continuation.continued,
            retained=self._retained,
        )
        self._reader.handed(self._clock())  # what follows the last token is waited for too

    def reader_stopped_for_s(self, now_s: float) -> float:
        """Return how long the reader has taken nothing of what was handed to it."""
        return self._reader.stopped_for_s(now_s)

    @property
    def num_tokens(self) -> int:
        """Return the prompt's and the output's tokens so far; about as many as the prompt has if
        its reader left before they were counted, for they may have been all the same.
        """
        answer = self._answer
        is_refused = answer.done() and not answer.cancelled() and answer.exception() is not None
        if not self.num_prompt_tokens and not is_refused:
            return estimated_num_tokens(self.request.prompt) + self.request.num_begun_tokens
        return self.num_prompt_tokens + self._num_generated

    @property
    def ttft_s(self) -> float | None:
        """Return the time from arrival to the first token's hand-over to a reading client."""
        return self._record.ttft_s

    @property
    def ttfat_s(self) -> float | None:
        """Return the same to the first token of the answer, text or a call."""
        return self._record.ttfat_s

    @property
    def result(self) -> str:
        """Name how the request ended, or that its reader left before it did."""
        if self.finish is not None:
            return self.finish.reason.value
        if not self.num_prompt_tokens:
            return "refused"
        if self._error is None or isinstance(self._error, ReaderStoppedError):
            return "abandoned"
        return "failed"

    @property
    def is_over(self) -> bool:
        """Say whether it has ended here, whatever an executor says."""
        return self._reason is not None or self._error is not None

    async def _some_are_ready(self) -> bool:
        """Wait for due tokens; False means that the request has ended."""
        while not self._ready:
            if self._error is not None:
                raise self._error
            if self._reason is not None and not self._paced.num_held:
                return False
            self._waiter = self._loop.create_future()
            await self._waiter
        return True

    def _take_ready(self) -> tuple[float, Sequence[DueToken]]:
        """Return since when there are due tokens, and these."""
        batch, self._ready = self._ready, []
        return self._ready_since_s, batch

    def _release(self, tokens: Sequence[DueToken]) -> None:
        """Pass on tokens that are due, which the pacer says from its timer; raises nothing."""
        if self._reader.is_held:
            self._reader.deposited(self._paced.num_held)
        outlet = self._outlet
        if outlet is None or self._ready or not outlet.is_open:
            self._keep(tokens)
            return
        try:
            outlet.write([due.token for due in tokens], as_one=False)
            self._note_written(tokens)
        except Exception as error:  # noqa: BLE001 - `write_to` raises it, no other stream suffers
            self.give_up(error)
        if self._reason is not None and not self._paced.num_held:
            self._wake()

    def _keep(self, tokens: Sequence[DueToken]) -> None:
        """Have due tokens wait until the reader takes them."""
        if not self._ready:
            self._ready_since_s = self._clock()
        self._ready.extend(tokens)
        self._reader.due(len(tokens))
        self._wake()

    def _note_written(self, tokens: Sequence[DueToken], there_s: float | None = None) -> None:
        """Note that tokens were written that the reader might have had since `there_s`; None: not
        before, for it takes them at once.
        """
        now_s = self._clock()
        self._record.written(tokens, now_s, now_s if there_s is None else there_s)
        self._holder.progressed(self._record.num_delivered)

    def _see_refusal(self) -> None:
        if self._answer.done() and not self._answer.cancelled():
            self._answer.exception()  # it may be that no call waited for it

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _drop_rest(self) -> None:
        self._paced.close()
        self._ready.clear()
