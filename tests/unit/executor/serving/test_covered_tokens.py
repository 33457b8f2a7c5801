"""Tokens that no reader can want before the next beat wait for it: no reader has one later."""

import asyncio
import math
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.executor.serving.request_trace import RequestTrace
from services.executor.serving.step_stream import (
    BEAT_S,
    MAX_COVERED_TOKENS,
    Acceptance,
    StepStream,
)
from services.executor.serving.streamed_request import COVER_S, StreamedRequest
from services.executor.types import Delta, Submission, Token
from services.generation.finish import FinishReason
from services.generation.prompts import TextPrompt
from services.kit.telemetry.tracing import NO_TRACING
from services.pacing.deposit import due_times_s
from services.pacing.types import NO_SERVICE_LEVEL, Release, ServiceLevel

REPORT_S = 0.3  # from one delivered count to the next, and its way


def make_live(
    level: ServiceLevel, *, num_delivered: int = 0, reads: bool = True
) -> StreamedRequest:
    submission = Submission(
        request_id="a", generation=1, model="m", prompt=TextPrompt(text="hi"), service_level=level
    )
    live = StreamedRequest(
        submission=submission,
        trace=RequestTrace(submission, NO_TRACING),
        num_delivered=num_delivered,
        reads=reads,
    )
    live.pace(level)
    return live


def make_delta(number: int = 1, *, ending: FinishReason | None = None) -> Delta:
    return Delta((Token(7, "t"),) * number, ending)


async def opened(*request_ids: str, num_known: int = 100) -> StepStream:
    """Return a stream whose gateway has so many tokens of each request."""
    stream = StepStream()
    for request_id in request_ids:
        stream.accept(request_id, Acceptance(1), num_known=num_known)
    assert await stream.next_frame() is not None
    return stream


async def sizes(stream: StepStream) -> dict[str, int] | None:
    """Return how many tokens of each request the writer has now; None: it sleeps."""
    writer = asyncio.create_task(stream.next_frame())
    await asyncio.sleep(0)
    if not writer.done():
        writer.cancel()
        return None
    frame = writer.result()
    assert frame is not None
    return {request_id: len(output.tokens) for request_id, output in frame.outputs.items()}


async def test_covered_tokens_wait_for_the_beat() -> None:
    stream = await opened("a")
    for _ in range(3):
        stream.push("a", make_delta(), num_covering=100)
    assert await sizes(stream) is None

    stream.beat()

    assert await sizes(stream) == {"a": 3}


async def test_covered_tokens_go_with_those_that_are_not() -> None:
    stream = await opened("a", "b")
    stream.push("a", make_delta(), num_covering=100)
    assert await sizes(stream) is None

    stream.push("b", make_delta(), num_covering=101)

    assert await sizes(stream) == {"a": 1, "b": 1}


async def test_an_ending_waits_for_nothing() -> None:
    stream = await opened("a")
    stream.push("a", make_delta(ending=FinishReason.STOP), num_covering=0)

    assert await sizes(stream) == {"a": 1}


async def test_many_covered_tokens_do_not_wait() -> None:
    stream = await opened("a", "b")
    for _ in range(2):
        for request_id in ("a", "b"):
            stream.push(request_id, make_delta(MAX_COVERED_TOKENS // 2), num_covering=0)
            told = await sizes(stream)
        half = MAX_COVERED_TOKENS // 2
        assert told is None
        stream.push("a", make_delta(), num_covering=0)
        assert await sizes(stream) == {"a": half + 1, "b": half}


@pytest.mark.parametrize(
    ("level", "reads"),
    [
        (NO_SERVICE_LEVEL, True),
        (ServiceLevel(consumption_rate_tps=5.0, release=Release.AT_ONCE), True),
        (ServiceLevel(consumption_rate_tps=5.0, release=Release.SMOOTH), True),
        (ServiceLevel(consumption_rate_tps=5.0), False),
    ],
)
def test_what_goes_to_the_client_as_it_comes_is_never_covered(
    level: ServiceLevel, reads: bool
) -> None:
    assert make_live(level, reads=reads).num_covering == math.inf


def test_a_reader_is_covered_for_three_beats_by_what_was_not_delivered() -> None:
    live = make_live(ServiceLevel(consumption_rate_tps=8.0), num_delivered=10)

    assert COVER_S == 3 * BEAT_S == 0.75
    assert live.num_covering == 10 + 1 + 6


@dataclass
class Reader:
    """An answer on its way from the engine to its reader, on a clock of its own."""

    interval_s: float
    report_s: float  # from one delivered count to the next, and its way to the executor
    stream: StepStream = field(default_factory=StepStream)
    made_s: list[float] = field(default_factory=list)  # when the engine made each token
    came_s: list[float] = field(default_factory=list)  # when the gateway had it
    num_frames: int = 0

    def __post_init__(self) -> None:
        self.live = make_live(ServiceLevel(consumption_rate_tps=1 / self.interval_s))
        self.stream.accept("a", Acceptance(1))

    async def flush(self, now_s: float) -> None:
        """Let the writer take what it may."""
        while (told := await sizes(self.stream)) is not None:
            self.came_s += [now_s] * told.get("a", 0)
            self.num_frames += 1

    async def make(self, now_s: float) -> None:
        self.live.num_delivered = max(self.live.num_delivered, self._num_delivered(now_s))
        self.made_s.append(now_s)
        self.stream.push("a", make_delta(), num_covering=self.live.num_covering)
        self.live.take(make_delta())
        await self.flush(now_s)

    def _num_delivered(self, now_s: float) -> int:
        """Return the newest count that the executor has, true `report_s` ago at worst."""
        due_s = due_times_s(self.came_s, self.interval_s)
        return sum(one <= now_s - self.report_s for one in due_s)


@given(
    rate_tps=st.floats(1.0, 60.0),
    report_s=st.floats(0.0, REPORT_S),
    gaps_s=st.lists(st.sampled_from([0.005, 0.02, 0.05, 0.2, 0.6]), min_size=1, max_size=60),
    lags_s=st.lists(st.floats(0.0, 0.1), min_size=1, max_size=5),
)
def test_no_reader_has_a_token_later_for_it(
    rate_tps: float, report_s: float, gaps_s: list[float], lags_s: list[float]
) -> None:
    """Beats come late, too, by `lags_s`."""

    async def replay() -> None:
        reader = Reader(1 / rate_tps, report_s)
        await reader.flush(0.0)
        now_s, number = 0.0, 1
        beat_s = BEAT_S + lags_s[0]
        for gap_s in [*gaps_s, 2 * BEAT_S]:
            now_s += gap_s
            while beat_s <= now_s:
                reader.stream.beat()
                await reader.flush(beat_s)
                beat_s += BEAT_S + lags_s[number % len(lags_s)] - lags_s[(number - 1) % len(lags_s)]
                number += 1
            await reader.make(now_s)
        reader.stream.beat()
        await reader.flush(now_s)

        interval_s = reader.interval_s
        assert due_times_s(reader.came_s, interval_s) == pytest.approx(
            due_times_s(reader.made_s, interval_s), abs=1e-9
        )

    asyncio.run(replay())


async def test_a_reader_with_seconds_in_hand_takes_a_frame_a_beat() -> None:
    reader = Reader(interval_s=0.2, report_s=REPORT_S)
    await reader.flush(0.0)
    for step in range(200):  # at 50 tokens per second
        now_s = 0.02 * step
        if step % 12 == 0:
            reader.stream.beat()
            await reader.flush(now_s)
        await reader.make(now_s)

    beats = 200 // 12
    assert beats <= reader.num_frames <= beats + 8  # some before there is enough in hand
