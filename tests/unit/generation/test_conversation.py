"""Conversations with tools: what holds, and what survives the wire."""

import pytest

from evenflow.gateway.v1 import generation_pb2 as gen
from services.generation.conversation import (
    DEFAULT_OPTIONS,
    MAX_TOOLS,
    ChatMessage,
    ConversationOptions,
    Tool,
    ToolCall,
    ToolCallPart,
    ToolChoice,
    check_calls,
    check_options,
)
from services.generation.convert import options_from_proto, part_from_proto, part_to_proto
from services.kit.errors import InvalidRequestError
from services.kit.wire import read, write

F = Tool(name="f")
CALL = ToolCall(id="c", name="f", arguments="{}")
NAMELESS = ToolCall(id="", name="f", arguments="{}")
EVERYTHING = ConversationOptions(
    tools=(
        Tool(name="f", description="d", parameters='{"type": "object"}', strict=True),
        Tool(name="g"),
    ),
    tool_choice=ToolChoice.NAMED,
    named_tool="g",
    forbids_parallel_calls=True,
    omits_reasoning=True,
    reasoning_effort="max",
    template_variables='{"x": 1}',
    omits_generation_prompt=True,
    continues_final_message=True,
)


def test_options_survive_the_wire() -> None:
    message = write(EVERYTHING, gen.ConversationOptions)

    assert len(message.ListFields()) == len(message.DESCRIPTOR.fields)
    assert options_from_proto(message, path="") == EVERYTHING


@pytest.mark.parametrize("choice", ToolChoice)
def test_every_choice_survives_the_wire(choice: ToolChoice) -> None:
    named = "f" if choice is ToolChoice.NAMED else ""
    options = ConversationOptions(tools=(F,), tool_choice=choice, named_tool=named)
    message = write(options, gen.ConversationOptions)

    assert options_from_proto(message, path="") == options


def test_a_choice_left_open_is_the_model_s_where_there_are_tools() -> None:
    with_tools = gen.ConversationOptions(tools=[gen.Tool(name="f")])

    assert options_from_proto(with_tools, path="").tool_choice is ToolChoice.AUTO
    assert options_from_proto(gen.ConversationOptions(), path="") == DEFAULT_OPTIONS


def test_turns_and_parts_of_calls_survive_the_wire() -> None:
    turn = ChatMessage(role="assistant", content="x", tool_calls=(CALL,), reasoning="r")
    result = ChatMessage(role="tool", content="y", tool_call_id="c", name="f")
    part = ToolCallPart(2, "c", "f", "{")

    for message in (turn, result):
        assert read(ChatMessage, write(message, gen.ChatMessage)) == message
    assert part_from_proto(part_to_proto(part)) == part


@pytest.mark.parametrize(
    ("options", "field"),
    [
        (ConversationOptions(tools=(Tool(name=""),)), "tools[0].name"),
        (ConversationOptions(tools=(F, Tool(name="a" * 129))), "tools[1].name"),
        (ConversationOptions(tools=(Tool(name="f", parameters="1"),)), "tools[0].parameters"),
        (ConversationOptions(tools=(F, F)), "tools"),
        (
            ConversationOptions(tools=tuple(Tool(name=f"f{k}") for k in range(MAX_TOOLS + 1))),
            "tools",
        ),
        (ConversationOptions(tool_choice=ToolChoice.AUTO), "tool_choice"),
        (ConversationOptions(tools=(F,), tool_choice=ToolChoice.NAMED), "tool_choice"),
        (
            ConversationOptions(tools=(F,), tool_choice=ToolChoice.NAMED, named_tool="g"),
            "tool_choice",
        ),
        (ConversationOptions(tools=(F,), named_tool="f"), "tool_choice"),
        (ConversationOptions(reasoning_effort="utmost"), "reasoning_effort"),
        (ConversationOptions(template_variables="["), "chat_template_kwargs"),
        (ConversationOptions(template_variables='{"messages": 1}'), "chat_template_kwargs"),
    ],
)
def test_what_does_not_hold_is_named(options: ConversationOptions, field: str) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        check_options(options)
    assert refused.value.field == field


def test_as_many_tools_as_are_allowed_hold() -> None:
    check_options(ConversationOptions(tools=tuple(Tool(name=f"f{k}") for k in range(MAX_TOOLS))))


@pytest.mark.parametrize(
    ("turn", "field"),
    [
        (ChatMessage(role="user", content="", tool_calls=(CALL,)), "m.tool_calls"),
        (ChatMessage(role="user", content="", tool_call_id="c"), "m.tool_call_id"),
        (ChatMessage(role="tool", content=""), "m.tool_call_id"),
        (ChatMessage(role="user", content="", reasoning="r"), "m.reasoning_content"),
        (
            ChatMessage(
                role="assistant",
                content="",
                tool_calls=(ToolCall(id="", name="f", arguments="{}"),),
            ),
            "m.tool_calls[0]",
        ),
        (
            ChatMessage(
                role="assistant",
                content="",
                tool_calls=(CALL, ToolCall(id="d", name="f", arguments="[]")),
            ),
            "m.tool_calls[1].function.arguments",
        ),
    ],
)
def test_calls_that_do_not_fit_their_turn_are_named(turn: ChatMessage, field: str) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        check_calls(turn, path="m")
    assert refused.value.field == field
