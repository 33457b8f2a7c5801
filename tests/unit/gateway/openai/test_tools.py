"""Tools, calls and reasoning in the shapes of the OpenAI API."""

import json
from typing import Any

import pytest

from services.gateway.openai.bodies import ChatCompletionBody
from services.gateway.openai.messages import delta, message
from services.gateway.openai.parsing import parse_body
from services.gateway.openai.requests import to_generation_requests
from services.gateway.openai.responses import AnswerHead, AnswerKind, ChunkWriter
from services.gateway.types import RequestId, Token
from services.generation.conversation import (
    ChatMessage,
    ConversationOptions,
    Tool,
    ToolCall,
    ToolCallPart,
    ToolChoice,
)
from services.generation.logprobs import Logprob, TokenLogprobs
from services.generation.prompts import ChatPrompt
from services.kit.errors import InvalidRequestError

MESSAGES = [{"role": "user", "content": "Hi"}]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
NAMED = {"type": "function", "function": {"name": "weather"}}


def prompt_of(**parameters: Any) -> ChatPrompt:
    body = {"model": "m", "messages": MESSAGES} | parameters
    (request,) = to_generation_requests(parse_body(ChatCompletionBody, body), {}, RequestId("r"))
    assert isinstance(request.prompt, ChatPrompt)
    return request.prompt


@pytest.mark.parametrize(
    ("stated", "choice", "named_tool"),
    [
        ({}, ToolChoice.AUTO, ""),
        ({"tool_choice": None}, ToolChoice.AUTO, ""),
        ({"tool_choice": "auto"}, ToolChoice.AUTO, ""),
        ({"tool_choice": "none"}, ToolChoice.NONE, ""),
        ({"tool_choice": "required"}, ToolChoice.REQUIRED, ""),
        ({"tool_choice": NAMED}, ToolChoice.NAMED, "weather"),
    ],
)
def test_a_choice_among_tools_is_taken(stated, choice, named_tool) -> None:
    assert prompt_of(tools=[TOOL], **stated).options == ConversationOptions(
        tools=(Tool(name="weather", parameters=json.dumps(SCHEMA)),),
        tool_choice=choice,
        named_tool=named_tool,
    )


def test_other_options_of_a_conversation_are_taken() -> None:
    tool = {"name": "f", "description": "Does f.", "strict": True}
    options = prompt_of(
        tools=[{"type": "function", "function": tool}],
        tool_choice="none",
        parallel_tool_calls=False,
        include_reasoning=False,
        reasoning_effort="high",
        chat_template_kwargs={"enable_thinking": True},
    ).options

    assert options == ConversationOptions(
        tools=(Tool(name="f", description="Does f.", strict=True),),
        tool_choice=ToolChoice.NONE,
        forbids_parallel_calls=True,
        omits_reasoning=True,
        reasoning_effort="high",
        template_variables='{"enable_thinking": true}',
    )


