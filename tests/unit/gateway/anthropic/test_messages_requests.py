"""What `POST /v1/messages` takes, block by block, and whom it blames."""

import json
from typing import Any

import pytest

from services.gateway.anthropic.bodies import CountTokensBody, MessagesBody
from services.gateway.anthropic.requests import to_generation_request, to_prompt
from services.gateway.openai.parsing import parse_body
from services.gateway.types import Delivery, GenerationRequest, RequestId
from services.generation.conversation import (
    ChatMessage,
    ConversationOptions,
    Tool,
    ToolCall,
    ToolChoice,
)
from services.generation.prompts import ChatPrompt
from services.generation.sampling_params import AnswerForm, SamplingParams, StructuredOutputs
from services.kit.errors import InvalidRequestError
from services.pacing.types import ServiceLevel

HI = {"role": "user", "content": "Hi"}
SCHEMA = {"type": "object"}
TOOL = {"name": "weather", "description": "Weather.", "input_schema": SCHEMA}
WEATHER = Tool(name="weather", description="Weather.", parameters='{"type": "object"}')


def ask(
    headers: dict[str, str] | None = None, /, *, ignored: set[str] | None = None, **parameters: Any
) -> GenerationRequest:
    body = {"model": "m", "max_tokens": 9, "messages": [HI]} | parameters
    parsed = parse_body(MessagesBody, body, ignored)
    return to_generation_request(parsed, headers or {}, RequestId("r"))


def turns(request: GenerationRequest) -> tuple[ChatMessage, ...]:
    assert isinstance(request.prompt, ChatPrompt)
    return request.prompt.messages


def options(request: GenerationRequest) -> ConversationOptions:
    assert isinstance(request.prompt, ChatPrompt)
    return request.prompt.options


def test_a_minimal_request_leaves_all_choices_to_the_executor() -> None:
    assert ask() == GenerationRequest(
        request_id=RequestId("r"),
        model="m",
        prompt=ChatPrompt((ChatMessage(role="user", content="Hi"),)),
        sampling=SamplingParams(max_tokens=9),
        delivery=Delivery.WHOLE,
    )


def test_what_is_not_named_is_the_model_s_own() -> None:
    default = SamplingParams(max_tokens=64, temperature=0.6, top_k=20)
    body = parse_body(MessagesBody, {"model": "m", "max_tokens": 9, "messages": [HI], "top_p": 0.5})
    request = to_generation_request(body, {}, RequestId("r"), default)

    assert request.sampling == SamplingParams(max_tokens=9, temperature=0.6, top_k=20, top_p=0.5)


def test_all_that_changes_an_answer_is_passed_on() -> None:
    request = ask(
        {"x-slo-ttft-ms": "250"},
        system="Be brief.",
        stop_sequences=["END"],
        temperature=0.5,
        top_k=3,
        top_p=0.9,
        stream=True,
        thinking={"type": "disabled"},
        output_config={"effort": "low", "format": {"type": "json_schema", "schema": SCHEMA}},
        evenflow={"consumption_rate_tps": 5},
    )

    assert turns(request)[0] == ChatMessage(role="system", content="Be brief.")
    assert options(request) == ConversationOptions(reasoning_effort="low", omits_reasoning=True)
    form = StructuredOutputs(form=AnswerForm.JSON_SCHEMA, text=json.dumps(SCHEMA))
    assert request.sampling == SamplingParams(
        max_tokens=9, stop=("END",), temperature=0.5, top_k=3, top_p=0.9, structured_outputs=form
    )
    assert request.service_level == ServiceLevel(slo_ttft_s=0.25, consumption_rate_tps=5)
    assert request.delivery is Delivery.STREAMED


