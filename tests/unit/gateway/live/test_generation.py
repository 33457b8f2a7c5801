"""One live request between its executor and its reader, on a clock that the test moves."""

import asyncio
import gc
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from services.gateway.errors import LinkBrokenError, ReaderStoppedError
from services.gateway.live.generation import Generation
from services.gateway.live.pacer import Pacer
from services.gateway.live.reader import LOGPROB_BYTES, TOKEN_BYTES, ReaderLimits
from services.gateway.types import Delivery, GenerationRequest, RequestId, Token
from services.generation.conversation import ToolCallPart
from services.generation.finish import FinishReason
from services.generation.prompts import TextPrompt
from services.kit.errors import OverloadedError, ServiceError
from services.pacing.types import ServiceLevel

MAX_UNDELIVERED_TOKENS = 4
LIMITS = ReaderLimits(
    max_undelivered_tokens=MAX_UNDELIVERED_TOKENS,
    max_deposit_bytes=100 * TOKEN_BYTES,
    max_pace_tail_s=2.5,
)
ONE_A_SECOND = ServiceLevel(consumption_rate_tps=1.0)


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class NoTimer:
    """The test decides when time passes: no timer ever fires."""

    def cancel(self) -> None:
        """Do nothing."""


class Timer:
    """Keeps the callbacks that the pacer asks for; the test makes the newest happen."""

    def __init__(self) -> None:
        self._callbacks: list[Callable[[], None]] = []

    def __call__(self, delay_s: float, callback: Callable[[], None]) -> NoTimer:
        self._callbacks.append(callback)
        return NoTimer()

    def fire(self) -> None:
        self._callbacks.pop()()


def make_generation(
    level: ServiceLevel = ONE_A_SECOND,
    delivery: Delivery = Delivery.STREAMED,
    *,
    clock: Clock | None = None,
    pacer: Pacer | None = None,
) -> Generation:
    clock = clock or Clock()
    request = GenerationRequest(
        request_id=RequestId("r"),
        model="m",
        prompt=TextPrompt("Hi"),
        service_level=level,
        delivery=delivery,
    )
    generation = Generation(
        request,
        pacer=pacer or Pacer(clock=clock, timer=lambda delay_s, callback: NoTimer()),
        clock=clock,
        arrived_s=0.0,
        limits=LIMITS,
    )
    generation.accepted(5)
    return generation


class Listener:
    """Writes down what it hears."""

    def __init__(self) -> None:
        self.counts: list[int] = []
        self.holds: list[bool] = []
        self.num_taken = 0
        self.errors: list[ServiceError] = []
        self.keeps = False  # what is lost

    def taken(self) -> None:
        self.num_taken += 1

    def lost(self, error: ServiceError) -> ServiceError | None:
        self.errors.append(error)
        return None if self.keeps else error

    def progressed(self, num_delivered: int) -> None:
        self.counts.append(num_delivered)

    def lags(self, hold: bool) -> None:
        self.holds.append(hold)


def make_tokens(num_tokens: int) -> list[Token]:
    return [Token(index, index, "x") for index in range(num_tokens)]


async def read(generation: Generation) -> list[int]:
    """Return how many tokens each batch had."""
    return [len(batch) async for batch in generation.batches()]


async def test_what_is_held_back_goes_out_when_generation_ends() -> None:
    generation = make_generation()
    generation.extended(make_tokens(4), 0.0)  # three of them are held back
    generation.ended(FinishReason.LENGTH)

    assert await read(generation) == [4]
    assert generation.finish is not None
    assert generation.finish.reason is FinishReason.LENGTH
    assert (generation.finish.num_prompt_tokens, generation.finish.num_output_tokens) == (5, 4)


async def test_with_a_paced_tail_the_rest_keeps_waiting() -> None:
    generation = make_generation(ServiceLevel(consumption_rate_tps=1.0, pace_tail=True))
    generation.extended(make_tokens(4), 0.0)
    generation.ended(FinishReason.STOP)

    batches = generation.batches()
    assert len(await anext(batches)) == 1
    second = asyncio.ensure_future(anext(batches))
    await asyncio.sleep(0)
    assert not second.done()
    generation.cancel()
    with pytest.raises(StopAsyncIteration):
        await second