def test_what_answers_and_tools_said_goes_back_into_a_conversation() -> None:
    called = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    prompt = prompt_of(
        messages=[
            *MESSAGES,
            {
                "role": "assistant",
                "content": None,
                "refusal": None,
                "reasoning_content": "hm",
                "tool_calls": [called],
            },
            {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
        ]
    )

    call = ToolCall(id="c1", name="f", arguments="{}")
    assert prompt.messages[1:] == (
        ChatMessage(role="assistant", content="", tool_calls=(call,), reasoning="hm"),
        ChatMessage(role="tool", content="sunny", tool_call_id="c1"),
    )


def test_the_last_turn_is_gone_on_with_where_no_answer_is_begun() -> None:
    going_on = {"add_generation_prompt": False, "continue_final_message": True}

    assert prompt_of(**going_on).options == ConversationOptions(
        omits_generation_prompt=True, continues_final_message=True
    )
    with pytest.raises(InvalidRequestError, match="continue_final_message"):
        prompt_of(continue_final_message=True)


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_reasoning_goes_back_by_either_name(name) -> None:
    turn = {"role": "assistant", "content": "A", name: "hm"}

    assert prompt_of(messages=[*MESSAGES, turn]).messages[1].reasoning == "hm"


@pytest.mark.parametrize("function", [{"name": "f", "arguments": ""}, {"name": "f"}])
def test_a_call_without_arguments_has_an_empty_object_of_them(function) -> None:
    called = {"id": "c1", "type": "function", "function": function}
    prompt = prompt_of(messages=[*MESSAGES, {"role": "assistant", "tool_calls": [called]}])

    assert prompt.messages[1].tool_calls == (ToolCall(id="c1", name="f", arguments="{}"),)


@pytest.mark.parametrize(
    "parameters",
    [
        {"tool_choice": "auto"},
        {"tool_choice": "none"},
        {"parallel_tool_calls": False},
        {"tools": [], "tool_choice": "auto", "parallel_tool_calls": True},
    ],
)
def test_options_of_tools_say_nothing_where_there_are_none(parameters) -> None:
    assert prompt_of(**parameters) == prompt_of()


TOKENS = [
    Token(0, 1, "", reasoning="Let "),
    Token(1, 2, "", reasoning="me."),
    Token(2, 3, ""),
    Token(3, 4, "Sure"),
    Token(4, 5, "", tool_calls=(ToolCallPart(0, "c0", "f", "{"),)),
    Token(5, 6, "", tool_calls=(ToolCallPart(0, arguments="}"), ToolCallPart(1, "c1", "g"))),
    Token(6, 7, "", tool_calls=(ToolCallPart(1, arguments="{}"),)),
]
FIRST_OF_F = {"id": "c0", "type": "function", "function": {"name": "f", "arguments": "{"}}
FIRST_OF_G = {"id": "c1", "type": "function", "function": {"name": "g", "arguments": ""}}
DELTAS: list[dict[str, Any]] = [
    {"reasoning": "Let ", "reasoning_content": "Let "},
    {"reasoning": "me.", "reasoning_content": "me."},
    {"content": "Sure"},
    {"tool_calls": [{"index": 0, **FIRST_OF_F}]},
    {"tool_calls": [{"index": 0, "function": {"arguments": "}"}}, {"index": 1, **FIRST_OF_G}]},
    {"tool_calls": [{"index": 1, "function": {"arguments": "{}"}}]},
]


def writer() -> ChunkWriter:
    head = AnswerHead(kind=AnswerKind.CHAT, request_id=RequestId("r"), model="m", created_s=1)
    return ChunkWriter(head, 0, includes_usage=False)


def deltas_of(events: bytes) -> list[dict[str, Any]]:
    chunks = [json.loads(line[len("data: ") :]) for line in events.decode().split("\n\n") if line]
    return [chunk["choices"][0]["delta"] for chunk in chunks]


def test_each_token_that_says_something_is_an_event() -> None:
    role, *deltas = deltas_of(writer().tokens(TOKENS))

    assert role == {"role": "assistant", "content": ""}
    assert deltas == DELTAS


def test_tokens_written_one_by_one_make_the_same_events() -> None:
    chunks = writer()
    events = b"".join(chunks.tokens([token]) for token in TOKENS)

    assert deltas_of(events)[1:] == DELTAS


def test_tokens_of_a_lagging_reader_are_one_event_with_one_part_per_call() -> None:
    (_, only) = deltas_of(writer().tokens(TOKENS, as_one=True))

    assert only == {
        "reasoning": "Let me.",
        "reasoning_content": "Let me.",
        "content": "Sure",
        "tool_calls": [
            {
                "index": 0,
                "id": "c0",
                "type": "function",
                "function": {"name": "f", "arguments": "{}"},
            },
            {
                "index": 1,
                "id": "c1",
                "type": "function",
                "function": {"name": "g", "arguments": "{}"},
            },
        ],
    }


def test_a_silent_token_with_probabilities_is_an_event_beside_reasoning() -> None:
    scored = TokenLogprobs(Logprob(1, "x", -1.0))
    tokens = [Token(0, 1, "", scored, reasoning="a"), Token(1, 1, "", scored)]

    thought = {"reasoning": "a", "reasoning_content": "a"}
    assert deltas_of(writer().tokens(tokens))[1:] == [thought, {"content": ""}]


def test_a_whole_message_has_all_that_its_tokens_said() -> None:
    whole = message(TOKENS)

    assert (whole["content"], whole["reasoning"]) == ("Sure", "Let me.")
    assert whole["reasoning_content"] == whole["reasoning"]
    assert [(c["id"], c["function"]["name"]) for c in whole["tool_calls"]] == [
        ("c0", "f"),
        ("c1", "g"),
    ]
    assert [c["function"]["arguments"] for c in whole["tool_calls"]] == ["{}", "{}"]


def test_a_message_without_text_has_no_content_unless_it_has_nothing_at_all() -> None:
    assert message(TOKENS[4:])["content"] is None
    assert message([]) == {"role": "assistant", "content": "", "refusal": None}
    assert delta([]) == {}
