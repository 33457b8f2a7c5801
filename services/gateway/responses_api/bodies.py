"""The body of `POST /v1/responses`."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema

from services.gateway.left_out.members import LenientBody, Part
from services.gateway.openai.fields import JSON_OBJECT, MaxTokens, NumLogprobs, schema_outputs
from services.gateway.openai.parsing import by_kind, kind
from services.gateway.openai.sampled import GeneratingBody
from services.gateway.openai.tools import NamedFunction, OtherTool, ReasoningEffort
from services.gateway.responses_api.items import Input
from services.generation.conversation import MAX_TOOLS, ToolChoice
from services.generation.sampling_params import StructuredOutputs

LOGPROBS = "message.output_text.logprobs"  # of `include`


class FunctionTool(NamedFunction, Part):
    type: Literal["function"]


def _tool_kind(value: object) -> str:
    is_function = isinstance(value, dict) and value.get("type") == "function"
    return "function" if is_function else "other"


AnyTool = Annotated[
    Annotated[FunctionTool, kind("function")] | Annotated[OtherTool, kind("other")],
    by_kind(_tool_kind),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Which tools the model may or must call."""

    choice: ToolChoice
    named: str = ""  # the tool to call
    allowed: frozenset[str] | None = None  # names; None: all


def _choice(value: object) -> object:
    match value:
        case "none" | "auto" | "required":
            return Choice(choice=ToolChoice(value))
        case {"type": "function", "name": str(name)}:
            return Choice(choice=ToolChoice.NAMED, named=name)
        case {
            "type": "allowed_tools",
            "mode": ("auto" | "required") as mode,
            "tools": [*tools],
        } if all(isinstance(tool, dict) and isinstance(tool.get("name"), str) for tool in tools):
            names = frozenset(tool["name"] for tool in tools)
            return Choice(choice=ToolChoice(mode), allowed=names)
    raise ValueError(
        'must be none, auto, required, {"type": "function", "name"}'
        ' or {"type": "allowed_tools", "mode", "tools"} with functions\' names'
    )


_CHOICE_SCHEMA = {
    "anyOf": [
        {"type": "string", "enum": ["none", "auto", "required"]},
        {
            "type": "object",
            "properties": {"type": {"const": "function"}, "name": {"type": "string"}},
            "required": ["type", "name"],
        },
        {
            "type": "object",
            "properties": {
                "type": {"const": "allowed_tools"},
                "mode": {"type": "string", "enum": ["auto", "required"]},
                "tools": {"type": "array", "items": {"type": "object"}},
            },
            "required": ["type", "mode", "tools"],
        },
    ]
}
ChosenTools = Annotated[Any, BeforeValidator(_choice), WithJsonSchema(_CHOICE_SCHEMA)]


class TextFormat(Part):
    """`strict` is taken and always so: what is drawn keeps to the schema."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str = ""
    description: str = ""
    schema_: dict[str, Any] = Field(default_factory=dict, alias="schema")
    strict: bool = True

    def outputs(self) -> StructuredOutputs | None:
        """Return what the answer must look like; None for anything."""
        if self.type == "json_schema":
            return schema_outputs(self.schema_, "text.format.schema")
        return JSON_OBJECT if self.type == "json_object" else None


class TextBody(LenientBody):
    place = "text."

    format: TextFormat = TextFormat()


class ReasoningBody(LenientBody):
    place = "reasoning."

    effort: ReasoningEffort | None = None


class ResponsesBody(GeneratingBody):
    """Body of `POST /v1/responses`."""

    input: Input
    instructions: str = ""
    max_output_tokens: MaxTokens | None = None
    tools: list[AnyTool] = Field(default_factory=list, max_length=MAX_TOOLS)
    tool_choice: ChosenTools = Field(default_factory=lambda: Choice(choice=ToolChoice.AUTO))
    parallel_tool_calls: bool = True
    text: TextBody = TextBody()
    reasoning: ReasoningBody = ReasoningBody()
    include_reasoning: bool = True
    include: list[str] = Field(default_factory=list)
    top_logprobs: NumLogprobs = 0
    metadata: dict[str, str] = Field(default_factory=dict)
    store: bool = False
    background: bool = False
    previous_response_id: str | None = None
    conversation: Any = None
    prompt: Any = None

    @property
    def functions(self) -> list[FunctionTool]:
        """Return the tools that the model may know of."""
        allowed = self.tool_choice.allowed
        return [
            tool
            for tool in self.tools
            if isinstance(tool, FunctionTool) and (allowed is None or tool.name in allowed)
        ]
