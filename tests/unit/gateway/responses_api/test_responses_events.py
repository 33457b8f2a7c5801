"""How the Responses API tells an answer: valid by OpenAI's own types, whole and streamed."""

import json
from typing import Any

import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from services.gateway.openai.parsing import parse_body
from services.gateway.openai.responses import Answer
from services.gateway.responses_api.bodies import ResponsesBody
from services.gateway.responses_api.events import ResponseForm
from services.gateway.responses_api.objects import response_head
from services.gateway.responses_api.requests import to_generation_request
from services.gateway.types import Finish, RequestId, Token
from services.generation.conversation import ToolCallPart
from services.generation.finish import FinishReason
from services.generation.logprobs import Logprob, TokenLogprobs
from services.kit.errors import UnavailableError

EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
LOGPROBS = TokenLogprobs(
    chosen=Logprob(id=1, token="One", logprob=-1.0), top=(Logprob(id=2, token="Two", logprob=-2.0),)
)
TOKENS = [
    Token(0, 1, "", reasoning="They "),
    Token(1, 2, "", reasoning="ask."),
    Token(2, 3, ""),
    Token(3, 4, "One", logprobs=LOGPROBS),
    Token(4, 5, " moment."),
    Token(5, 6, "", tool_calls=(ToolCallPart(0, "c0", "weather"),)),
    Token(6, 7, "", tool_calls=(ToolCallPart(0, arguments='{"city":'),)),
    Token(7, 8, "", tool_calls=(ToolCallPart(0, arguments=' "Oslo"}'),)),
    Token(8, 9, "", tool_calls=(ToolCallPart(1, "c1", "weather", "{}"),)),
]


def make_form(**parameters: Any) -> ResponseForm:
    tools = [{"type": "function", "name": "weather", "parameters": {}}]
    body = parse_body(ResponsesBody, {"model": "m", "input": "Hi", "tools": tools} | parameters)
    request = to_generation_request(body, {}, RequestId("r"))
    return ResponseForm(response_head(body, request, created_s=5))


def make_finish(reason: FinishReason = FinishReason.TOOL_CALLS) -> Finish:
    return Finish(
        reason=reason,
        num_prompt_tokens=7,
        num_output_tokens=9,
        num_reasoning_tokens=2,
        num_cached_tokens=4,
    )


def events(stream: bytes) -> list[dict[str, Any]]:
    """Return the data of all events, each checked by OpenAI's types."""
    told = []
    for block in stream.decode().removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        value = json.loads(data.removeprefix("data: "))
        assert name == f"event: {value['type']}"
        EVENT.validate_python(value)
        told.append(value)
    assert [value["sequence_number"] for value in told] == list(range(len(told)))
    return told


def streamed(form: ResponseForm, finish: Finish, *, as_one: bool = False) -> list[dict[str, Any]]:
    writer = form.writer(0, finish.num_prompt_tokens)
    begun = writer.beginning()
    said = writer.tokens(TOKENS, as_one=as_one)
    return events(begun + said + writer.ending(finish) + form.last_events([finish]))


def test_a_stream_has_openai_s_events_in_their_order() -> None:
    told = [
        value["type"].removeprefix("response.") for value in streamed(make_form(), make_finish())
    ]

    text = ["output_item.added", "content_part.added", *["output_text.delta"] * 2]
    thought = ["output_item.added", "content_part.added", *["reasoning_text.delta"] * 2]
    ends = ["content_part.done", "output_item.done"]
    call = "function_call_arguments"
    assert told == [
        *("created", "in_progress"),
        *thought,
        *("reasoning_text.done", *ends),
        *text,
        *("output_text.done", *ends),
        *("output_item.added", f"{call}.delta", f"{call}.delta", f"{call}.done"),
        "output_item.done",
        *("output_item.added", f"{call}.delta", f"{call}.done", "output_item.done"),
        "completed",
    ]


@pytest.mark.parametrize("reason", [FinishReason.TOOL_CALLS, FinishReason.LENGTH])
@pytest.mark.parametrize("as_one", [False, True])
def test_a_stream_ends_with_what_is_sent_whole(reason: FinishReason, as_one: bool) -> None:
    finish = make_finish(reason)
    whole = make_form().whole([Answer(tokens=TOKENS, finish=finish)])
    told = streamed(make_form(), finish, as_one=as_one)

    Response.model_validate(whole)
    assert told[-1]["response"] == whole
    done = [value["item"] for value in told if value["type"] == "response.output_item.done"]
    assert done == whole["output"]
    for k, item in enumerate(done):
        kept = [v.get("delta", "") for v in told if v.get("item_id") == item["id"]]
        content = item.get("content", [{}])[0]
        assert "".join(kept) == content.get("text", item.get("arguments"))
        assert {v["output_index"] for v in told if v.get("item_id") == item["id"]} == {k}


def test_a_whole_response_says_what_was_thought_said_and_called() -> None:
    whole = make_form(store=False).whole([Answer(tokens=TOKENS, finish=make_finish())])

    thought, said, first, second = whole["output"]
    assert thought["content"] == [{"type": "reasoning_text", "text": "They ask."}]
    assert said["content"][0]["text"] == "One moment."
    assert [entry["token"] for entry in said["content"][0]["logprobs"]] == ["One"]
    assert (first["call_id"], first["name"], json.loads(first["arguments"])) == (
        "c0",
        "weather",
        {"city": "Oslo"},
    )
    assert (second["call_id"], second["arguments"]) == ("c1", "{}")
    assert (whole["status"], whole["store"], whole["incomplete_details"]) == (
        "completed",
        False,
        None,
    )
    assert whole["usage"] == {
        "input_tokens": 7,
        "input_tokens_details": {"cached_tokens": 4, "cache_write_tokens": 0},
        "output_tokens": 9,
        "output_tokens_details": {"reasoning_tokens": 2},
        "total_tokens": 16,
    }


def test_an_answer_that_is_cut_short_is_incomplete() -> None:
    finish = make_finish(FinishReason.LENGTH)
    whole = make_form().whole([Answer(tokens=TOKENS[:5], finish=finish)])

    assert (whole["status"], whole["incomplete_details"]) == (
        "incomplete",
        {"reason": "max_output_tokens"},
    )
    assert [item["status"] for item in whole["output"]] == ["completed", "incomplete"]


def test_an_error_is_the_last_event() -> None:
    form = make_form()
    writer = form.writer(0, 7)
    told = events(
        writer.beginning() + writer.tokens(TOKENS[:1]) + form.failure(UnavailableError("x"))
    )

    assert (told[-1]["type"], told[-1]["code"], told[-1]["message"]) == (
        "error",
        "unavailable",
        "x",
    )
    assert told[-1]["error"]["message"] == "x"