async def test_a_call_goes_out_at_once_with_the_text_before_it() -> None:
    generation = make_generation()
    generation.extended(make_tokens(4), 0.0)  # three of them are held back
    batches = generation.batches()
    assert len(await anext(batches)) == 1

    thought = Token(4, 4, "", reasoning="hm", is_read=False)
    generation.extended([thought], 0.0)
    call = Token(5, 5, "", tool_calls=(ToolCallPart(0, "c", "f"),), is_read=False)
    generation.extended([call], 0.0)
    rest = asyncio.ensure_future(anext(batches))
    await turns()

    assert rest.done()
    assert [token.index for token in rest.result()] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("level", [ServiceLevel(), ServiceLevel(slo_ttft_s=0.1)])
async def test_without_a_rate_or_token_bound_nothing_is_held_back(level) -> None:
    generation = make_generation(level)
    generation.extended(make_tokens(4), 0.0)

    assert len(await anext(generation.batches())) == 4


async def test_a_whole_answer_is_never_paced() -> None:
    generation = make_generation(ONE_A_SECOND, Delivery.WHOLE)
    generation.extended(make_tokens(4), 0.0)

    assert len(await anext(generation.batches())) == 4


async def test_a_failure_comes_after_the_tokens_that_are_here() -> None:
    generation = make_generation()
    generation.extended(make_tokens(3), 0.0)
    generation.failed(LinkBrokenError("gone"))

    batches = generation.batches()
    assert len(await anext(batches)) == 3
    with pytest.raises(LinkBrokenError):
        await anext(batches)
    assert generation.finish is None


async def test_an_answer_that_is_complete_does_not_fail_any_more() -> None:
    generation = make_generation(ServiceLevel(consumption_rate_tps=1.0, pace_tail=True))
    generation.extended(make_tokens(4), 0.0)  # three of them are held back
    generation.ended(FinishReason.STOP)
    generation.failed(LinkBrokenError("the drain takes too long"))

    assert await read(generation) == [4]
    assert generation.finish is not None
    assert generation.finish.reason is FinishReason.STOP


async def test_a_cancelled_request_drops_what_the_reader_does_not_have() -> None:
    generation = make_generation()
    generation.extended(make_tokens(3), 0.0)
    generation.cancel()
    generation.failed(LinkBrokenError("too late"))

    assert await read(generation) == []
    assert generation.finish is not None
    assert generation.finish.reason is FinishReason.CANCELLED
    assert generation.finish.num_output_tokens == 3


async def test_a_batch_counts_as_delivered_when_the_next_is_asked_for() -> None:
    generation = make_generation(ServiceLevel())
    generation.held_by(listener := Listener())
    batches = generation.batches()
    generation.extended(make_tokens(2), 0.0)

    await anext(batches)
    assert listener.counts == []

    generation.extended([Token(2, 2, "")], 0.0)  # a token without text is one too
    await anext(batches)
    assert listener.counts == [2]

    generation.ended(FinishReason.STOP)
    with pytest.raises(StopAsyncIteration):
        await anext(batches)
    assert listener.counts == [2, 3]


async def test_a_refusal_is_raised_and_can_be_forgotten() -> None:
    request = GenerationRequest(request_id=RequestId("r"), model="m", prompt=TextPrompt("Hi"))
    pacer = Pacer(clock=Clock(), timer=lambda delay_s, callback: NoTimer())
    generation = Generation(request, pacer=pacer, clock=Clock(), arrived_s=0.0, limits=LIMITS)

    generation.rejected(OverloadedError("full"))
    with pytest.raises(OverloadedError):
        await generation.answered()

    generation.reset()
    generation.accepted(3)
    await generation.answered()
    assert generation.num_prompt_tokens == 3


async def test_who_has_all_tokens_is_waited_for_to_take_the_ending() -> None:
    generation = make_generation(ServiceLevel())
    generation.ended(FinishReason.STOP)

    assert await read(generation) == []

    assert generation.reader_stopped_for_s(50.0) == 50.0


class Outlet:
    """Writes down what it takes; the test opens and closes it."""

    def __init__(self) -> None:
        self.written: list[tuple[int, bool]] = []  # how many tokens, and whether as one
        self._open = asyncio.Event()
        self._open.set()

    @property
    def is_open(self) -> bool:
        return self._open.is_set()

    async def opened(self) -> None:
        await self._open.wait()

    def write(self, tokens: Sequence[Token], *, as_one: bool) -> None:
        self.written.append((len(tokens), as_one))

    def set_open(self, is_open: bool) -> None:
        if is_open:
            self._open.set()
        else:
            self._open.clear()


async def turns() -> None:
    """Let other tasks run until they wait."""
    for _ in range(5):
        await asyncio.sleep(0)


