"""What a conversation is in the Messages API: turns of blocks."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BeforeValidator, ConfigDict, Field, ValidationInfo

from services.gateway.left_out.members import Part
from services.gateway.left_out.stand_ins import stand_in
from services.gateway.openai import rules
from services.gateway.openai.fields import OrText
from services.gateway.openai.parsing import by_kind, kind
from services.generation.conversation import ChatMessage, ToolCall
from services.kit.errors import InvalidRequestError

# Claude Code begins its system prompt with such a block. It is for bills, and changes from call to
# call, so that no cache would know the prompt again.
BILLING_PREFIX = "x-anthropic-billing-header"


class CacheControl(Part):
    """A mark: what ends with its block is to be kept."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] = "5m"

    @property
    def retention_s(self) -> float:
        return SECONDS_BY_TTL[self.ttl]


SECONDS_BY_TTL = MappingProxyType({"5m": 300.0, "1h": 3_600.0})


class MarkedPart(Part):
    cache_control: CacheControl | None = None


class TextBlock(MarkedPart):
    type: Literal["text"]
    text: str


class ThinkingBlock(Part):
    type: Literal["thinking"]
    thinking: str


class RedactedThinkingBlock(Part):
    """What another server's model thought; nothing here can read it."""

    type: Literal["redacted_thinking"]


class ToolUseBlock(MarkedPart):
    """A call that the assistant made."""

    type: Literal["tool_use"]
    id: str = Field(min_length=1)
    name: str = Field(min_length=1)
    input: dict[str, Any]


def _as_blocks(value: object, info: ValidationInfo) -> object:
    """Take a text for a block of it."""
    if isinstance(value, str):
        return [_text_block(value)]
    return [_readable(block, info) for block in value] if isinstance(value, list) else value


def _readable(block: object, info: ValidationInfo) -> object:
    """Take a document's text, or the line that stands for an image, for a block of text."""
    match block:
        case {"type": "document", "source": {"type": "text", "data": str(text)}, **more}:
            return _text_block(text) | _mark(more)
        case dict():
            line = stand_in(block, info, "messages.content.")
            return block if line is None else _text_block(str(line)) | _mark(block)
    return block


def _text_block(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _mark(block: Mapping[Any, Any]) -> dict[str, Any]:
    return {"cache_control": block["cache_control"]} if "cache_control" in block else {}


TextBlocks = Annotated[list[TextBlock], BeforeValidator(_as_blocks), OrText()]


class ToolResultBlock(MarkedPart):
    """What a call resulted in."""

    type: Literal["tool_result"]
    tool_use_id: str = Field(min_length=1)
    content: TextBlocks = Field(default_factory=list)


Block: TypeAlias = (
    TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock | ToolResultBlock
)


def retention_of(parts: Iterable[Part]) -> float:
    """Return the longest that a mark of these asks for, in seconds; 0: there is none."""
    longest_s = 0.0
    for part in parts:
        if isinstance(part, MarkedPart) and part.cache_control is not None:
            longest_s = max(longest_s, part.cache_control.retention_s)
        if isinstance(part, ToolResultBlock):
            longest_s = max(longest_s, retention_of(part.content))
    return longest_s


def _block_kind(value: object) -> str | None:
    kind_of_block = value.get("type") if isinstance(value, dict) else None
    return kind_of_block if isinstance(kind_of_block, str) else None


AnyBlock = Annotated[
    Annotated[TextBlock, kind("text")]
    | Annotated[ThinkingBlock, kind("thinking")]
    | Annotated[RedactedThinkingBlock, kind("redacted_thinking")]
    | Annotated[ToolUseBlock, kind("tool_use")]
    | Annotated[ToolResultBlock, kind("tool_result")],
    by_kind(
        _block_kind,
        fault="type must be text, tool_use, tool_result, thinking or redacted_thinking",
    ),
]
Blocks = Annotated[list[AnyBlock], BeforeValidator(_as_blocks), OrText()]
_BLOCKS_OF_A_USER = (TextBlock, ToolResultBlock)
_BLOCKS_OF_AN_ASSISTANT = (TextBlock, ThinkingBlock, RedactedThinkingBlock, ToolUseBlock)


def _made_of(*types: str) -> dict[str, Any]:
    """Describe a turn whose blocks, if it has any, are of these types."""
    block = {"properties": {"type": {"enum": types}}}
    content = {"anyOf": [{"type": "string"}, {"type": "array", "items": block}]}
    return {"properties": {"content": content}}


class Turn(Part):
    """What one side says; its blocks may be several turns of a chat template."""

    model_config = ConfigDict(
        extra="ignore",
        json_schema_extra=rules.if_is(
            "role",
            "assistant",
            then=_made_of("text", "thinking", "redacted_thinking", "tool_use"),
            otherwise=_made_of("text", "tool_result"),
        ),
    )

    role: Literal["user", "assistant", "system"]
    content: Blocks


def text_of(blocks: Sequence[TextBlock]) -> str:
    """Return the text of blocks that a client wrote, one paragraph each."""
    return "\n".join(block.text for block in blocks if not block.text.startswith(BILLING_PREFIX))


def chat_messages(turns: Sequence[Turn], system: Sequence[TextBlock]) -> list[ChatMessage]:
    """Return the conversation as chat templates know it. Raises InvalidRequestError naming the
    turn with a block that its side cannot have.
    """
    messages = [ChatMessage(role="system", content=text)] if (text := text_of(system)) else []
    for k, turn in enumerate(turns):
        is_said = turn.role == "assistant"
        allowed = _BLOCKS_OF_AN_ASSISTANT if is_said else _BLOCKS_OF_A_USER
        for block in turn.content:
            if not isinstance(block, allowed):
                place = f"messages[{k}].content"
                rule = f"a turn of the {turn.role} has no block of type {block.type}"
                raise InvalidRequestError(f"{place}: {rule}", field=place)
        messages += [_said(turn)] if is_said else _asked(turn)
    return messages


def _said(turn: Turn) -> ChatMessage:
    """Return the assistant's turn."""
    message = ChatMessage(role=turn.role, content="")
    for block in turn.content:
        match block:
            case TextBlock():
                message = replace(message, content=message.content + block.text)
            case ThinkingBlock():
                message = replace(message, reasoning=message.reasoning + block.thinking)
            case ToolUseBlock():
                arguments = json.dumps(block.input, ensure_ascii=False)
                call = ToolCall(id=block.id, name=block.name, arguments=arguments)
                message = replace(message, tool_calls=(*message.tool_calls, call))
    return message


def _asked(turn: Turn) -> Iterator[ChatMessage]:
    """Yield each result of a call, and the text between them, in order."""
    texts: list[TextBlock] = []
    for block in turn.content:
        match block:
            case TextBlock():
                texts.append(block)
            case ToolResultBlock():
                if texts:
                    yield ChatMessage(role=turn.role, content=text_of(texts))
                    texts = []
                result = text_of(block.content)
                yield ChatMessage(role="tool", content=result, tool_call_id=block.tool_use_id)
    if texts or not turn.content:
        yield ChatMessage(role=turn.role, content=text_of(texts))
