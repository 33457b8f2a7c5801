"""Frames of one gateway: merged when the writer lags, complete and in order always."""

import asyncio
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.executor.serving.step_stream import Frame, StepStream
from services.executor.types import Delta, RejectCode, Rejection, Token
from services.generation.finish import FinishReason
from services.kit.errors import UnavailableError

BUSY = Rejection(code=RejectCode.OVERLOADED, message="busy")


def make_delta(*ids: int, ending: FinishReason | None = None) -> Delta:
    return Delta(tuple(Token(id, f"<{id}>") for id in ids), ending)


async def take(stream: StepStream) -> Frame:
    frame = await asyncio.wait_for(stream.next_frame(), timeout=60)
    assert frame is not None
    return frame


async def test_one_step_of_all_requests_is_one_frame() -> None:
    stream = StepStream()
    for request_id in ("a", "b", "c"):
        stream.accept(request_id, num_prompt_tokens=7)
    await take(stream)

    for request_id in ("a", "b", "c"):
        stream.push(request_id, make_delta(1))
    frame = await take(stream)

    assert frame.sequence == 1
    assert list(frame.outputs) == ["a", "b", "c"]
    assert frame.num_tokens == 3
    assert stream.num_pending_tokens == 0


async def test_steps_that_the_writer_missed_are_appended_and_keep_their_first_index() -> None:
    stream = StepStream()
    stream.accept("a", num_prompt_tokens=1)
    stream.push("a", make_delta(10))
    first = await take(stream)
    stream.push("a", make_delta(11))
    stream.push("a", replace(make_delta(12, ending=FinishReason.LENGTH), num_reasoning_tokens=2))
    second = await take(stream)

    assert first.accepted == {"a": 1}
    assert first.outputs["a"].first_token_index == 0
    assert second.outputs["a"].first_token_index == 1
    assert second.outputs["a"].tokens == [Token(11, "<11>"), Token(12, "<12>")]
    assert second.outputs["a"].ending is FinishReason.LENGTH
    assert second.outputs["a"].num_reasoning_tokens == 2


async def test_an_ending_without_tokens_tells_how_many_were_sent() -> None:
    stream = StepStream()
    stream.accept("a", num_prompt_tokens=1)
    stream.push("a", make_delta(1, 2, 3))
    await take(stream)

    stream.push("a", make_delta(ending=FinishReason.CANCELLED))

    assert (await take(stream)).outputs["a"].first_token_index == 3


async def test_an_id_is_known_until_its_ending_was_taken() -> None:
    stream = StepStream()
    stream.accept("a", num_prompt_tokens=1)
    stream.push("a", make_delta(1, ending=FinishReason.STOP))
    assert stream.knows("a")

    await take(stream)

    assert not stream.knows("a")
    stream.accept("a", num_prompt_tokens=1)
    stream.push("a", make_delta(5))
    assert (await take(stream)).outputs["a"].first_token_index == 0


async def test_the_writer_sleeps_until_there_is_news() -> None:
    stream = StepStream()
    writer = asyncio.create_task(stream.next_frame())
    await asyncio.sleep(0)
    assert not writer.done()

    stream.reject("a", BUSY)

    frame = await asyncio.wait_for(writer, timeout=60)
    assert frame is not None
    assert frame.rejected == [("a", BUSY)]


async def test_what_is_pending_is_taken_before_the_end() -> None:
    stream = StepStream()
    stream.accept("a", num_prompt_tokens=1)
    stream.end(UnavailableError("gone"))

    assert (await take(stream)).accepted == {"a": 1}
    with pytest.raises(UnavailableError):
        await stream.next_frame()


async def test_the_first_end_counts() -> None:
    stream = StepStream()
    stream.end()
    stream.end(UnavailableError("too late"))

    assert await stream.next_frame() is None


@given(st.lists(st.one_of(st.none(), st.sampled_from("abc")), max_size=60))
def test_a_receiver_rebuilds_every_token_whenever_the_writer_reads(steps: list[str | None]) -> None:
    """None is a read; a letter is one token of that request."""

    async def replay() -> None:
        stream = StepStream()
        pushed: dict[str, list[int]] = {request_id: [] for request_id in "abc"}
        received: dict[str, list[int]] = {request_id: [] for request_id in "abc"}
        sequences = []

        async def read() -> None:
            if not stream._has_news():
                return
            frame = await take(stream)
            sequences.append(frame.sequence)
            for request_id, output in frame.outputs.items():
                assert output.first_token_index == len(received[request_id])
                received[request_id] += [token.id for token in output.tokens]

        for request_id in "abc":
            stream.accept(request_id, num_prompt_tokens=1)
        for number, step in enumerate(steps):
            if step is None:
                await read()
            else:
                pushed[step].append(number)
                stream.push(step, make_delta(number))
        await read()
        assert received == pushed
        assert sequences == list(range(len(sequences)))

    asyncio.run(replay())
