"""One live request between its executor and its reader, on a clock that the test moves."""

import asyncio

import pytest

from services.gateway.errors import LinkBrokenError, ReaderStoppedError
from services.gateway.generation import Generation
from services.gateway.pacer import Pacer
from services.gateway.types import (
    Delivery,
    FinishReason,
    GenerationRequest,
    RequestId,
    TextPrompt,
    Token,
)
from services.kit.errors import OverloadedError
from services.pacing.types import ServiceLevel

MAX_UNDELIVERED_TOKENS = 4
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


def make_generation(
    level: ServiceLevel = ONE_A_SECOND, delivery: Delivery = Delivery.STREAMED
) -> Generation:
    clock = Clock()
    request = GenerationRequest(
        request_id=RequestId("r"),
        model="m",
        prompt=TextPrompt("Hi"),
        service_level=level,
        delivery=delivery,
    )
    pacer = Pacer(clock=clock, timer=lambda delay_s, callback: NoTimer())
    generation = Generation(
        request,
        pacer=pacer,
        clock=clock,
        arrived_s=0.0,
        max_undelivered_tokens=MAX_UNDELIVERED_TOKENS,
    )
    generation.accepted(5)
    return generation


class Listener:
    """Writes down what it hears."""

    def __init__(self) -> None:
        self.counts: list[int] = []
        self.holds: list[bool] = []

    def progressed(self, request_id: RequestId, num_delivered: int) -> None:
        self.counts.append(num_delivered)

    def lags(self, request_id: RequestId, hold: bool) -> None:
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
    generation.listener = listener = Listener()
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
    generation = Generation(
        request, pacer=pacer, clock=Clock(), arrived_s=0.0, max_undelivered_tokens=1
    )

    generation.rejected(OverloadedError("full"))
    with pytest.raises(OverloadedError):
        await generation.answered()

    generation.reset()
    generation.accepted(3)
    await generation.answered()
    assert generation.num_prompt_tokens == 3


async def test_who_has_all_of_an_answer_is_waited_for_no_more() -> None:
    generation = make_generation(ServiceLevel())
    generation.ended(FinishReason.STOP)
    assert await read(generation) == []
    assert generation.reader_stopped_for_s(50.0) == 50.0  # the ending is to be written

    generation.ending_taken()

    assert generation.reader_stopped_for_s(50.0) == 0.0


async def test_tokens_that_come_while_a_batch_is_written_are_late_for_it() -> None:
    generation = make_generation(ServiceLevel())
    batches = generation.batches()
    generation.extended(make_tokens(1), 0.0)
    await anext(batches)
    assert not generation.is_lagging

    generation.extended([Token(1, 1, "x"), Token(2, 2, "x")], 0.0)  # nobody asked yet
    assert len(await anext(batches)) == 2
    assert generation.is_lagging

    reading = asyncio.ensure_future(anext(batches))
    await asyncio.sleep(0)
    generation.extended([Token(3, 3, "x"), Token(4, 4, "x")], 0.0)  # as soon as they are asked for
    assert len(await reading) == 2
    assert not generation.is_lagging


async def test_a_reader_that_lags_has_generation_held_until_it_has_caught_up() -> None:
    generation = make_generation(ServiceLevel())
    generation.listener = listener = Listener()
    batches = generation.batches()
    generation.extended(make_tokens(MAX_UNDELIVERED_TOKENS - 1), 0.0)
    await anext(batches)
    assert listener.holds == []

    generation.extended([Token(3, 3, "x")], 0.0)  # three are being written
    assert listener.holds == [True]

    await anext(batches)  # the three are written
    assert listener.holds == [True, False]


async def test_tokens_that_are_held_back_hold_nothing() -> None:
    generation = make_generation(ONE_A_SECOND)
    generation.listener = listener = Listener()
    generation.extended(make_tokens(100), 0.0)  # one is due

    assert listener.holds == []


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
