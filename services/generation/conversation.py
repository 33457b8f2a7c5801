"""A conversation that uses tools, as gateway and executor understand it. Pure."""

import json
import re
from dataclasses import dataclass
from enum import Enum
from typing import Any

from services.kit.errors import InvalidRequestError

MAX_TOOLS = 4_096  # each is in the prompt, which the context bounds
VALID_TOOL_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")
REASONING_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
# Variables of a chat template that tell an effort; it knows efforts if it has one of them.
EFFORT_VARIABLES = frozenset({"reasoning_effort", "enable_thinking"})
# Variables of a chat template that a request sets by other parameters, or not at all.
RESERVED_VARIABLES = frozenset(
    {
        "add_generation_prompt",
        "bos_token",
        "chat_template",
        "continue_final_message",
        "conversation",
        "documents",
        "eos_token",
        "max_length",
        "messages",
        "padding",
        "reasoning_effort",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "tokenize",
        "tokenizer_kwargs",
        "tools",
        "truncation",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A call of a function in an earlier turn."""

    id: str  # not empty
    name: str  # of the function, not empty
    arguments: str  # JSON text of an object


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatMessage:
    """One turn of a conversation."""

    role: str
    content: str
    tool_calls: tuple[ToolCall, ...] = ()  # of the assistant
    tool_call_id: str = ""  # the call that a tool's turn is the result of
    reasoning: str = ""  # of the assistant
    name: str = ""  # of the author or of a tool's function; empty: none


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A function that the model may call."""

    name: str  # as VALID_TOOL_NAME has it
    description: str = ""
    parameters: str = ""  # JSON Schema of an object, as JSON text; empty: not described
    strict: bool = False


class ToolChoice(Enum):
    """Whether the model must call a function; the value is OpenAI's name."""

    NONE = "none"
    AUTO = "auto"
    REQUIRED = "required"
    NAMED = "function"

    @property
    def is_forced(self) -> bool:
        return self in (ToolChoice.REQUIRED, ToolChoice.NAMED)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversationOptions:
    """How a conversation is to be answered, beside sampling."""

    tools: tuple[Tool, ...] = ()  # at most MAX_TOOLS
    tool_choice: ToolChoice = ToolChoice.NONE
    named_tool: str = ""  # one of `tools`, for NAMED
    forbids_parallel_calls: bool = False
    omits_reasoning: bool = False
    reasoning_effort: str = ""  # one of REASONING_EFFORTS; empty: the template's own
    template_variables: str = ""  # JSON text of an object; empty: none
    omits_generation_prompt: bool = False  # the prompt does not begin an answer
    continues_final_message: bool = False  # the last turn is left open; only without that


DEFAULT_OPTIONS = ConversationOptions()


@dataclass(frozen=True, slots=True)
class ToolCallPart:
    """The next part of a call that an answer makes."""

    index: int  # of the call in its answer, from 0
    id: str = ""  # in its first part only
    name: str = ""  # in its first part only
    arguments: str = ""  # next characters of the JSON text


def check_calls(message: ChatMessage, *, path: str) -> None:
    """Raise InvalidRequestError naming what of a turn goes with no such role, or is no call."""
    if message.tool_calls and message.role != "assistant":
        _refuse(f"{path}.tool_calls", "only an assistant's turn has them")
    if bool(message.tool_call_id) != (message.role == "tool"):
        _refuse(f"{path}.tool_call_id", "goes with the role tool, and only with it")
    if message.reasoning and message.role != "assistant":
        _refuse(f"{path}.reasoning_content", "only an assistant's turn has it")
    for k, call in enumerate(message.tool_calls):
        place = f"{path}.tool_calls[{k}]"
        if not call.id or not call.name:
            _refuse(place, "id and name must not be empty")
        if not is_object(call.arguments):
            _refuse(f"{place}.function.arguments", "must be the JSON text of an object")


def check_options(options: ConversationOptions, *, path: str = "") -> None:
    """Raise InvalidRequestError naming `path.name` for the first option that does not hold.

    An empty path names the option alone.
    """
    prefix = f"{path}." if path else ""
    _check_tools(options.tools, f"{prefix}tools")
    _check_choice(options, f"{prefix}tool_choice")
    if options.reasoning_effort and options.reasoning_effort not in REASONING_EFFORTS:
        _refuse(f"{prefix}reasoning_effort", f"must be one of {', '.join(REASONING_EFFORTS)}")
    if options.continues_final_message and not options.omits_generation_prompt:
        name = f"{prefix}continues_final_message" if path else "continue_final_message"
        _refuse(name, "goes with no generation prompt: set add_generation_prompt to false")
    name = f"{prefix}template_variables" if path else "chat_template_kwargs"
    if options.template_variables:
        variables = _json_object(options.template_variables)
        if variables is None:
            _refuse(name, "must be the JSON text of an object")
        elif reserved := RESERVED_VARIABLES & variables.keys():
            _refuse(name, f"must not set {min(reserved)}")


def _check_tools(tools: tuple[Tool, ...], place: str) -> None:
    if len(tools) > MAX_TOOLS:
        _refuse(place, f"must hold at most {MAX_TOOLS}")
    for k, tool in enumerate(tools):
        if not VALID_TOOL_NAME.fullmatch(tool.name):
            _refuse(f"{place}[{k}].name", f"must match {VALID_TOOL_NAME.pattern}")
        if tool.parameters and not is_object(tool.parameters):
            _refuse(f"{place}[{k}].parameters", "must be the JSON text of an object")
    if len({tool.name for tool in tools}) < len(tools):
        _refuse(place, "two have the same name")


def _check_choice(options: ConversationOptions, place: str) -> None:
    choice = options.tool_choice
    if choice is not ToolChoice.NONE and not options.tools:
        _refuse(place, "only allowed with tools")
    if choice is ToolChoice.NAMED and options.named_tool not in {t.name for t in options.tools}:
        _refuse(place, "names none of the tools")
    if choice is not ToolChoice.NAMED and options.named_tool:
        _refuse(place, "names a tool without asking for it")


def is_object(text: str) -> bool:
    """Return whether a text is the JSON of an object."""
    return _json_object(text) is not None


def _json_object(text: str) -> dict[str, Any] | None:
    """Return the object that a JSON text is; None if it is none."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _refuse(field: str, rule: str) -> None:
    raise InvalidRequestError(f"{field}: {rule}", field=field)
