"""A stream whose reader may leave and come back: what was handed out is kept, as tokens."""

import asyncio
from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias

import structlog

from services.gateway import metrics
from services.gateway.access.api_keys import ApiKey
from services.gateway.live.dispatcher import Dispatcher
from services.gateway.live.generation import Generation
from services.gateway.live.reader import token_bytes
from services.gateway.live.side_by_side import side_by_side
from services.gateway.types import Finish, RequestId, Token
from services.generation.finish import FinishReason
from services.generation.logprobs import EchoedPrompt
from services.kit.clock import Clock
from services.kit.errors import ServiceError

log = structlog.get_logger()

Task: TypeAlias = "asyncio.Task[None]"

# What happens to an answer: its next token, its ending, or what fails the whole stream.
Step: TypeAlias = Token | Finish | Exception

STEPS_AT_A_TIME = 256  # that are written again between two turns of the event loop
STREAM_BYTES = 32 << 10  # of memory that a stream takes beside its tokens, about
PROMPT_ID_BYTES = 36  # and each id of a prompt that is given back


class StreamReader(Protocol):
    """Takes the steps of a stream, each once and in their order."""

    @property
    def is_open(self) -> bool:
        """Say whether it takes steps now."""

    async def opened(self) -> None:
        """Wait until it takes steps."""

    def take(self, index: int, step: Step) -> None:
        """Take the next step, which is one of answer `index`."""


