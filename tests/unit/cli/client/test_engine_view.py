"""A recorded state of the engine, drawn."""

import io

import pytest
from rich.console import Console

from cli.client.engine_view import (
    ASCII,
    BLOCKS,
    Glyphs,
    Lines,
    Screen,
    bar,
    display_for,
    glyphs_for,
    picture,
    spark_line,
    summary_lines,
)
from cli.client.engine_watch import EngineState, Row
from evenflow.executor.v1 import executor_pb2 as pb
from evenflow.gateway.v1 import generation_pb2 as gen

RESIDENCY = [
    pb.RESIDENCY_RESIDENT,
    pb.RESIDENCY_OFFLOADED,
    pb.RESIDENCY_RESTORING,
    pb.RESIDENCY_OFFLOADED,
]

RECORDED = pb.WatchRequestsResponse(
    num_steps=250,
    observed_step_s=0.0358,
    predicted_step_s=0.0341,
    num_pool_blocks=63,
    num_free_pool_blocks=3,
    num_cached_tokens=96,
    requests=[
        pb.ObservedRequest(
            request_id="slow-1",
            state=pb.REQUEST_STATE_DECODING,
            num_prompt_tokens=632,
            num_generated_tokens=41,
            num_delivered_tokens=9,
            num_deposited_tokens=31,
            num_late_tokens=4,
            late_cause=gen.DELAY_CAUSE_COPIES,
            release_interval_s=0.125,
            residency=RESIDENCY,
        ),
        pb.ObservedRequest(
            request_id="next-2",
            state=pb.REQUEST_STATE_QUEUED,
            num_prompt_tokens=676,
            why="no_room",
            why_text="there is no room for it yet",
        ),
    ],
)


@pytest.fixture
def state() -> EngineState:
    state = EngineState()
    state.take(RECORDED, now_s=0.0)
    return state


def drawn(state: EngineState, glyphs: Glyphs = BLOCKS, width: int = 120) -> str:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    with console.capture() as capture:
        console.print(picture(state, glyphs))
    return capture.get()


def test_the_screen_shows_requests_deposits_layers_and_step_times(state: EngineState) -> None:
    screen = drawn(state)

    assert "35.8 ms observed, 34.1 ms predicted" in screen
    assert "60 of 63 blocks used" in screen
    (line,) = (line for line in screen.splitlines() if line.startswith("slow-1"))
    assert line.split() == [
        "slow-1", "decoding", "41", "10", "31", "███████▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒", "90.0%", "(copies)",
        "█░▓░",
    ]  # fmt: skip
    line, why = (line for line in screen.splitlines() if line.startswith("next-2"))
    assert line.split() == ["next-2", "queued", "0", "0", "0", "·" * 28, "-"]
    assert why == "next-2: there is no room for it yet"


def test_a_terminal_without_block_characters_gets_ascii(state: EngineState) -> None:
    screen = drawn(state, glyphs_for("ascii"))

    assert screen.isascii()
    assert "Robo" in screen
    assert "#######=====" in screen
    assert glyphs_for("utf-8") is BLOCKS
    assert glyphs_for(None) is glyphs_for("no such encoding") is ASCII


def test_a_narrow_terminal_still_shows_every_request(state: EngineState) -> None:
    assert all(len(line) <= 60 for line in drawn(state, width=60).splitlines())
    assert "slow" in drawn(state, width=60)


def test_off_a_terminal_there_is_a_line_per_request(state: EngineState) -> None:
    assert summary_lines(state) == [
        "step 250: 35.8 ms (predicted 34.1 ms), pool 60 of 63 blocks, "
        "96 tokens cached, in time 90.0%",
        "  slow-1: decoding, generated 41, delivered 10, deposit 31, in time 90.0% (copies), "
        "layers Robo",
        "  next-2: queued (there is no room for it yet), generated 0, delivered 0, deposit 0, "
        "in time -",
    ]


def test_off_a_terminal_lines_come_once_a_second(state: EngineState) -> None:
    out, now_s = io.StringIO(), 0.0
    lines = Lines(out, clock=lambda: now_s)
    counts = []
    for now_s in (5.0, 5.5, 5.9, 6.0, 6.1):  # noqa: B007  # the clock reads it
        lines.show(state)
        counts.append(out.getvalue().count("step 250"))

    assert counts == [1, 1, 1, 2, 2]


def test_the_display_follows_the_output() -> None:
    assert isinstance(display_for(io.StringIO()), Lines)


def test_the_screen_is_redrawn_in_place(state: EngineState) -> None:
    out = io.StringIO()
    screen = Screen(Console(file=out, force_terminal=True, width=100))
    screen.show(state)
    screen.show(state)
    screen.close()

    assert out.getvalue().count("slow-1") > 1
    assert "\x1b[1A" in out.getvalue()  # the cursor goes up before the second


@pytest.mark.parametrize(
    ("num_generated", "num_deposited", "expected"),
    [(0, 0, "...."), (4, 0, "####"), (4, 4, "===="), (2, 1, "#=.."), (4, 1, "###=")],
)
def test_a_bar_is_delivered_then_deposited_then_open(
    num_generated: int, num_deposited: int, expected: str
) -> None:
    request = pb.ObservedRequest(num_generated_tokens=num_generated)
    row = Row(request=request, num_deposited=num_deposited)

    assert bar(row, 4, ASCII, width=4).plain == expected


def test_a_spark_line_reaches_from_zero_to_the_largest() -> None:
    assert spark_line([0.0, 1.0, 2.0, 4.0], "01234") == "0124"
    assert spark_line([], "01234") == ""
    assert spark_line([0.0], "01234") == "0"


def test_what_a_step_brings_is_shown_where_something_drafts() -> None:
    drafting = pb.WatchRequestsResponse()
    drafting.CopyFrom(RECORDED)
    drafting.tokens_per_step = 2.456
    state = EngineState()
    state.take(drafting, now_s=0.0)

    assert "34.1 ms predicted, 2.46 tokens per request and step" in drawn(state)
    assert "34.1 ms), 2.46 tokens per request and step, pool" in summary_lines(state)[0]
