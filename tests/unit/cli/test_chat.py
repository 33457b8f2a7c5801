"""A conversation's parts: what is asked, what is shown, what is summed up."""

import io
import re
from typing import Any

import pytest
from click.testing import CliRunner
from rich.console import Console

from cli.chat import ChatOptions, Conversation, command, summary_line
from cli.client.answer import PacedAnswer, Piece
from cli.client.endpoint import AnswerError, Endpoint, RefusedError, endpoint_at
from cli.client.engine_watch import Row
from cli.live_line import Bare, Progress, Screen, display_for, folded
from evenflow.executor.v1 import executor_pb2 as pb
from lab.stack.ports import free_port


def make_options(**overrides: Any) -> ChatOptions:
    fields: dict[str, Any] = {
        "rate": 12.0,
        "url": None,
        "name": None,
        "model": None,
        "system": "",
        "max_tokens": 400,
        "temperature": 0.2,
        "seed": None,
        "api_key": "",
        "executor": None,
    }
    return ChatOptions(**{**fields, **overrides})


def make_answer(**overrides: Any) -> PacedAnswer:
    fields: dict[str, Any] = {
        "text": "abc",
        "num_prompt_tokens": 9,
        "num_tokens": 3,
        "sent_s": 1.0,
        "arrived_s": (1.5, 1.6, 1.7),
    }
    return PacedAnswer(**{**fields, **overrides})


def make_row(num_generated: int, num_deposited: int) -> Row:
    request = pb.ObservedRequest(request_id="a", num_generated_tokens=num_generated)
    return Row(request=request, num_deposited=num_deposited)


def make_piece(text: str = "x", **overrides: Any) -> Piece:
    return Piece(**{"text": text, "num_tokens": 1, "arrived_s": 0.0, **overrides})


def test_earlier_turns_go_along_until_the_conversation_begins_anew() -> None:
    conversation = Conversation(
        Endpoint(base_url="http://h"), "m", make_options(system="Be brief.", seed=7)
    )
    system = {"role": "system", "content": "Be brief."}

    conversation.add("One?", "1")
    question = conversation.question("Two?", "id")

    assert question.as_messages() == [
        system,
        {"role": "user", "content": "One?"},
        {"role": "assistant", "content": "1"},
        {"role": "user", "content": "Two?"},
    ]
    assert question.sampling.as_body() == {
        "temperature": 0.2, "top_p": 0.9, "repetition_penalty": 1.1, "seed": 7,
    }  # fmt: skip
    conversation.begin_anew()
    assert conversation.question("Three?", "id").as_messages() == [
        system,
        {"role": "user", "content": "Three?"},
    ]


@pytest.mark.parametrize(
    ("answer", "rate_tps", "expected"),
    [
        pytest.param({}, 10.0, "TTFT 500 ms, 3 tokens, 10.0 tokens/s of 10, 0 late", id="paced"),
        pytest.param({}, None, "TTFT 500 ms, 3 tokens, 10.0 tokens/s", id="unpaced"),
        # At 20 tokens/s each of the two gaps of 0.1 is late.
        pytest.param({}, 20.0, "TTFT 500 ms, 3 tokens, 10.0 tokens/s of 20, 2 late", id="late"),
        pytest.param(
            {"finish_reason": "length", "arrived_s": (1.5,), "num_tokens": 1},
            10.0,
            "TTFT 500 ms, 1 token, 0 late, cut off",
            id="one-token",
        ),
        pytest.param(
            {"num_cached_tokens": 8},
            None,
            "TTFT 500 ms, 3 tokens, 10.0 tokens/s, 8 of 9 prompt tokens cached",
            id="a-second-turn",
        ),
        pytest.param(
            {"arrived_s": (1.5, 2.5, 3.0, 3.1, 3.2), "num_tokens": 5, "num_thoughts": 2},
            10.0,
            "TTFT 500 ms, of the answer 2000 ms, 5 tokens, 2 of them thoughts, "
            "10.0 tokens/s of 10, 0 late",
            id="thoughts-first",
        ),
        pytest.param(
            {"num_thoughts": 3, "finish_reason": "length"},
            10.0,
            "TTFT 500 ms, of the answer -, 3 tokens, 3 of them thoughts, 0 late, cut off",
            id="nothing-but-thoughts",
        ),
        pytest.param(
            {"arrived_s": (1.5, 1.5, 1.5)}, None, "TTFT 500 ms, 3 tokens", id="all-at-once"
        ),
    ],
)
def test_the_summary_is_one_line(answer, rate_tps, expected) -> None:
    assert summary_line(make_answer(**answer), rate_tps) == expected


