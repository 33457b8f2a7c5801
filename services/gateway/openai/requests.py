"""A checked body and its headers as generation requests, one for each answer asked for."""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from services.gateway import types
from services.gateway.checks import check_service_level
from services.gateway.openai.bodies import RequestBody
from services.gateway.openai.fields import ServiceLevelBody
from services.gateway.types import GenerationRequest, RequestId
from services.generation.prompts import Prompt
from services.generation.sampling_params import (
    ADVISABLE,
    DEFAULT_SAMPLING,
    SamplingParams,
    StructuredOutputs,
    check_sampling,
)
from services.kit.errors import InvalidRequestError
from services.pacing.types import ServiceLevel

ALL_TOKENS = -1  # what vLLM takes for a `top_k` of 0
MAX_PARENT_ID_LENGTH = 124  # leaves room for the number of one of MAX_ANSWERS answers

HEADER_BY_BOUND = {
    "slo_ttft_ms": "x-slo-ttft-ms",
    "slo_tpot_ms": "x-slo-tpot-ms",
    "slo_tbt_ms": "x-slo-tbt-ms",
    "consumption_rate_tps": "x-consumption-rate-tps",
}


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
    first = GenerationRequest(
        request_id=request_id,
        model=body.model,
        prompt=prompts[0],
        sampling=_sampling(body, default),
        service_level=service_level(body.evenflow, headers),
        delivery=types.Delivery.STREAMED if body.stream else types.Delivery.WHOLE,
        echo=body.gives_prompt_back,
        returns_prompt_ids=body.return_token_ids,
        priority=body.priority,
        cache_salt=body.cache_salt,
        parent_id=request_id if num_answers > 1 else None,
    )
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
    named = {name: value for name in ADVISABLE if (value := getattr(body, name)) is not None}
    if body.top_k == ALL_TOKENS:
        named["top_k"] = 0
    max_tokens = body.max_output_tokens()
    if max_tokens is None and body.answers_a_conversation:
        max_tokens = default.max_tokens
    sampling = replace(
        default,
        **named,
        max_tokens=max_tokens,
        stop=body.stop,
        seed=body.seed,
        logit_bias=MappingProxyType(body.logit_bias),
        min_tokens=body.min_tokens,
        stop_token_ids=tuple(body.stop_token_ids),
        ignore_eos=body.ignore_eos,
        bad_words=tuple(body.bad_words),
        allowed_token_ids=tuple(body.allowed_token_ids or ()),
        keep_special_tokens=not body.skip_special_tokens,
        include_stop=body.include_stop_str_in_output,
        logprobs=body.num_logprobs(),
        structured_outputs=_structured_outputs(body),
    )
    check_sampling(sampling)
    return sampling


def _structured_outputs(body: RequestBody) -> StructuredOutputs | None:
    try:
        asked = body.response_format.outputs() if body.response_format else None
    except RecursionError:
        raise InvalidRequestError(
            "response_format: nested too deeply", field="response_format"
        ) from None
    if body.structured_outputs is None:
        return asked
    if asked is not None:
        raise InvalidRequestError(
            "structured_outputs: not allowed together with response_format",
            field="structured_outputs",
        )
    return body.structured_outputs.outputs()


def service_level(stated: ServiceLevelBody, headers: Mapping[str, str]) -> ServiceLevel:
    """Return the bounds that the extension object and headers state; the object wins.

    Raises InvalidRequestError naming the parameter or header at fault.
    """
    values: dict[str, float | None] = {}
    for bound, header in HEADER_BY_BOUND.items():
        values[bound] = getattr(stated, bound) or _header_bound(headers, header)  # both are > 0
    level = ServiceLevel(
        slo_ttft_s=_seconds(values["slo_ttft_ms"]),
        slo_tpot_s=_seconds(values["slo_tpot_ms"]),
        slo_tbt_s=_seconds(values["slo_tbt_ms"]),
        consumption_rate_tps=values["consumption_rate_tps"],
        pace_tail=stated.pace_tail,
    )
    fields = {
        bound.replace("_ms", "_s"): header
        if getattr(stated, bound) is None
        else f"evenflow.{bound}"
        for bound, header in HEADER_BY_BOUND.items()
    }
    check_service_level(level, fields)
    return level


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1e3


def _header_bound(headers: Mapping[str, str], name: str) -> float | None:
    text = headers.get(name)
    if text is None:
        return None
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise InvalidRequestError(f"{name}: must be a number > 0", field=name)
    return value
