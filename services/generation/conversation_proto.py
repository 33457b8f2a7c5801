"""Conversations on the wire, as every service reads and writes them."""

from dataclasses import replace

from evenflow.gateway.v1 import generation_pb2 as gen
from services.generation.conversation import (
    DEFAULT_OPTIONS,
    ChatMessage,
    ConversationOptions,
    ToolCallPart,
    ToolChoice,
    check_options,
)
from services.kit.wire import read, write


def message_from_proto(message: gen.ChatMessage) -> ChatMessage:
    return read(ChatMessage, message, "")


def message_to_proto(message: ChatMessage) -> gen.ChatMessage:
    return write(message, gen.ChatMessage())


def options_from_proto(options: gen.ConversationOptions, *, path: str) -> ConversationOptions:
    """Return checked options. Raises InvalidRequestError naming `path.name`.

    An empty path names the option alone.
    """
    own = read(ConversationOptions, options, path)
    if own.tools and options.tool_choice == gen.TOOL_CHOICE_UNSPECIFIED:
        own = replace(own, tool_choice=ToolChoice.AUTO)
    check_options(own, path=path)
    return own


def options_to_proto(options: ConversationOptions) -> gen.ConversationOptions | None:
    """Return the message; None for the defaults."""
    if options == DEFAULT_OPTIONS:
        return None
    return write(options, gen.ConversationOptions())


def part_from_proto(part: gen.ToolCallPart) -> ToolCallPart:
    return ToolCallPart(part.index, part.id, part.name, part.arguments)


def part_to_proto(part: ToolCallPart) -> gen.ToolCallPart:
    return gen.ToolCallPart(index=part.index, id=part.id, name=part.name, arguments=part.arguments)
