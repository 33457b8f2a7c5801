"""A checked body of the Responses API as a generation request."""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from services.gateway.checks import checked_conversation
from services.gateway.openai.fields import json_text
from services.gateway.responses_api.bodies import LOGPROBS, ResponsesBody
from services.gateway.responses_api.items import turns
from services.gateway.types import GenerationRequest, RequestId
from services.generation.conversation import ConversationOptions, check_options
from services.generation.sampling_params import DEFAULT_SAMPLING, SamplingParams
from services.kit.errors import InvalidRequestError

_IF_RESUMABLE = frozenset({"store", "background"})  # such a response is kept for a while
# What needs an answer that was kept, and what to say of it.
_NEEDS_MEMORY = MappingProxyType(
    {
        "store": "responses are not kept but with evenflow.resumable: leave it out, or say false",
        "background": "responses are not kept but with evenflow.resumable",
        "previous_response_id": "responses are not kept: send the conversation in input",
        "conversation": "conversations are not kept: send the conversation in input",
        "prompt": "prompts are not kept: send instructions and input",
    }
)


def to_generation_request(
    body: ResponsesBody,
    headers: Mapping[str, str],
    request_id: RequestId,
    default: SamplingParams = DEFAULT_SAMPLING,
) -> GenerationRequest:
    """Make the request that `body` and the service-level headers ask for; the body wins, and
    what it does not name is `default`'s.

    Raises InvalidRequestError naming the parameter or header at fault.
    """
    for name, rule in _NEEDS_MEMORY.items():
        is_kept = body.evenflow.resumable and name in _IF_RESUMABLE
        if getattr(body, name) and not is_kept:
            raise InvalidRequestError(f"{name}: {rule}", field=name)
    sampling = body.sampling(
        default,
        max_tokens=body.max_output_tokens or default.max_tokens,
        logprobs=body.top_logprobs if LOGPROBS in body.include else None,
        structured_outputs=body.text.format.outputs(),
    )
    prompt = checked_conversation(turns(body.input, body.instructions), _options(body))
    return body.request(
        request_id, prompt, sampling=sampling, headers=headers, is_background=body.background
    )


def _options(body: ResponsesBody) -> ConversationOptions:
    functions, chosen = body.functions, body.tool_choice
    options = ConversationOptions(
        tools=tuple(function.to_tool() for function in functions),
        forbids_parallel_calls=bool(functions) and not body.parallel_tool_calls,
        omits_reasoning=not body.include_reasoning,
        reasoning_effort=body.reasoning.effort or "",
        template_variables=json_text(body.chat_template_kwargs, "chat_template_kwargs"),
    )
    if functions or chosen.choice.is_forced:
        options = replace(options, tool_choice=chosen.choice, named_tool=chosen.named)
    check_options(options)
    return options
