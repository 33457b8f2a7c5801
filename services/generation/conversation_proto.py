"""Conversations on the wire, as every service reads and writes them."""

from types import MappingProxyType

from evenflow.gateway.v1 import generation_pb2 as gen
from services.generation.conversation import (
    DEFAULT_OPTIONS,
    ChatMessage,
    ConversationOptions,
    Tool,
    ToolCall,
    ToolCallPart,
    ToolChoice,
    check_options,
)
from services.kit.errors import InvalidRequestError

_CHOICE_TO_PROTO = MappingProxyType(
    {
        ToolChoice.NONE: gen.TOOL_CHOICE_NONE,
        ToolChoice.AUTO: gen.TOOL_CHOICE_AUTO,
        ToolChoice.REQUIRED: gen.TOOL_CHOICE_REQUIRED,
        ToolChoice.NAMED: gen.TOOL_CHOICE_NAMED,
    }
)
_CHOICE_FROM_PROTO = MappingProxyType({proto: own for own, proto in _CHOICE_TO_PROTO.items()})


def message_from_proto(message: gen.ChatMessage) -> ChatMessage:
    return ChatMessage(
        role=message.role,
        content=message.content,
        tool_calls=tuple(
            ToolCall(id=call.id, name=call.name, arguments=call.arguments)
            for call in message.tool_calls
        ),
        tool_call_id=message.tool_call_id,
        reasoning=message.reasoning,
        name=message.name,
    )


def message_to_proto(message: ChatMessage) -> gen.ChatMessage:
    return gen.ChatMessage(
        role=message.role,
        content=message.content,
        tool_calls=[
            gen.ToolCall(id=call.id, name=call.name, arguments=call.arguments)
            for call in message.tool_calls
        ],
        tool_call_id=message.tool_call_id,
        reasoning=message.reasoning,
        name=message.name,
    )


def options_from_proto(options: gen.ConversationOptions, *, path: str) -> ConversationOptions:
    """Return checked options. Raises InvalidRequestError naming `path.name`.

    An empty path names the option alone.
    """
    choice = _CHOICE_FROM_PROTO.get(options.tool_choice)
    if options.tool_choice == gen.TOOL_CHOICE_UNSPECIFIED:
        choice = ToolChoice.AUTO if options.tools else ToolChoice.NONE
    if choice is None:
        field = f"{path}.tool_choice" if path else "tool_choice"
        raise InvalidRequestError(f"{field}: unknown value", field=field)
    own = ConversationOptions(
        tools=tuple(
            Tool(name=t.name, description=t.description, parameters=t.parameters, strict=t.strict)
            for t in options.tools
        ),
        tool_choice=choice,
        named_tool=options.named_tool,
        forbids_parallel_calls=options.forbids_parallel_calls,
        omits_reasoning=options.omits_reasoning,
        reasoning_effort=options.reasoning_effort,
        template_variables=options.template_variables,
        omits_generation_prompt=options.omits_generation_prompt,
        continues_final_message=options.continues_final_message,
    )
    check_options(own, path=path)
    return own


def options_to_proto(options: ConversationOptions) -> gen.ConversationOptions | None:
    """Return the message; None for the defaults."""
    if options == DEFAULT_OPTIONS:
        return None
    return gen.ConversationOptions(
        tools=[
            gen.Tool(
                name=tool.name,
                description=tool.description,
                parameters=tool.parameters,
                strict=tool.strict,
            )
            for tool in options.tools
        ],
        tool_choice=_CHOICE_TO_PROTO[options.tool_choice],
        named_tool=options.named_tool,
        forbids_parallel_calls=options.forbids_parallel_calls,
        omits_reasoning=options.omits_reasoning,
        reasoning_effort=options.reasoning_effort,
        template_variables=options.template_variables,
        omits_generation_prompt=options.omits_generation_prompt,
        continues_final_message=options.continues_final_message,
    )


def part_from_proto(part: gen.ToolCallPart) -> ToolCallPart:
    return ToolCallPart(part.index, part.id, part.name, part.arguments)


def part_to_proto(part: ToolCallPart) -> gen.ToolCallPart:
    return gen.ToolCallPart(index=part.index, id=part.id, name=part.name, arguments=part.arguments)
