"""What `POST /v1/responses` takes, item by item, and whom it blames."""

import json
from typing import Any

import pytest

from services.gateway.openai.parsing import parse_body
from services.gateway.responses_api.bodies import ResponsesBody
from services.gateway.responses_api.requests import to_generation_request
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

TOOL = {"type": "function", "name": "weather", "parameters": {"type": "object"}}
WEATHER = Tool(name="weather", parameters='{"type": "object"}')


def ask(
    headers: dict[str, str] | None = None, /, *, ignored: set[str] | None = None, **parameters: Any
) -> GenerationRequest:
    body = {"model": "m", "input": "Hi"} | parameters
    parsed = parse_body(ResponsesBody, body, ignored)
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
        delivery=Delivery.WHOLE,
    )


def test_what_is_not_named_is_the_model_s_own() -> None:
    default = SamplingParams(max_tokens=64, temperature=0.6, top_k=20)
    body = parse_body(ResponsesBody, {"model": "m", "input": "Hi", "temperature": 0.0, "top_k": -1})
    request = to_generation_request(body, {}, RequestId("r"), default)

    assert request.sampling == SamplingParams(max_tokens=64, temperature=0.0, top_k=0)


def test_all_that_changes_an_answer_is_passed_on() -> None:
    schema = {"type": "object", "properties": {}}
    request = ask(
        {"x-slo-ttft-ms": "250"},
        instructions="Be brief.",
        max_output_tokens=9,
        temperature=0.5,
        top_k=-1,
        seed=3,
        stream=True,
        store=False,
        include=["reasoning.encrypted_content", "message.output_text.logprobs"],
        top_logprobs=2,
        text={"format": {"type": "json_schema", "name": "a", "schema": schema, "strict": True}},
        reasoning={"effort": "low"},
        priority=-1,
        evenflow={"consumption_rate_tps": 5},
    )

    assert turns(request)[0] == ChatMessage(role="system", content="Be brief.")
    assert options(request) == ConversationOptions(reasoning_effort="low")
    form = StructuredOutputs(form=AnswerForm.JSON_SCHEMA, text=json.dumps(schema))
    assert request.sampling == SamplingParams(
        max_tokens=9, temperature=0.5, seed=3, logprobs=2, structured_outputs=form
    )
    assert request.service_level == ServiceLevel(slo_ttft_s=0.25, consumption_rate_tps=5)
    assert (request.delivery, request.priority) == (Delivery.STREAMED, -1)


def test_items_form_the_turns_that_they_were_parts_of() -> None:
    call = {"type": "function_call", "id": "fc_1", "status": "completed", "name": "weather"}
    output = {"type": "function_call_output"}
    request = ask(
        input=[
            {"role": "user", "content": [{"type": "input_text", "text": "Rain?"}]},
            {
                "type": "reasoning",
                "id": "rs_1",
                "summary": [],
                "content": [{"type": "reasoning_text", "text": "Ask."}],
            },
            {
                "type": "message",
                "id": "msg_1",
                "role": "assistant",
                "status": "completed",
                "content": [{"type": "output_text", "text": "Wait.", "annotations": []}],
            },
            call | {"call_id": "c1", "arguments": '{"city": "Oslo"}'},
            call | {"call_id": "c2", "arguments": ""},
            output | {"call_id": "c1", "output": "dry"},
            output | {"call_id": "c2", "output": [{"type": "input_text", "text": "wet"}]},
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Once more."}]},
            call | {"call_id": "c3", "arguments": "{}"},
            output | {"call_id": "c3", "output": ""},
            {"role": "assistant", "content": "Dry."},
            {"role": "assistant", "content": "And wet."},
        ]
    )

    assert turns(request)[1:] == (
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
        ChatMessage(
            role="assistant",
            content="",
            reasoning="Once more.",
            tool_calls=(ToolCall(id="c3", name="weather", arguments="{}"),),
        ),
        ChatMessage(role="tool", content="", tool_call_id="c3"),
        ChatMessage(role="assistant", content="Dry."),
        ChatMessage(role="assistant", content="And wet."),
    )


OTHER = {"type": "function", "name": "time"}


@pytest.mark.parametrize(
    ("stated", "expected"),
    [
        ({}, {"tool_choice": ToolChoice.AUTO}),
        ({"tool_choice": "none"}, {"tool_choice": ToolChoice.NONE}),
        ({"tool_choice": "required"}, {"tool_choice": ToolChoice.REQUIRED}),
        (
            {"tool_choice": {"type": "function", "name": "weather"}},
            {"tool_choice": ToolChoice.NAMED, "named_tool": "weather"},
        ),
        (
            {
                "tools": [TOOL, OTHER],
                "tool_choice": {"type": "allowed_tools", "mode": "required", "tools": [TOOL]},
            },
            {"tool_choice": ToolChoice.REQUIRED},
        ),
        (
            {"parallel_tool_calls": False},
            {"tool_choice": ToolChoice.AUTO, "forbids_parallel_calls": True},
        ),
    ],
)
def test_tools_are_offered_and_chosen(stated: Any, expected: Any) -> None:
    request = ask(**{"tools": [TOOL]} | stated)

    assert options(request) == ConversationOptions(tools=(WEATHER,), **expected)