async def test_an_open_outlet_takes_each_token_in_the_moment_that_it_is_due() -> None:
    generation = make_generation(ServiceLevel())
    generation.held_by(listener := Listener())
    outlet = Outlet()
    generation.extended(make_tokens(2), 0.0)  # before there is an outlet
    writing = asyncio.ensure_future(generation.write_to(outlet))
    await turns()
    assert outlet.written == [(2, False)]

    generation.extended([Token(2, 2, "x")], 0.0)

    assert outlet.written == [(2, False), (1, False)]  # no other task had a turn
    assert listener.counts == [2, 3]
    generation.ended(FinishReason.STOP)
    await writing
    assert generation.finish is not None
    assert generation.finish.num_output_tokens == 3


async def test_tokens_that_come_due_while_an_outlet_is_closed_go_out_as_one() -> None:
    generation = make_generation(ServiceLevel())
    generation.held_by(listener := Listener())
    outlet = Outlet()
    writing = asyncio.ensure_future(generation.write_to(outlet))
    await turns()

    outlet.set_open(False)
    for index in range(MAX_UNDELIVERED_TOKENS):
        generation.extended([Token(index, index, "x")], 0.0)
        await turns()
    assert outlet.written == []
    assert listener.holds == [True]
    assert generation.reader_stopped_for_s(50.0) == 50.0

    outlet.set_open(True)
    await turns()
    assert outlet.written == [(MAX_UNDELIVERED_TOKENS, True)]
    assert listener.holds == [True, False]
    assert generation.reader_stopped_for_s(50.0) == 0.0

    generation.extended([Token(9, 9, "x"), Token(10, 10, "x")], 0.0)
    assert outlet.written[1:] == [(2, False)]
    writing.cancel()


async def test_what_comes_due_while_older_tokens_wait_for_their_turn_goes_out_after_them() -> None:
    generation = make_generation(ServiceLevel())
    outlet = Outlet()
    writing = asyncio.ensure_future(generation.write_to(outlet))
    await turns()
    outlet.set_open(False)
    generation.extended(make_tokens(1), 0.0)
    outlet.set_open(True)
    generation.extended([Token(1, 1, "x")], 0.0)  # open again, but nobody was told

    assert outlet.written == []
    await turns()
    assert outlet.written == [(2, False)]
    writing.cancel()


async def test_nothing_is_written_to_an_outlet_that_was_given_up() -> None:
    generation = make_generation(ServiceLevel())
    outlet = Outlet()
    writing = asyncio.ensure_future(generation.write_to(outlet))
    await turns()
    writing.cancel()
    await turns()

    generation.extended(make_tokens(1), 0.0)

    assert outlet.written == []


async def test_with_a_paced_tail_writing_ends_with_the_last_token() -> None:
    time, timer = Clock(), Timer()
    pacer = Pacer(clock=time, timer=timer)
    generation = make_generation(
        ServiceLevel(consumption_rate_tps=1.0, pace_tail=True), clock=time, pacer=pacer
    )
    outlet = Outlet()
    writing = asyncio.ensure_future(generation.write_to(outlet))
    await turns()
    generation.extended(make_tokens(2), 0.0)  # the second is held back
    generation.ended(FinishReason.STOP)
    await turns()
    assert not writing.done()

    time.now_s = 1.0
    timer.fire()
    await writing

    assert outlet.written == [(1, False), (1, False)]


async def test_a_paced_tail_is_written_without_waking_the_task_before_its_end() -> None:
    time, timer = Clock(), Timer()
    generation = make_generation(
        ServiceLevel(consumption_rate_tps=1.0, pace_tail=True),
        clock=time,
        pacer=Pacer(clock=time, timer=timer),
    )
    outlet = Outlet()
    writing = asyncio.ensure_future(generation.write_to(outlet))
    await turns()
    generation.extended(make_tokens(3), 0.0)
    generation.ended(FinishReason.STOP)
    await turns()
    asleep = generation._waiter

    time.now_s = 1.0
    timer.fire()
    await turns()

    assert len(outlet.written) == 2
    assert generation._waiter is asleep
    writing.cancel()


async def test_a_finished_request_leaves_no_work_to_the_garbage_collector() -> None:
    generation = make_generation(ServiceLevel())
    generation.extended(make_tokens(1), 0.0)
    generation.ended(FinishReason.STOP)
    await generation.write_to(Outlet())
    generation.close()
    still_there = weakref.ref(generation)

    gc.disable()
    try:
        del generation
        assert still_there() is None
    finally:
        gc.enable()