class ResumableStream:
    """The answers to one request. Their pace goes on without a reader: what is due then waits,
    and above a bound their generation is held, as for any reader that lags; but those of a
    background response are kept as they come.

    Steps of several answers are kept in the order in which they were handed out, so that each
    reader sees the same.
    """

    def __init__(
        self,
        request_id: RequestId,
        generations: Sequence[Generation],
        *,
        dispatcher: Dispatcher,
        clock: Clock,
        form: Any = None,
    ) -> None:
        """`request_id` is its client's name for the request; `form` is how an HTTP call wants its
        answers written, None over gRPC.
        """
        request = generations[0].request
        self.request_id = request_id
        self.form = form
        self.caller: ApiKey | None = generations[0].caller
        self.num_prompt_tokens = [generation.num_prompt_tokens for generation in generations]
        self.prompts: dict[int, EchoedPrompt] = {}  # to be given back, by answer
        self.left_s = clock()  # when it was begun, or its last reader left
        self.is_over = False  # each step has been handed out
        self._dispatcher = dispatcher
        self._clock = clock
        self._generations: dict[int, Generation] = dict(enumerate(generations))
        self._steps: list[Step] = []
        self._indexes = bytearray()  # of their answers
        self.is_kept = True  # it may be taken up again
        self._was_read = False
        self._is_background = request.is_background
        self._readings: set[Task] = set()  # the newest goes on, others are about to end
        self._keeping: Task | None = None  # the one of these that is without a reader
        self._token_bytes = token_bytes(request.sampling.logprobs)
        self._num_bytes = STREAM_BYTES

    @property
    def generations(self) -> Sequence[Generation]:
        """Return the answers that are not handed out to their ends."""
        return [*self._generations.values()]

    @property
    def num_steps(self) -> int:
        """Return how many steps were handed out."""
        return len(self._steps)

    @property
    def num_answers(self) -> int:
        return len(self.num_prompt_tokens)

    @property
    def is_detached(self) -> bool:
        """Say whether it is without a reader."""
        return self._readings <= {self._keeping}

    @property
    def needs_no_reader(self) -> bool:
        """Say whether it is to come to its end, and be kept till then, without a reader, too."""
        return self._is_background and not self.is_over

    @property
    def num_bytes(self) -> int:
        """Return about how much memory it takes, with tokens that are not handed out yet."""
        num_generated = sum(one.num_generated for one in self._generations.values())
        return self._num_bytes + num_generated * self._token_bytes

    def step(self, number: int) -> tuple[int, Step]:
        """Return a step that was handed out, by its number from 0, and which answer's it is."""
        return self._indexes[number], self._steps[number]

    async def read(self, reader: StreamReader, num_had: int) -> bool:
        """Hand `reader` each step from number `num_had` on, until the last. The reader until
        now is superseded, and has False returned, as has a reader that stops reading.
        """
        if not self.is_kept:
            return False
        if self._was_read:
            metrics.STREAM_RETURNS.inc()
        self._was_read = True
        return await self._read(reader, num_had)

    async def keep_rest(self) -> None:
        """Keep what is left of answers until a reader comes: of a background response as it comes,
        of any other when nothing waits for its time, so that it takes no place any more.
        """
        ended = all(one.is_over and not one.keeps_its_pace for one in self._generations.values())
        if self._readings or self.is_over or not (ended or self._is_background):
            return
        left_s = self.left_s
        await self._read(_NoReader(), self.num_steps)
        if not self._is_background:
            self.left_s = left_s

    async def _read(self, reader: StreamReader, num_had: int) -> bool:
        former = tuple(self._readings)
        reading = asyncio.create_task(self._hand_out(reader, num_had, former))
        self._readings.add(reading)
        if isinstance(reader, _NoReader):
            self._keeping = reading
        try:
            await asyncio.wait([reading])
        finally:
            reading.cancel()
            await asyncio.wait([reading])
            self._readings.discard(reading)
            self.left_s = self._clock()
            if self.is_detached and not self.is_kept:
                self.let_go()
        if reading.cancelled():
            return False
        reading.result()
        return True

    def detach_stopped(self, now_s: float, timeout_s: float) -> None:
        """Take a reader that has taken nothing for so long for one that has left."""
        stopped = (one.reader_stopped_for_s(now_s) for one in self._generations.values())
        if max(stopped, default=0.0) >= timeout_s:
            for reading in self._readings:
                reading.cancel()

    def let_go(self) -> None:
        """Keep nothing any more. A reader that is there has the rest; without one it is aborted."""
        self.is_kept = False
        self._steps, self._indexes = [], bytearray()
        if self.is_detached:
            for task in self._readings:
                task.cancel()
            self._drop_rest()

    async def _hand_out(self, reader: StreamReader, num_had: int, former: Sequence[Task]) -> None:
        for task in former:
            task.cancel()
        if former:
            await asyncio.wait(former)
        steps, indexes = self._steps, self._indexes
        while num_had < len(steps):
            if not num_had % STEPS_AT_A_TIME:
                await asyncio.sleep(0)
                await reader.opened()
            reader.take(indexes[num_had], steps[num_had])
            num_had += 1
        if self.is_over:
            return
        try:
            rest = [self._rest_of(index, reader) for index in sorted(self._generations)]
            await side_by_side(rest)
        except _AnswerCancelledError as answer:
            self._end(reader, answer.index, answer.finish)
        except ServiceError as error:
            log.info("stream_failed", error_reason=error.reason, detail=str(error))
            self._end(reader, 0, error)
        except Exception as error:
            log.exception("stream_crashed")
            self._end(reader, 0, error)

    async def _rest_of(self, index: int, reader: StreamReader) -> None:
        """Hand out what is left of an answer."""
        generation = self._generations[index]
        await generation.write_to(_AnswerOutlet(self, index, reader))
        finish = generation.finish
        assert finish is not None
        if finish.reason is FinishReason.CANCELLED:
            raise _AnswerCancelledError(index, finish)
        self._num_bytes += generation.num_generated * self._token_bytes
        del self._generations[index]
        self._dispatcher.drop(generation)  # its place is free, though other answers go on
        if not self._generations:
            self._end(reader, index, finish)
        else:
            self.hand(reader, index, finish)

    def hand(self, reader: StreamReader, index: int, step: Step) -> None:
        """Keep the next step, and have `reader` take it."""
        if self.is_kept:
            self._steps.append(step)
            self._indexes.append(index)
        reader.take(index, step)

    def see_prompt(self, index: int) -> None:
        """Keep the prompt of an answer, if it is to be given back."""
        if index not in self.prompts and (prompt := self._generations[index].prompt):
            self.prompts[index] = prompt
            self._num_bytes += len(prompt.token_ids) * PROMPT_ID_BYTES + len(prompt.text)
            self._num_bytes += len(prompt.logprobs) * self._token_bytes

    def _end(self, reader: StreamReader, index: int, step: Step) -> None:
        self.is_over = True
        self._drop_rest()
        self.hand(reader, index, step)

    def _drop_rest(self) -> None:
        for generation in self._generations.values():
            self._dispatcher.drop(generation)
        self._generations.clear()


class _AnswerCancelledError(Exception):
    """An answer was cancelled, and all others are to end with it."""

    def __init__(self, index: int, finish: Finish) -> None:
        super().__init__()
        self.index, self.finish = index, finish


class _NoReader:
    """Takes all steps, and does nothing with them."""

    is_open = True

    async def opened(self) -> None:
        """Do nothing."""

    def take(self, index: int, step: Step) -> None:
        """Do nothing."""


class _AnswerOutlet:
    """Where one answer's tokens go while `reader` is there."""

    def __init__(self, stream: ResumableStream, index: int, reader: StreamReader) -> None:
        self._stream = stream
        self._index = index
        self._reader = reader

    @property
    def is_open(self) -> bool:
        return self._reader.is_open

    async def opened(self) -> None:
        await self._reader.opened()

    def write(self, tokens: Sequence[Token], *, as_one: bool) -> None:
        """Hand out one token after the other, however many there are: what is written depends on
        no time.
        """
        self._stream.see_prompt(self._index)
        for token in tokens:
            self._stream.hand(self._reader, self._index, token)