def test_what_is_not_known_is_left_out_and_named() -> None:
    ignored: set[str] = set()
    request = ask(
        ignored=ignored,
        tools=[TOOL, {"type": "web_search", "search_context_size": "low"}],
        truncation="auto",
        user="u",
        text={"verbosity": "low"},
        reasoning={"summary": "auto"},
        **{"a\r\nb": 1, "absent": None},
    )

    assert options(request).tools == (WEATHER,)
    assert ignored == {
        "tools.web_search",
        "truncation",
        "user",
        "text.verbosity",
        "reasoning.summary",
        "other",
    }


@pytest.mark.parametrize(
    "stated", [{"user": "u"}, {"tools": [{"type": "mcp"}]}, {"text": {"verbosity": "low"}}]
)
def test_a_strict_client_hears_of_it(stated: Any) -> None:
    with pytest.raises(InvalidRequestError):
        ask(evenflow={"strict": True}, **stated)


@pytest.mark.parametrize(
    ("stated", "field"),
    [
        ({"store": True}, "store"),
        ({"background": True}, "background"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt"),
        ({"input": []}, "input"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"tool_choice": "sometimes"}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "f"}}, "tool_choice"),
        ({"text": {"format": {"type": "grammar"}}}, "text.format.type"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_tool"}]}]},
            "input[0].content",
        ),
        (
            {"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": 1}]},
            "input[0].arguments",
        ),
        ({"input": [{"type": "message", "message": {}}]}, "input[0].role"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools[0].name"),
    ],
)
def test_a_fault_is_named(stated: Any, field: str) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        ask(ignored=set(), **stated)

    assert refused.value.field == field


REFERENCE = {"type": "item_reference", "id": "msg_1"}
AGAIN = {"role": "user", "content": "again"}


@pytest.mark.parametrize(
    "kind",
    [
        "item_reference",
        "web_search_call",
        "local_shell_call",
        "local_shell_call_output",
        "compaction",
        "computer_call_output",
        "what_is_not_known_yet",
    ],
)
def test_items_that_only_the_api_s_own_servers_have_are_left_out_and_named(kind: str) -> None:
    ignored: set[str] = set()

    request = ask(input=[{"type": kind, "id": "x"}, AGAIN], ignored=ignored)

    assert turns(request) == (ChatMessage(role="user", content="again"),)
    assert ignored == {f"input.{kind}"}


@pytest.mark.parametrize("kind", ["\x01", "a\r\nb", "\N{SNOWMAN}", "a" * 65])
def test_what_is_of_a_type_that_no_header_can_have_is_named_other(kind: str) -> None:
    ignored: set[str] = set()

    request = ask(input=[{"type": kind}, AGAIN], tools=[{"type": kind}], ignored=ignored)

    assert turns(request) == (ChatMessage(role="user", content="again"),)
    assert ignored == {"input.other", "tools.other"}


@pytest.mark.parametrize("item", [{"id": "msg_1"}, {"id": "msg_1", "type": None, "role": None}])
def test_an_item_that_is_nothing_but_an_id_is_a_reference(item: dict[str, Any]) -> None:
    ignored: set[str] = set()

    request = ask(input=[item, AGAIN], ignored=ignored)

    assert turns(request) == (ChatMessage(role="user", content="again"),)
    assert ignored == {"input.item_reference"}


def test_where_nothing_may_be_left_out_such_items_are_refused_by_their_type() -> None:
    with pytest.raises(
        InvalidRequestError, match=r"^input\[0\]: type item_reference .*store: false"
    ):
        ask(input=[REFERENCE, AGAIN], evenflow={"strict": True})


def test_an_input_of_which_nothing_is_left_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="nothing is left") as refused:
        ask(input=[REFERENCE], ignored=set())
    assert refused.value.field == "input"


@pytest.mark.parametrize("item", [{"type": 5}, {"type": ""}, 5, None, [REFERENCE]])
def test_what_is_no_item_is_refused(item: object) -> None:
    if item == {"type": ""}:
        item = {"type": "", "role": 5}  # an empty type is none: a message, and this is none
    with pytest.raises(InvalidRequestError, match=r"input\[0\]"):
        ask(input=[item], ignored=set())


def test_a_call_with_a_text_for_input_is_a_call_with_one_argument() -> None:
    call = {"type": "custom_tool_call", "call_id": "c", "name": "patch", "input": 'say "hi"'}
    output = {"type": "custom_tool_call_output", "call_id": "c", "output": "done"}

    request = ask(input=[call, output, AGAIN])

    made = ToolCall(id="c", name="patch", arguments='{"input": "say \\"hi\\""}')
    assert turns(request) == (
        ChatMessage(role="assistant", content="", tool_calls=(made,)),
        ChatMessage(role="tool", content="done", tool_call_id="c"),
        ChatMessage(role="user", content="again"),
    )