async def test_an_outlet_that_fails_ends_its_own_request_only() -> None:
    class Broken(Outlet):
        def write(self, tokens: Sequence[Token], *, as_one: bool) -> None:
            raise ValueError("not writable")

    time, timer = Clock(), Timer()
    pacer = Pacer(clock=time, timer=timer)
    broken, sound = (make_generation(clock=time, pacer=pacer) for _ in range(2))
    outlet = Outlet()
    for generation in (broken, sound):
        generation.extended(make_tokens(1), 0.0)
    await anext(broken.batches())  # has its first token
    failing = asyncio.ensure_future(broken.write_to(Broken()))
    writing = asyncio.ensure_future(sound.write_to(outlet))
    await turns()
    for generation in (broken, sound):
        generation.extended([Token(1, 1, "x")], 0.0)  # is due at 1

    time.now_s = 1.0
    timer.fire()

    with pytest.raises(ValueError, match="not writable"):
        await failing
    assert broken.result == "failed"
    assert outlet.written == [(1, False), (1, False)]
    pacer.check_integrity()
    writing.cancel()


async def test_a_reader_that_lags_has_generation_held_until_it_has_caught_up() -> None:
    generation = make_generation(ServiceLevel())
    generation.held_by(listener := Listener())
    batches = generation.batches()
    generation.extended(make_tokens(MAX_UNDELIVERED_TOKENS - 1), 0.0)
    await anext(batches)
    assert listener.holds == []

    generation.extended([Token(3, 3, "x")], 0.0)  # three are being written
    assert listener.holds == [True]

    await anext(batches)  # the three are written
    assert listener.holds == [True, False]


async def test_an_executor_that_takes_over_hears_that_generation_should_be_held() -> None:
    generation = make_generation(ServiceLevel())
    generation.extended(make_tokens(MAX_UNDELIVERED_TOKENS), 0.0)
    generation.held_by(listener := Listener())
    assert listener.holds == []

    generation.accepted(5)

    assert (listener.num_taken, listener.holds) == (1, [True])


async def test_tokens_that_are_held_back_hold_generation_when_they_are_too_many() -> None:
    """It goes on when half of what may be held back is left."""
    timer, clock = Timer(), Clock()
    generation = make_generation(clock=clock, pacer=Pacer(clock=clock, timer=timer))
    generation.held_by(listener := Listener())
    writing = asyncio.create_task(generation.write_to(Outlet()))
    await turns()
    tokens = make_tokens(101)
    generation.extended(tokens[:100], 0.0)  # one is due
    assert listener.holds == []

    generation.extended(tokens[100:], 0.0)
    assert listener.holds == [True]

    for second in range(1, 50):
        clock.now_s = second
        timer.fire()
    assert listener.holds == [True]

    clock.now_s = 50.0
    timer.fire()
    assert listener.holds == [True, False]
    writing.cancel()


def test_fewer_tokens_with_probabilities_may_be_held_back() -> None:
    limits = replace(LIMITS, max_deposit_bytes=10 * (TOKEN_BYTES + 21 * LOGPROB_BYTES))

    assert limits.max_deposited_tokens(20) == 10
    assert limits.max_deposited_tokens(None) > 100
    assert replace(LIMITS, max_deposit_bytes=1).max_deposited_tokens(20) == 1


async def test_a_paced_tail_has_an_end() -> None:
    """Of six tokens a second apart the last three would be due after 2.5 s, at 3, 4 and 5."""
    timer, clock, outlet = Timer(), Clock(), Outlet()
    level = ServiceLevel(consumption_rate_tps=1.0, pace_tail=True)
    generation = make_generation(level, clock=clock, pacer=Pacer(clock=clock, timer=timer))
    writing = asyncio.create_task(generation.write_to(outlet))
    await turns()
    generation.extended(make_tokens(6), 0.0)
    generation.ended(FinishReason.STOP)

    for clock.now_s in (1.0, 2.0, 2.4):
        timer.fire()
    assert [num_tokens for num_tokens, _ in outlet.written] == [1, 1, 1]

    clock.now_s = 2.5
    timer.fire()
    await writing
    assert [num_tokens for num_tokens, _ in outlet.written] == [1, 1, 1, 3]


