"""What the model's chat template is given: turns, tools and its variables."""

import json
import re
from datetime import datetime
from inspect import signature
from typing import Any

from vllm.config import ModelConfig
from vllm.renderers.hf import resolve_chat_template, resolve_chat_template_kwargs
from vllm.renderers.params import ChatParams
from vllm.utils.mistral import is_mistral_tokenizer

from services.executor.types import RejectCode, RejectedError, Rejection
from services.generation.conversation import (
    EFFORT_VARIABLES,
    ChatMessage,
    ConversationOptions,
    Tool,
)
from services.generation.prompts import ChatPrompt

CLOCK = "strftime_now"  # what templates call with a format
_WORD = re.compile(r"[A-Za-z_]\w*")


def messages_of(chat: ChatPrompt) -> list[dict[str, Any]]:
    """Return the turns as vLLM takes them."""
    return [_message(turn) for turn in chat.messages]


def _message(turn: ChatMessage) -> dict[str, Any]:
    message: dict[str, Any] = {"role": turn.role, "content": turn.content}
    if turn.tool_calls:
        message["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in turn.tool_calls
        ]
    if turn.tool_call_id:
        message["tool_call_id"] = turn.tool_call_id
    if turn.reasoning:
        message["reasoning"] = turn.reasoning
    if turn.name:
        message["name"] = turn.name
    return message


def tools_of(options: ConversationOptions) -> list[dict[str, Any]] | None:
    """Return the tools as vLLM and templates take them; None without any."""
    return [_tool(tool) for tool in options.tools] or None


def _tool(tool: Tool) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name}
    if tool.description:
        function["description"] = tool.description
    function["parameters"] = json.loads(tool.parameters) if tool.parameters else None
    if tool.strict:
        function["strict"] = True
    return {"type": "function", "function": function}


def template_variables(options: ConversationOptions) -> dict[str, Any]:
    """Return what a template is given beside turns and tools, whether or not it knows it."""
    stated = json.loads(options.template_variables) if options.template_variables else {}
    variables: dict[str, Any] = {
        "add_generation_prompt": not options.omits_generation_prompt,
        **stated,
    }
    if options.continues_final_message:
        variables["continue_final_message"] = True
    if options.reasoning_effort:
        variables["reasoning_effort"] = options.reasoning_effort
        # Some templates think only if told to.
        variables.setdefault("enable_thinking", options.reasoning_effort != "none")
    return variables


def chat_params(options: ConversationOptions, *, now_s: float | None = None) -> ChatParams:
    """Return how vLLM is to render a conversation. `now_s`: seconds since the epoch that the
    template takes for now; None: it has a clock.
    """
    variables = template_variables(options)
    if now_s is not None:
        variables[CLOCK] = datetime.fromtimestamp(now_s).astimezone().strftime
    if tools := tools_of(options):
        variables["tools"] = tools
    return ChatParams(
        chat_template_kwargs=variables,
        tool_choice=options.tool_choice.value if options.tools else None,
    )


def reads_clock(config: ModelConfig, tokenizer: Any) -> bool:
    """Return whether the model's template, in Jinja, may ask what time it is."""
    return any(CLOCK in template for template in templates_of(config, tokenizer))


def templates_of(config: ModelConfig, tokenizer: Any) -> list[str]:
    """Return the model's templates in Jinja: the one without tools and the one with; none of
    another kind.
    """
    templates = [_template(config, tokenizer, tools) for tools in (None, [_ANY_TOOL])]
    return [template for template in templates if template]


def check_variables(options: ConversationOptions, config: ModelConfig, tokenizer: Any) -> None:
    """Raise RejectedError naming the parameter that the model's template does not know.

    Templates that are not Jinja are not looked into.
    """
    if not (options.template_variables or options.reasoning_effort):
        return
    template = _template(config, tokenizer, tools_of(options))
    if template is None:
        return
    offered = template_variables(options)
    known = resolve_chat_template_kwargs(tokenizer, template, offered).keys()
    if options.reasoning_effort and not EFFORT_VARIABLES & known:
        _refuse("reasoning_effort", "the model's chat template has no reasoning effort")
    stated = json.loads(options.template_variables) if options.template_variables else {}
    if unknown := stated.keys() - known:
        _refuse("chat_template_kwargs", f"the model's chat template has no {min(unknown)}")


def known_variables(config: ModelConfig, tokenizer: Any) -> tuple[str, ...]:
    """Return the variables that `check_variables` takes, with tools and without, and `messages`,
    sorted; empty for a template that is not looked into.
    """
    templates = templates_of(config, tokenizer)
    known = [_variables_of(template, tokenizer) for template in templates]
    return tuple(sorted(frozenset.intersection(*known) | {"messages"})) if known else ()


_ANY_TOOL = _tool(Tool(name="any"))


def _variables_of(template: str, tokenizer: Any) -> frozenset[str]:
    words = {*_WORD.findall(template), *signature(tokenizer.apply_chat_template).parameters}
    offered = dict.fromkeys(words)
    return frozenset(
        resolve_chat_template_kwargs(tokenizer, template, offered, raise_on_unexpected=False)
    )


def _template(config: ModelConfig, tokenizer: Any, tools: Any) -> str | None:
    """Return the template in Jinja; None if it is of another kind."""
    if is_mistral_tokenizer(tokenizer):
        return None
    template: str | None = resolve_chat_template(tokenizer, None, tools, model_config=config)
    return template


def _refuse(field: str, rule: str) -> None:
    code = RejectCode.INVALID_ARGUMENT
    raise RejectedError(Rejection(code=code, field=field, message=f"{field}: {rule}"))
