"""Checked bodies of the Messages API as a prompt, and as a generation request."""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from services.gateway.anthropic.blocks import chat_messages
from services.gateway.anthropic.bodies import CountTokensBody, MessagesBody
from services.gateway.checks import checked_conversation
from services.gateway.openai.fields import json_text
from services.gateway.types import GenerationRequest, RequestId
from services.generation.conversation import ConversationOptions, ToolChoice, check_options
from services.generation.prompts import ChatPrompt
from services.generation.sampling_params import DEFAULT_SAMPLING, SamplingParams
from services.kit.errors import InvalidRequestError

_CHOICES = MappingProxyType(
    {
        "auto": ToolChoice.AUTO,
        "any": ToolChoice.REQUIRED,
        "tool": ToolChoice.NAMED,
        "none": ToolChoice.NONE,
    }
)


def to_prompt(body: CountTokensBody) -> ChatPrompt:
    """Return the conversation. Raises InvalidRequestError naming what is at fault in it."""
    return checked_conversation(chat_messages(body.messages, body.system), _options(body))


def to_generation_request(
    body: MessagesBody,
    headers: Mapping[str, str],
    request_id: RequestId,
    default: SamplingParams = DEFAULT_SAMPLING,
) -> GenerationRequest:
    """Make the request that `body` and the service-level headers ask for; the body wins, and
    what it does not name is `default`'s.

    Raises InvalidRequestError naming the parameter or header at fault.
    """
    last = len(body.messages) - 1
    if body.messages[last].role == "assistant":
        place = f"messages[{last}].role"
        rule = "the last turn cannot be the assistant's: no answer goes on from a beginning of it"
        raise InvalidRequestError(f"{place}: {rule}", field=place)
    form = body.output_config.format
    sampling = body.sampling(
        default,
        max_tokens=body.max_tokens,
        stop=tuple(body.stop_sequences),
        structured_outputs=form.outputs() if form else None,
    )
    return body.request(request_id, to_prompt(body), sampling=sampling, headers=headers)


def _options(body: CountTokensBody) -> ConversationOptions:
    tools, chosen = body.own_tools, body.tool_choice
    options = ConversationOptions(
        tools=tuple(tool.to_tool() for tool in tools),
        forbids_parallel_calls=bool(tools) and chosen.disable_parallel_tool_use,
        omits_reasoning=body.thinking.type == "disabled",
        reasoning_effort=body.output_config.effort or "",
        template_variables=json_text(body.chat_template_kwargs, "chat_template_kwargs"),
    )
    choice = _CHOICES[chosen.type]
    if tools or choice.is_forced:
        options = replace(options, tool_choice=choice, named_tool=chosen.name)
    check_options(options)
    return options