async def test_a_paced_tail_ends_before_a_token_that_is_due_much_later() -> None:
    clock = Clock()
    level = ServiceLevel(slo_tbt_s=3_600.0, pace_tail=True)
    delays_s: list[float] = []

    def call_later(delay_s: float, callback: Callable[[], None]) -> NoTimer:
        delays_s.append(delay_s)
        return NoTimer()

    pacer = Pacer(clock=clock, timer=call_later)
    generation = make_generation(level, clock=clock, pacer=pacer)
    generation.extended(make_tokens(3), 0.0)

    generation.ended(FinishReason.STOP)

    assert delays_s == [3_600.0, 2.5]
    pacer.check_integrity()


async def test_the_time_without_reading_counts_while_something_is_to_be_taken() -> None:
    generation = make_generation(ServiceLevel())
    batches = generation.batches()
    assert generation.reader_stopped_for_s(50.0) == 0.0  # nothing was generated so far

    generation.extended(make_tokens(1), 0.0)
    await anext(batches)  # is being written at 0
    assert generation.reader_stopped_for_s(50.0) == 50.0

    generation.extended([Token(1, 1, "x")], 0.0)
    generation.ended(FinishReason.STOP)
    assert len(await anext(batches)) == 1
    with pytest.raises(StopAsyncIteration):
        await anext(batches)
    assert generation.reader_stopped_for_s(50.0) == 50.0  # the ending is to be written


@pytest.mark.parametrize("is_over", [False, True], ids=["generating", "complete"])
async def test_who_was_given_up_hears_why_and_never_that_the_answer_is_complete(is_over) -> None:
    generation = make_generation(ServiceLevel())
    batches = generation.batches()
    generation.extended(make_tokens(2), 0.0)
    await anext(batches)
    generation.extended([Token(2, 2, "x")], 0.0)
    if is_over:
        generation.ended(FinishReason.STOP)
    generation.give_up(ReaderStoppedError("gone"))

    with pytest.raises(ReaderStoppedError):
        await anext(batches)
    assert generation.finish is None
    assert generation.result == "abandoned"


async def test_an_answer_that_goes_on_elsewhere_keeps_its_pace_and_hears_of_no_error() -> None:
    clock, timer = Clock(), Timer()
    generation = make_generation(clock=clock, pacer=Pacer(clock=clock, timer=timer))
    generation.held_by(listener := Listener())
    listener.keeps = True
    outlet = Outlet()
    writing = asyncio.create_task(generation.write_to(outlet))
    generation.extended(make_tokens(3), 0.0)  # two of them are held back
    await turns()

    generation.failed(LinkBrokenError("gone"))
    await turns()
    assert [type(error) for error in listener.errors] == [LinkBrokenError]
    assert outlet.written == [(1, False)]
    assert generation.runs_dry_s == 3.0
    assert [generation.is_waited_for(at_s) for at_s in (2.9, 3.0)] == [False, True]

    clock.now_s = 1.0
    timer.fire()
    assert outlet.written == [(1, False)] * 2
    generation.extended([Token(3, 3, "x")], 1.0)
    generation.ended(FinishReason.STOP)
    await writing
    assert sum(number for number, _ in outlet.written) == 4
    assert generation.finish is not None
    assert generation.finish.num_output_tokens == 4


async def test_an_ending_that_was_asked_for_to_move_an_answer_does_not_end_it() -> None:
    generation = make_generation()
    generation.held_by(listener := Listener())
    listener.keeps = True
    generation.extended(make_tokens(1), 0.0)
    generation.ended(FinishReason.CANCELLED)
    assert not generation.is_over

    listener.keeps = False
    generation.ended(FinishReason.CANCELLED)
    assert generation.is_over


async def test_a_whole_answer_begins_again_with_its_first_token() -> None:
    generation = make_generation(delivery=Delivery.WHOLE)
    generation.extended(make_tokens(3), 0.0)
    batches = generation.batches()
    assert len(await anext(batches)) == 3
    rest = asyncio.ensure_future(anext(batches))
    await turns()
    assert generation.is_waited_for(0.0)

    generation.begin_again()
    generation.extended(make_tokens(2), 0.0)
    generation.ended(FinishReason.STOP)

    assert [token.index for token in await rest] == [0, 1]
    assert generation.num_generated == 2


async def test_a_reader_that_is_held_or_has_tokens_to_take_waits_for_none() -> None:
    generation = make_generation(ServiceLevel())
    assert generation.is_waited_for(0.0)
    generation.extended(make_tokens(1), 0.0)
    assert not generation.is_waited_for(9.0)
    generation.cancel()
    assert not generation.is_waited_for(9.0)
