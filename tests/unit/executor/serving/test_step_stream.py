"""Frames of one gateway: merged when the writer lags, complete and in order always."""

import asyncio
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.executor.convert import frame_to_proto
from services.executor.serving.step_stream import MAX_FRAME_BYTES, Acceptance, Frame, StepStream
from services.executor.types import Delta, RejectCode, Rejection, Token
from services.generation.finish import FinishReason
from services.generation.logprobs import EchoedPrompt, Logprob, TokenLogprobs
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
        stream.accept(request_id, Acceptance(7))
    await take(stream)

    for request_id in ("a", "b", "c"):
        stream.push(request_id, make_delta(1))
    frame = await take(stream)

    assert frame.sequence == 1
    assert list(frame.outputs) == ["a", "b", "c"]
    assert frame.num_tokens == 3


async def test_steps_that_the_writer_missed_are_appended_and_keep_their_first_index() -> None:
    stream = StepStream()
    stream.accept("a", Acceptance(1))
    stream.push("a", make_delta(10))
    first = await take(stream)
    stream.push("a", make_delta(11))
    stream.push("a", replace(make_delta(12, ending=FinishReason.LENGTH), num_reasoning_tokens=2))
    second = await take(stream)

    assert first.accepted == {"a": Acceptance(1)}
    assert first.outputs["a"].first_token_index == 0
    assert second.outputs["a"].first_token_index == 1
    assert second.outputs["a"].tokens == [Token(11, "<11>"), Token(12, "<12>")]
    assert second.outputs["a"].ending is FinishReason.LENGTH
    assert second.outputs["a"].num_reasoning_tokens == 2


async def test_an_ending_without_tokens_tells_how_many_were_sent() -> None:
    stream = StepStream()
    stream.accept("a", Acceptance(1))
    stream.push("a", make_delta(1, 2, 3))
    await take(stream)

    stream.push("a", make_delta(ending=FinishReason.CANCELLED))

    assert (await take(stream)).outputs["a"].first_token_index == 3


async def test_an_id_is_known_until_its_ending_was_taken() -> None:
    stream = StepStream()
    stream.accept("a", Acceptance(1))
    stream.push("a", make_delta(1, ending=FinishReason.STOP))
    assert stream.knows("a")

    await take(stream)

    assert not stream.knows("a")
    stream.accept("a", Acceptance(1))
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
    stream.accept("a", Acceptance(1))
    stream.end(UnavailableError("gone"))

    assert (await take(stream)).accepted == {"a": Acceptance(1)}
    with pytest.raises(UnavailableError):
        await stream.next_frame()


async def test_the_first_end_counts() -> None:
    stream = StepStream()
    stream.end()
    stream.end(UnavailableError("too late"))

    assert await stream.next_frame() is None


async def test_what_is_too_much_for_a_message_goes_into_the_next_ones() -> None:
    """Five tokens of a third of a message, of two requests, are five thirds, then the rest."""
    stream = StepStream()
    for request_id in ("a", "b"):
        stream.accept(request_id, Acceptance(1))
        texts = (Token(k, "\N{GRINNING FACE}" * (MAX_FRAME_BYTES // 12)) for k in range(5))
        stream.push(request_id, Delta(tuple(texts), FinishReason.STOP))

    frames = [await take(stream) for _ in range(4)]

    assert [frame.sequence for frame in frames] == [0, 1, 2, 3]
    ids = [
        (request_id, output.first_token_index, [token.id for token in output.tokens])
        for frame in frames
        for request_id, output in frame.outputs.items()
    ]
    assert ids == [
        ("a", 0, [0, 1, 2]),
        ("a", 3, [3, 4]),
        ("b", 0, [0]),
        ("b", 1, [1, 2, 3]),
        ("b", 4, [4]),
    ]
    assert max(frame_to_proto(frame).ByteSize() for frame in frames) <= 4 / 3 * MAX_FRAME_BYTES
    endings = [[output.ending for output in frame.outputs.values()] for frame in frames]
    assert endings == [[None], [FinishReason.STOP, None], [None], [FinishReason.STOP]]
    assert not stream.knows("a")
    assert not stream._has_news()


async def test_an_echo_too_large_for_a_message_comes_in_pieces_before_the_tokens() -> None:
    top = tuple(Logprob(k, "token", -1.0) for k in range(20))
    ids = tuple(range(200_000, 300_000))  # the larger part of two messages
    prompt = EchoedPrompt("Hi", tuple(TokenLogprobs(top[0], top) for _ in range(1_000)), ids)
    stream = StepStream()
    stream.accept("a", Acceptance(1_000))
    stream.push("a", make_delta(1, ending=FinishReason.STOP), prompt=prompt)

    outputs, sizes = [], []
    while not outputs or outputs[-1].ending is None:
        frame = await take(stream)
        outputs.append(frame.outputs["a"])
        sizes.append(frame_to_proto(frame).ByteSize())

    pieces = [output.prompt for output in outputs]
    assert len(pieces) > 2
    assert sum(pieces[1:], start=pieces[0]) == prompt
    assert [len(piece.token_ids) for piece in pieces[:3]] == [65_534, 34_466, 0]  # 4 bytes each
    assert [len(output.tokens) for output in outputs] == [0] * (len(outputs) - 1) + [1]
    assert max(sizes) <= MAX_FRAME_BYTES


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
            stream.accept(request_id, Acceptance(1))
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


async def test_an_answer_that_was_begun_elsewhere_goes_on_at_its_index() -> None:
    stream = StepStream()
    stream.accept("a", Acceptance(1), num_known=17)
    stream.push("a", make_delta(1))
    first = await take(stream)
    stream.push("a", make_delta(2, ending=FinishReason.STOP))
    second = await take(stream)

    assert first.outputs["a"].first_token_index == 17
    assert second.outputs["a"].first_token_index == 18


async def test_a_beat_is_a_frame_whether_or_not_there_is_news() -> None:
    steps = iter([4, 9, 9])
    stream = StepStream(lambda: next(steps))
    stream.beat()
    silent = await take(stream)
    stream.accept("a", Acceptance(1))
    stream.beat()
    telling = await take(stream)

    assert (silent.has_news, silent.num_engine_steps, silent.sequence) == (False, 4, 0)
    assert (telling.has_news, telling.num_engine_steps, telling.sequence) == (True, 9, 1)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(stream.next_frame(), timeout=0.01)


async def test_who_leaves_says_so_at_once_and_from_then_on() -> None:
    stream = StepStream()
    stream.accept("a", Acceptance(1))
    before = await take(stream)
    stream.leave()
    told = await take(stream)
    stream.push("a", make_delta(1))
    after = await take(stream)

    assert [frame.is_leaving for frame in (before, told, after)] == [False, True, True]
