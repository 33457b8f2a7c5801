"""Turns, tools and calls: how conversations of the OpenAI API are written in JSON."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import (
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationInfo,
    WithJsonSchema,
    model_validator,
)

from services.gateway.left_out.characters import whole_json
from services.gateway.left_out.members import LenientBody, Part, StrictBody, ignored, note
from services.gateway.openai import rules
from services.gateway.openai.fields import Text, json_text
from services.gateway.types import ROLES
from services.generation.conversation import (
    MAX_TOOLS,
    REASONING_EFFORTS,
    VALID_TOOL_NAME,
    ChatMessage,
    ConversationOptions,
    Tool,
    ToolCall,
    ToolChoice,
    is_object,
)

ToolName = Annotated[str, Field(pattern=f"^{VALID_TOOL_NAME.pattern}$")]
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
assert ReasoningEffort.__args__ == REASONING_EFFORTS  # type: ignore[attr-defined]


def object_text(value: object, info: ValidationInfo, place: str) -> object:
    """Return the JSON text of an object for arguments of a call.

    Those that are cut short, or no object, are left out and noted at `place`. Models write nothing
    at all where a function takes none.
    """
    if not value and isinstance(value, str):
        return "{}"
    if not isinstance(value, str):
        return value
    if is_object(value):
        return whole_json(value)
    names = ignored(info)
    if names is None:
        raise ValueError("must be the JSON text of an object")
    note(names, place, "arguments")
    return "{}"


def _arguments(value: object, info: ValidationInfo) -> object:
    return object_text(value, info, CalledFunction.place)


class CalledFunction(LenientBody):
    place = "messages.tool_calls.function."

    name: str = Field(min_length=1)
    arguments: Annotated[str, BeforeValidator(_arguments)] = "{}"


class CallBody(LenientBody):
    """A call that an assistant's turn made."""

    place = "messages.tool_calls."

    id: str = Field(min_length=1)
    type: Literal["function"] = "function"
    function: CalledFunction

    def to_call(self) -> ToolCall:
        function = self.function
        return ToolCall(id=self.id, name=function.name, arguments=function.arguments)


class Message(LenientBody):
    """A turn. What an answer of this API has may be sent back as it is, and what clients add to
    turns that they keep, for themselves or for other servers, is left out.
    """

    model_config = ConfigDict(
        json_schema_extra=rules.together(
            rules.if_is(
                "role",
                "tool",
                then={
                    "properties": {"tool_call_id": {"minLength": 1}},
                    "required": ["tool_call_id"],
                },
                otherwise=rules.absent("tool_call_id"),
            ),
            rules.if_is(
                "role",
                "assistant",
                then={},
                otherwise=rules.absent("tool_calls", "reasoning", "reasoning_content"),
            ),
        )
    )

    place = "messages."
    refused = frozenset({"function_call"})

    role: Annotated[str, Field(json_schema_extra={"enum": ROLES})]
    content: Text = ""
    tool_calls: list[CallBody] = Field(default_factory=list)
    tool_call_id: str = ""
    name: str = ""
    reasoning: str = ""  # as vLLM names it
    reasoning_content: str = ""  # as others do
    refusal: str = ""  # what an assistant said instead of an answer

    def to_turn(self) -> ChatMessage:
        return ChatMessage(
            role=self.role,
            content=self.content or self.refusal,
            tool_calls=tuple(call.to_call() for call in self.tool_calls),
            tool_call_id=self.tool_call_id,
            reasoning=self.reasoning or self.reasoning_content,
            name=self.name,
        )


class NamedFunction(StrictBody):
    """A function that a model may call, as OpenAI's APIs describe it."""

    name: ToolName
    description: str = ""
    parameters: dict[str, Any] = Field(default_factory=dict)
    strict: bool = False

    def to_tool(self) -> Tool:
        return Tool(
            name=self.name,
            description=self.description,
            parameters=json_text(self.parameters, "tools"),
            strict=self.strict,
        )


class FunctionBody(NamedFunction, LenientBody):
    place = "tools.function."


class ToolBody(LenientBody):
    place = "tools."

    type: Literal["function"]
    function: FunctionBody


class OtherTool(Part):
    """A tool that the API's own servers run, or of a form that no template knows: left out."""

    type: str = Field(min_length=1)

    @model_validator(mode="after")
    def _leave_out(self, info: ValidationInfo) -> "OtherTool":
        names = ignored(info)
        if names is None:
            raise ValueError("only tools with a schema of their own are supported")
        note(names, "tools.", self.type)
        return self


Tools = Annotated[list[ToolBody], Field(min_length=1, max_length=MAX_TOOLS)]


def tool_options(tools: Sequence[ToolBody] | None) -> ConversationOptions:
    """Return the options that say no more than which tools there are; the model may call them."""
    return ConversationOptions(
        tools=tuple(tool.function.to_tool() for tool in tools or ()),
        tool_choice=ToolChoice.AUTO if tools else ToolChoice.NONE,
    )


def _chosen_tool(value: object) -> tuple[ToolChoice, str]:
    """Return whether a function must be called, and which one if one is named."""
    if isinstance(value, str) and value in _CHOICES:
        return ToolChoice(value), ""
    match value:
        case {"type": "function", "function": {"name": str(name), **more}, **others} if not (
            more or others
        ):
            return ToolChoice.NAMED, name
    raise ValueError(
        f'must be one of {", ".join(_CHOICES)}, or {{"type": "function", "function": {{"name"}}}}'
    )


_CHOICES = (ToolChoice.NONE.value, ToolChoice.AUTO.value, ToolChoice.REQUIRED.value)
_CHOICE_SCHEMA = {
    "anyOf": [
        {"type": "string", "enum": list(_CHOICES)},
        {"type": "null"},
        {
            "type": "object",
            "properties": {
                "type": {"const": "function"},
                "function": {
                    "type": "object",
                    "properties": {"name": {"type": "string", "minLength": 1}},
                    "required": ["name"],
                    "additionalProperties": False,
                },
            },
            "required": ["type", "function"],
            "additionalProperties": False,
        },
    ]
}
ChosenTool = Annotated[Any, BeforeValidator(_chosen_tool), WithJsonSchema(_CHOICE_SCHEMA)]
