"""What a conversation is in the Responses API: items, and the turns that they form."""

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Literal, TypeAlias

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    ValidationInfo,
    WithJsonSchema,
    model_validator,
)

from services.gateway.left_out.members import Part, ignored, note
from services.gateway.left_out.stand_ins import joined, stand_in
from services.gateway.openai.fields import OrText
from services.gateway.openai.parsing import by_kind, kind
from services.gateway.openai.tools import object_text
from services.generation.conversation import ChatMessage, ToolCall

PLACE = "input."
REFERENCE = "item_reference"  # to what the API's own servers keep
_TEXT_MEMBER = {
    "input_text": "text",
    "output_text": "text",
    "reasoning_text": "text",
    "refusal": "refusal",
    "summary_text": "text",
    "text": "text",
}
_TEXT_SCHEMA = {
    "anyOf": [
        {"type": "string"},
        {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {"type": {"enum": sorted(_TEXT_MEMBER)}, "text": {"type": "string"}},
                "required": ["type"],
            },
        },
    ]
}


def _joined_text(value: object, info: ValidationInfo) -> object:
    """Take a list of parts for the text that they form."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise ValueError("must be a string or a list of text parts")
    return joined(_text_of_part(part, info) for part in value)


def _text_of_part(part: object, info: ValidationInfo) -> str:
    if isinstance(part, dict) and (line := stand_in(part, info, PLACE)):
        return line
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(part, dict) or not isinstance(kind, str) or kind not in _TEXT_MEMBER:
        raise ValueError(f"only parts of types {', '.join(sorted(_TEXT_MEMBER))} are supported")
    text = part.get(_TEXT_MEMBER[kind])
    if not isinstance(text, str):
        raise ValueError(f'a part of type {kind} has a string "{_TEXT_MEMBER[kind]}"')
    return text


def _arguments(value: object, info: ValidationInfo) -> object:
    return object_text(value, info, PLACE)


PartsText = Annotated[str, BeforeValidator(_joined_text), WithJsonSchema(_TEXT_SCHEMA)]
ObjectText = Annotated[str, BeforeValidator(_arguments)]
Name = Annotated[str, Field(min_length=1)]


class MessageItem(Part):
    """A turn, or an assistant's text in one."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: PartsText

    def to_turn(self) -> ChatMessage:
        return ChatMessage(role=self.role, content=self.content)


class CallItem(Part):
    """A call that the assistant made."""

    type: Literal["function_call"]
    call_id: Name
    name: Name
    arguments: ObjectText

    def to_turn(self) -> ChatMessage:
        call = ToolCall(id=self.call_id, name=self.name, arguments=self.arguments)
        return ChatMessage(role="assistant", content="", tool_calls=(call,))


class CustomCallItem(Part):
    """A call whose input is a text, which templates know as its one argument."""

    type: Literal["custom_tool_call"]
    call_id: Name
    name: Name
    input: str

    def to_turn(self) -> ChatMessage:
        arguments = json.dumps({"input": self.input}, ensure_ascii=False)
        call = ToolCall(id=self.call_id, name=self.name, arguments=arguments)
        return ChatMessage(role="assistant", content="", tool_calls=(call,))


class CallOutputItem(Part):
    """What a call resulted in."""

    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: Name
    output: PartsText

    def to_turn(self) -> ChatMessage:
        return ChatMessage(role="tool", content=self.output, tool_call_id=self.call_id)


class ReasoningItem(Part):
    """What the assistant thought, or at least a summary of it."""

    type: Literal["reasoning"]
    summary: PartsText = ""
    content: PartsText = ""

    def to_turn(self) -> ChatMessage:
        return ChatMessage(role="assistant", content="", reasoning=self.content or self.summary)


class OtherItem(Part):
    """A reference to what only the API's own servers keep, or what a tool of theirs did: left
    out.
    """

    type: Name = REFERENCE

    @model_validator(mode="after")
    def _leave_out(self, info: ValidationInfo) -> "OtherItem":
        names = ignored(info)
        if names is None:
            rule = "is not supported: responses are not kept, so have the client send whole items"
            raise ValueError(f"type {self.type} {rule} (store: false)")
        note(names, PLACE, self.type)
        return self


_ITEMS = {
    "message": MessageItem,
    "function_call": CallItem,
    "custom_tool_call": CustomCallItem,
    "function_call_output": CallOutputItem,
    "reasoning": ReasoningItem,
}
Item: TypeAlias = (
    MessageItem | CallItem | CustomCallItem | CallOutputItem | ReasoningItem | OtherItem
)


def _item_kind(value: object) -> str | None:
    """Return of which kind an item is; without a type it is a message, or else only an id."""
    if not isinstance(value, dict):
        return None
    is_reference = value.get("role") is None and value.get("id") is not None
    stated = value.get("type") or (REFERENCE if is_reference else "message")
    if stated == "custom_tool_call_output":
        return "function_call_output"
    return stated if isinstance(stated, str) and stated in _ITEMS else "other"


def _as_items(value: object) -> object:
    """Take a text for what the user says."""
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


AnyItem = Annotated[
    Annotated[MessageItem, kind("message")]
    | Annotated[CallItem, kind("function_call")]
    | Annotated[CustomCallItem, kind("custom_tool_call")]
    | Annotated[CallOutputItem, kind("function_call_output")]
    | Annotated[ReasoningItem, kind("reasoning")]
    | Annotated[OtherItem, kind("other")],
    by_kind(_item_kind, fault="must be an object"),
]


def _check_any_is_known(items: list[Item]) -> list[Item]:
    if all(isinstance(item, OtherItem) for item in items):
        rule = "nothing is left without items that are not kept here: have the client send whole"
        raise ValueError(f"{rule} items (store: false)")
    return items


Input = Annotated[
    list[AnyItem],
    Field(min_length=1),
    AfterValidator(_check_any_is_known),
    BeforeValidator(_as_items),
    OrText(),
]


def turns(items: Sequence[Item], instructions: str = "") -> list[ChatMessage]:
    """Return the conversation that items form. What the assistant thought, said and called one
    after the other is one turn of it.
    """
    formed = [ChatMessage(role="system", content=instructions)] if instructions else []
    for item in items:
        if isinstance(item, OtherItem):
            continue
        turn = item.to_turn()
        if formed and _goes_on(formed[-1], turn):
            last = formed[-1]
            formed[-1] = replace(
                last,
                content=last.content + turn.content,
                tool_calls=last.tool_calls + turn.tool_calls,
                reasoning=last.reasoning + turn.reasoning,
            )
        else:
            formed.append(turn)
    return formed


def _goes_on(last: ChatMessage, turn: ChatMessage) -> bool:
    """Return whether `turn` belongs to the assistant's `last` one."""
    if last.role != "assistant" or turn.role != "assistant":
        return False
    if turn.reasoning:
        return not (last.content or last.tool_calls)
    return not (last.content and turn.content)
