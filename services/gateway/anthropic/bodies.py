"""The bodies of Anthropic's Messages API."""

from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from services.gateway.anthropic.blocks import (
    CacheControl,
    MarkedPart,
    TextBlocks,
    Turn,
    chat_messages,
    retention_of,
)
from services.gateway.left_out.members import LenientBody, Part
from services.gateway.openai import rules
from services.gateway.openai.fields import (
    MaxTokens,
    TemplateVariables,
    json_text,
    schema_outputs,
)
from services.gateway.openai.parsing import by_kind, kind
from services.gateway.openai.sampled import GeneratingBody
from services.gateway.openai.tools import OtherTool, ReasoningEffort, ToolName
from services.generation import sampling_params as limits
from services.generation.conversation import MAX_TOOLS, Tool
from services.generation.retention import RetentionMark, without_needless
from services.generation.sampling_params import StructuredOutputs

StopSequence = Annotated[str, Field(min_length=1)]


class OwnTool(MarkedPart):
    type: Literal["custom"] = "custom"
    name: ToolName
    description: str = ""
    input_schema: dict[str, Any]
    strict: bool = False

    def to_tool(self) -> Tool:
        return Tool(
            name=self.name,
            description=self.description,
            parameters=json_text(self.input_schema, "tools"),
            strict=self.strict,
        )


def _tool_kind(value: object) -> str:
    is_own = isinstance(value, dict) and (value.get("type") or "custom") == "custom"
    return "custom" if is_own else "other"


AnyTool = Annotated[
    Annotated[OwnTool, kind("custom")] | Annotated[OtherTool, kind("other")],
    by_kind(_tool_kind),
]


class ToolChoiceBody(Part):
    type: Literal["auto", "any", "tool", "none"]
    name: str = ""
    disable_parallel_tool_use: bool = False


class ThinkingBody(LenientBody):
    place = "thinking."

    type: Literal["enabled", "adaptive", "between_tools", "disabled"]


class JsonOutput(Part):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")

    def outputs(self) -> StructuredOutputs:
        """Return what the answer must look like."""
        return schema_outputs(self.schema_, "output_config.format.schema")


class OutputConfig(LenientBody):
    place = "output_config."

    effort: ReasoningEffort | None = None
    format: JsonOutput | None = None


class CountTokensBody(LenientBody):
    """Body of `POST /v1/messages/count_tokens`: a conversation."""

    model: str = Field(min_length=1)
    messages: list[Turn] = Field(min_length=1)
    system: TextBlocks = Field(default_factory=list)
    tools: list[AnyTool] = Field(default_factory=list, max_length=MAX_TOOLS)
    tool_choice: ToolChoiceBody = ToolChoiceBody(type="auto")
    thinking: ThinkingBody = ThinkingBody(type="adaptive")
    output_config: OutputConfig = OutputConfig()
    chat_template_kwargs: TemplateVariables = Field(default_factory=dict)

    @property
    def own_tools(self) -> list[OwnTool]:
        """Return the tools that the model may know of."""
        return [tool for tool in self.tools if isinstance(tool, OwnTool)]


class MessagesBody(CountTokensBody, GeneratingBody):
    """Body of `POST /v1/messages`."""

    # The last one is; there is no schema that says so.
    model_config = ConfigDict(
        json_schema_extra=rules.together(
            {"properties": {"messages": {"contains": {"properties": {"role": {"const": "user"}}}}}}
        )
    )

    max_tokens: MaxTokens
    stop_sequences: list[StopSequence] = Field(
        default_factory=list, max_length=limits.MAX_STOP_STRINGS
    )
    cache_control: CacheControl | None = None  # of all

    def retention_marks(self) -> tuple[RetentionMark, ...]:
        """Return what marks ask to be kept: all up to the end of the turn that a mark is in. One of
        a tool, which stands where the template has it, is on the system prompt's turn.
        """
        seconds = [retention_of([*self.own_tools, *self.system])]
        seconds += [retention_of(turn.content) for turn in self.messages]
        if self.cache_control is not None:
            seconds[-1] = max(seconds[-1], self.cache_control.retention_s)
        by_turn = [
            RetentionMark(retention_s=one, num_messages=number)
            for number, one in enumerate(seconds)
        ]
        return tuple(
            replace(mark, num_messages=self._num_messages(mark.num_messages))
            for mark in without_needless(by_turn)
        )

    def _num_messages(self, num_turns: int) -> int:
        """Return how many a template has of the system prompt and so many turns, at least one; 0:
        all of them.
        """
        if num_turns == len(self.messages):
            return 0
        return max(1, len(chat_messages(self.messages[:num_turns], self.system)))
