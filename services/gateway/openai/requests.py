"""A checked body and its headers as generation requests, one for each answer asked for."""

from collections.abc import Mapping
from dataclasses import replace

from services.gateway import types
from services.gateway.checks import check_begun
from services.gateway.openai.bodies import RequestBody
from services.gateway.types import GenerationRequest, RequestId
from services.generation.prompts import Prompt
from services.generation.sampling_params import (
    DEFAULT_SAMPLING,
    SamplingParams,
    StructuredOutputs,
)
from services.kit.errors import InvalidRequestError

MAX_PARENT_ID_LENGTH = 124  # leaves room for the number of one of MAX_ANSWERS answers


def to_generation_requests(
    body: RequestBody,
    headers: Mapping[str, str],
    request_id: RequestId,
    default: SamplingParams = DEFAULT_SAMPLING,
) -> list[GenerationRequest]:
    """Make the requests that `body` and the service-level headers ask for; the body wins, and
    what it does not name is `default`'s.

    There is one for each answer: `n` for the first prompt, then `n` for the next. The first has
    `request_id` itself, the others that with a number behind it, and each a seed of its own.
    Raises InvalidRequestError naming the parameter or header at fault.
    """
    prompts = body.prompts()
    num_answers = body.n * len(prompts)
    if num_answers > types.MAX_ANSWERS:
        rule = f"at most {types.MAX_ANSWERS} answers, over all prompts"
        raise InvalidRequestError(f"n: {rule}", field="n")
    if num_answers > 1 and len(request_id) > MAX_PARENT_ID_LENGTH:
        rule = f"must have at most {MAX_PARENT_ID_LENGTH} characters for several answers"
        raise InvalidRequestError(f"x-request-id: {rule}", field="x-request-id")
    resume = body.evenflow.resume
    if resume is not None and num_answers > 1:
        name = "n" if body.n > 1 else "prompt"
        raise InvalidRequestError(f"{name}: one answer goes on with evenflow.resume", field=name)
    first = body.request(
        request_id,
        prompts[0],
        sampling=_sampling(body, default),
        headers=headers,
        echo=body.gives_prompt_back,
        returns_prompt_ids=body.return_token_ids,
        parent_id=request_id if num_answers > 1 else None,
        begun=None if resume is None else resume.begun(),
    )
    check_begun(first)
    return [_answer(first, prompts[k // body.n], k, k % body.n) for k in range(num_answers)]


def _answer(
    first: GenerationRequest, prompt: Prompt, index: int, index_of_prompt: int
) -> GenerationRequest:
    """Return the request for answer `index`, the `index_of_prompt`-th to its prompt."""
    if index == 0:
        return first
    return replace(
        first,
        request_id=RequestId(f"{first.request_id}.{index}"),
        prompt=prompt,
        sampling=_reseeded(first.sampling, index_of_prompt),
    )


def _reseeded(sampling: SamplingParams, index: int) -> SamplingParams:
    """Return the parameters with a seed that differs by `index` >= 0, within 64 bits."""
    if sampling.seed is None or not index:
        return sampling
    return replace(sampling, seed=(sampling.seed + index + 2**63) % 2**64 - 2**63)


def _sampling(body: RequestBody, default: SamplingParams) -> SamplingParams:
    max_tokens = body.max_output_tokens()
    if max_tokens is None and body.answers_a_conversation:
        max_tokens = default.max_tokens
    return body.sampling(
        default,
        max_tokens=max_tokens,
        stop=body.stop,
        bad_words=tuple(body.bad_words),
        allowed_token_ids=tuple(body.allowed_token_ids or ()),
        keep_special_tokens=not body.skip_special_tokens,
        include_stop=body.include_stop_str_in_output,
        logprobs=body.num_logprobs(),
        structured_outputs=_structured_outputs(body),
    )


def _structured_outputs(body: RequestBody) -> StructuredOutputs | None:
    asked = body.response_format.outputs() if body.response_format else None
    if body.structured_outputs is None:
        return asked
    if asked is not None:
        raise InvalidRequestError(
            "structured_outputs: not allowed together with response_format",
            field="structured_outputs",
        )
    return body.structured_outputs.outputs()