def test_the_line_says_what_is_known_so_far() -> None:
    progress = Progress(sent_s=10.0)
    assert progress.line(10.25) == "read 0  first token: 250 ms so far"
    progress.take(make_piece(arrived_s=10.5))
    assert progress.line(10.6) == "read 1  last token 100 ms ago"
    progress.take(make_piece(arrived_s=10.58, num_tokens=2))
    assert progress.line(10.6) == "read 3  gap 80 ms  last token 20 ms ago"
    progress.see(make_row(9, 6))
    assert progress.line(10.6) == (
        "read 3  generated 9  in deposit 6  gap 80 ms  last token 20 ms ago"
    )


def test_a_request_that_is_gone_has_nothing_in_deposit() -> None:
    progress = Progress(sent_s=0.0)
    progress.see(None)
    assert "deposit" not in progress.line(0.0)

    progress.see(make_row(9, 6))
    progress.see(None)

    assert "generated 9  in deposit 0" in progress.line(0.0)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", [""]),
        ("one two", ["one two"]),
        ("one two three", ["one two", "three"]),
        ("one twoo three", ["one twoo", "three"]),
        ("onetwothree four", ["onetwoth", "ree four"]),
        ("one\n\ntwo", ["one", "", "two"]),
        ("one\n", ["one", ""]),
        ("ends in a space ", ["ends in", "a space "]),
        ("日本語日本語", ["日本語日", "本語"]),  # two columns each
    ],
)
def test_lines_break_at_spaces_where_there_are_some(text: str, expected: list[str]) -> None:
    assert folded(text, 8) == expected


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_however_a_text_arrives_all_of_it_is_written(size: int) -> None:
    text = "A paragraph that is wider than the terminal.\n\n    code\nThe end."
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=20, color_system=None)
    screen = Screen(console, Progress(sent_s=0.0))
    for start in range(0, len(text), size):
        screen.show(text[start : start + size])
    screen.close()

    # What is drawn anew begins with erasing the line.
    kept = [line for line in shown_lines(out.getvalue()) if line]
    assert kept == ["A paragraph that is", "wider than the", "terminal.", "    code", "The end."]


def shown_lines(written: str) -> list[str]:
    """Return what a terminal shows after these lines, erasures and moves of the cursor."""
    lines, row = [""], 0
    for part in re.findall(r"\x1b\[[?\d]*[A-Za-z]|\r|\n|[^\x1b\r\n]+", written):
        if part == "\n":
            row += 1
            lines += [""] * (row + 1 - len(lines))
        elif part == "\x1b[2K":
            lines[row] = ""
        elif part.endswith("A") and part.startswith("\x1b["):
            row -= int(part[2:-1])
        elif part[0] not in "\r\x1b":
            lines[row] += part
    return lines


def test_what_could_upset_a_terminal_is_left_out() -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=40, color_system=None)
    screen = Screen(console, Progress(sent_s=0.0))
    screen.show("red\x1b[31m and a bell\x07.")
    screen.close()

    assert "red[31m and a bell." in out.getvalue()


def test_off_a_terminal_an_answer_is_written_as_it_is() -> None:
    out = io.StringIO()
    display = display_for(Console(file=out, force_terminal=False), Progress(sent_s=0.0))
    display.show("one")
    display.show("")
    display.show(" two")
    display.close()
    assert isinstance(display, Bare)
    assert out.getvalue() == "one two\n"

    nothing = io.StringIO()
    Bare(nothing).close()
    assert nothing.getvalue() == ""


@pytest.mark.parametrize(
    "url", ["http://h:1", "http://h:1/", "http://h:1/v1", "http://h:1/v1/", "h:1"]
)
def test_a_url_may_be_written_in_several_ways(url: str) -> None:
    assert endpoint_at(url).base_url == "http://h:1"


def test_a_key_is_sent_and_not_shown() -> None:
    endpoint = endpoint_at("http://h:1", "secret")

    assert endpoint.headers == {"authorization": "Bearer secret"}
    assert "secret" not in repr(endpoint)


@pytest.mark.parametrize(
    ("body", "message", "param"),
    [
        (
            '{"error": {"message": "too long", "param": "messages"}}',
            "HTTP 400: too long",
            "messages",
        ),
        ('{"error": {"message": "no"}}', "HTTP 400: no", ""),
        ('{"detail": 1}', 'HTTP 400: {"detail": 1}', ""),
        ("[]", "HTTP 400: []", ""),
        ("Bad Gateway\n", "HTTP 400: Bad Gateway", ""),
    ],
)
def test_a_refusal_says_what_the_server_said(body: str, message: str, param: str) -> None:
    error = RefusedError(400, body)

    assert (str(error), error.param) == (message, param)
    assert isinstance(error, AnswerError)


def test_a_server_that_is_not_there_is_named() -> None:
    url = f"http://127.0.0.1:{free_port()}"

    result = CliRunner().invoke(command, ["--url", url])

    assert result.exit_code == 1
    assert f"no server answers at {url}" in result.output
    assert "evenflow serve MODEL" in result.output
