"""How the Messages API tells an answer: valid by Anthropic's own types, whole and streamed."""

import json
from typing import Any

import pytest
from anthropic.types import Message, RawMessageStreamEvent
from pydantic import TypeAdapter

from services.gateway.anthropic.events import MessageForm
from services.gateway.anthropic.objects import MessageHead
from services.gateway.openai.responses import Answer
from services.gateway.types import Finish, RequestId, Token
from services.generation.conversation import ToolCallPart
from services.generation.finish import FinishReason
from services.kit.errors import UnavailableError

EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
TOKENS = [
    Token(0, 1, "", reasoning="They "),
    Token(1, 2, "", reasoning="ask."),
    Token(2, 3, ""),
    Token(3, 4, "One"),
    Token(4, 5, " moment."),
    Token(5, 6, "", tool_calls=(ToolCallPart(0, "c0", "weather"),)),
    Token(6, 7, "", tool_calls=(ToolCallPart(0, arguments='{"city":'),)),
    Token(7, 8, "", tool_calls=(ToolCallPart(0, arguments=' "Oslo"}'),)),
    Token(8, 9, "", tool_calls=(ToolCallPart(1, "c1", "weather", "{}"),)),
]
CONTENT = [
    {"type": "thinking", "thinking": "They ask.", "signature": "unsigned"},
    {"type": "text", "text": "One moment."},
    {"type": "tool_use", "id": "c0", "name": "weather", "input": {"city": "Oslo"}},
    {"type": "tool_use", "id": "c1", "name": "weather", "input": {}},
]


def make_form() -> MessageForm:
    return MessageForm(MessageHead(request_id=RequestId("r"), model="m"))


def make_finish(reason: FinishReason = FinishReason.TOOL_CALLS) -> Finish:
    return Finish(
        reason=reason,
        num_prompt_tokens=7,
        num_output_tokens=9,
        num_reasoning_tokens=2,
        num_cached_tokens=4,
    )


def events(stream: bytes) -> list[dict[str, Any]]:
    told = []
    for block in stream.decode().removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        value = json.loads(data.removeprefix("data: "))
        assert name == f"event: {value['type']}"
        told.append(value)
    return told


def streamed(finish: Finish, *, as_one: bool = False) -> list[dict[str, Any]]:
    """Return the data of all events, each checked by Anthropic's types."""
    form = make_form()
    writer = form.writer(0, finish.num_prompt_tokens)
    begun = writer.beginning()
    said = writer.tokens(TOKENS, as_one=as_one)
    told = events(begun + said + writer.ending(finish) + form.last_events([finish]))
    for value in told:
        EVENT.validate_python(value)
    return told


def test_a_stream_has_anthropic_s_events_in_their_order() -> None:
    told = [value["type"].removeprefix("content_block_") for value in streamed(make_finish())]

    assert told == [
        "message_start",
        *("start", "delta", "delta", "delta", "stop"),  # thoughts, and their signature
        *("start", "delta", "delta", "stop"),
        *("start", "delta", "delta", "stop"),
        *("start", "delta", "stop"),
        *("message_delta", "message_stop"),
    ]


@pytest.mark.parametrize("as_one", [False, True])
def test_the_deltas_of_a_block_form_its_content(as_one: bool) -> None:
    told = streamed(make_finish(), as_one=as_one)

    for index, block in enumerate(CONTENT):
        deltas = [v["delta"] for v in told if v.get("index") == index and "delta" in v]
        joined = {
            member: "".join(delta.get(member, "") for delta in deltas)
            for member in ("thinking", "signature", "text", "partial_json")
        }
        given = json.loads(joined["partial_json"] or "null")
        assert block.get("input") == given
        for member in ("thinking", "signature", "text"):
            assert block.get(member, "") == joined[member]


def test_a_stream_begins_and_ends_with_counts() -> None:
    told = streamed(make_finish())

    assert told[0]["message"]["usage"] == {"input_tokens": 7, "output_tokens": 0}
    assert told[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert told[-2]["usage"] == {
        "input_tokens": 3,
        "cache_read_input_tokens": 4,
        "output_tokens": 9,
        "output_tokens_details": {"thinking_tokens": 2},
    }


def test_a_whole_message_says_what_was_thought_said_and_called() -> None:
    whole = make_form().whole([Answer(tokens=TOKENS, finish=make_finish())])

    Message.model_validate(whole)
    assert whole["content"] == CONTENT
    assert (whole["id"], whole["stop_reason"]) == ("msg_r", "tool_use")
    assert whole["usage"] == streamed(make_finish())[-2]["usage"]


@pytest.mark.parametrize(
    ("reason", "num_tokens", "expected"),
    [
        (FinishReason.STOP, 5, "end_turn"),
        (FinishReason.LENGTH, 5, "max_tokens"),
        (FinishReason.LENGTH, 9, "max_tokens"),
        (FinishReason.STOP, 9, "tool_use"),  # a call that the client forced
    ],
)
def test_the_stop_reason_has_anthropic_s_name(reason, num_tokens, expected) -> None:
    whole = make_form().whole([Answer(tokens=TOKENS[:num_tokens], finish=make_finish(reason))])

    assert whole["stop_reason"] == expected


def test_a_call_that_is_cut_short_has_no_arguments() -> None:
    whole = make_form().whole([Answer(tokens=TOKENS[:7], finish=make_finish(FinishReason.LENGTH))])

    assert whole["content"][-1]["input"] == {}


def test_an_error_is_the_last_event() -> None:
    (told,) = events(make_form().failure(UnavailableError("x")))

    assert told == {
        "type": "error",
        "error": {"type": "overloaded_error", "message": "x"},
        "request_id": "r",
    }