def test_blocks_form_the_turns_of_a_template() -> None:
    use = {"type": "tool_use", "name": "weather"}
    result = {"type": "tool_result"}
    request = ask(
        system=[
            {"type": "text", "text": "x-anthropic-billing-header: cch=1;"},
            {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}},
            {"type": "text", "text": "Be kind."},
        ],
        messages=[
            {"role": "user", "content": [{"type": "text", "text": "Rain?"}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "Ask.", "signature": "s"},
                    {"type": "redacted_thinking", "data": "x"},
                    {"type": "text", "text": "Wait."},
                    use | {"id": "c1", "input": {"city": "Oslo"}},
                    use | {"id": "c2", "input": {}},
                ],
            },
            {
                "role": "user",
                "content": [
                    result | {"tool_use_id": "c1", "content": "dry"},
                    result
                    | {
                        "tool_use_id": "c2",
                        "content": [{"type": "text", "text": "wet"}],
                        "is_error": False,
                    },
                    {"type": "text", "text": "And"},
                    {"type": "text", "text": "now?"},
                ],
            },
        ],
    )

    assert turns(request) == (
        ChatMessage(role="system", content="Be brief.\nBe kind."),
        ChatMessage(role="user", content="Rain?"),
        ChatMessage(
            role="assistant",
            content="Wait.",
            reasoning="Ask.",
            tool_calls=(
                ToolCall(id="c1", name="weather", arguments='{"city": "Oslo"}'),
                ToolCall(id="c2", name="weather", arguments="{}"),
            ),
        ),
        ChatMessage(role="tool", content="dry", tool_call_id="c1"),
        ChatMessage(role="tool", content="wet", tool_call_id="c2"),
        ChatMessage(role="user", content="And\nnow?"),
    )


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (None, {"tool_choice": ToolChoice.AUTO}),
        ({"type": "none"}, {"tool_choice": ToolChoice.NONE}),
        ({"type": "any"}, {"tool_choice": ToolChoice.REQUIRED}),
        (
            {"type": "tool", "name": "weather"},
            {"tool_choice": ToolChoice.NAMED, "named_tool": "weather"},
        ),
        (
            {"type": "auto", "disable_parallel_tool_use": True},
            {"tool_choice": ToolChoice.AUTO, "forbids_parallel_calls": True},
        ),
    ],
)
def test_tools_are_offered_and_chosen(choice: Any, expected: Any) -> None:
    request = ask(tools=[TOOL], tool_choice=choice)

    assert options(request) == ConversationOptions(tools=(WEATHER,), **expected)


def test_what_is_not_known_is_left_out_and_named() -> None:
    ignored: set[str] = set()
    request = ask(
        ignored=ignored,
        tools=[
            {**TOOL, "type": "custom", "cache_control": {"type": "ephemeral"}},
            {"type": "web_search_20250305", "name": "web_search", "max_uses": 5},
        ],
        thinking={"type": "enabled", "budget_tokens": 1024},
        metadata={"user_id": "u"},
        context_management={"edits": []},
    )

    assert options(request).tools == (WEATHER,)
    assert ignored == {
        "context_management",
        "metadata",
        "thinking.budget_tokens",
        "tools.web_search_20250305",
    }


def test_counting_takes_the_conversation_that_a_message_is_the_answer_to() -> None:
    said: dict[str, Any] = {"model": "m", "messages": [HI], "system": "Be brief.", "tools": [TOOL]}

    assert to_prompt(parse_body(CountTokensBody, said)) == ask(**said).prompt


@pytest.mark.parametrize(
    ("stated", "field"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [HI, {"role": "assistant", "content": "{"}]}, "messages[1].role"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        (
            {"messages": [{"role": "user", "content": [{"type": "container"}]}]},
            "messages[0].content[0]",
        ),
        (
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [{"type": "tool_use", "id": "c", "name": "f", "input": {}}],
                    }
                ]
            },
            "messages[0].content",
        ),
        (
            {
                "messages": [
                    {"role": "assistant", "content": [{"type": "tool_use", "name": "f"}]},
                    HI,
                ]
            },
            "messages[0].content[0].id",
        ),
        (
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [
                            {
                                "type": "tool_result",
                                "tool_use_id": "c",
                                "content": [{"type": "text", "text": 5}],
                            }
                        ],
                    }
                ]
            },
            "messages[0].content[0].content[0].text",
        ),
        ({"tools": [TOOL | {"name": "a b"}]}, "tools[0].name"),
        ({"tools": [{"type": "custom", "name": "f"}]}, "tools[0].input_schema"),
        ({"tools": [TOOL, {"type": "bash"}], "evenflow": {"strict": True}}, "tools[1]"),
        ({"stop_sequences": [""]}, "stop_sequences[0]"),
        ({"thinking": {"type": "sometimes"}}, "thinking.type"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "f"}}, "tool_choice"),
        ({"evenflow": {"strict": True}, "metadata": {}}, "metadata"),
    ],
)
def test_a_fault_is_named(stated: Any, field: str) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        ask(ignored=set(), **stated)

    assert refused.value.field == field
