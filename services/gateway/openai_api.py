"""The request bodies of the OpenAI API that the gateway takes, and nothing else.

A parameter that is not listed here is refused by name, and a null is the same as an absent one.
"""

from abc import abstractmethod
from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, WithJsonSchema

from services.gateway import types
from services.gateway.checks import check_reading_rate, checked_conversation
from services.gateway.types import GenerationRequest, RequestId
from services.kit.errors import InvalidRequestError
from services.pacing.types import ServiceLevel

_HEADER_BY_BOUND = {
    "slo_ttft_ms": "x-slo-ttft-ms",
    "slo_tpot_ms": "x-slo-tpot-ms",
    "slo_tbt_ms": "x-slo-tbt-ms",
    "consumption_rate_tps": "x-consumption-rate-tps",
}

_MODEL_CONFIG = ConfigDict(extra="forbid", strict=True, frozen=True)


def _stop_strings(value: object) -> object:
    """Take one string for a list of one."""
    strings = [value] if isinstance(value, str) else value
    if not isinstance(strings, list) or not all(isinstance(s, str) and s for s in strings):
        raise ValueError("must be a non-empty string or a list of them")
    if len(strings) > types.MAX_STOP_STRINGS:
        raise ValueError(f"must hold at most {types.MAX_STOP_STRINGS} strings")
    return tuple(strings)


def _joined_text(value: object) -> object:
    """Take a list of text parts for the text that they form."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise ValueError("must be a string or a list of text parts")
    texts = []
    for part in value:
        if not isinstance(part, dict) or part.get("type") != "text":
            raise ValueError('only parts of type "text" are supported')
        if set(part) != {"type", "text"} or not isinstance(part["text"], str):
            raise ValueError('a text part has "type" and a string "text"')
        texts.append(part["text"])
    return "".join(texts)


def _one_prompt(value: object) -> object:
    """Take a text or a list of token ids, or a list of one of these."""
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str | list):
        value = value[0]
    if isinstance(value, str) and value:
        return types.TextPrompt(value)
    if isinstance(value, list) and value and all(type(item) is int for item in value):
        if min(value) < 0 or max(value) > types.MAX_TOKEN_ID:
            raise ValueError("a token id is out of range")
        return types.TokenPrompt(tuple(value))
    raise ValueError("must be one non-empty string or one non-empty list of token ids")


class _Message(BaseModel):
    model_config = _MODEL_CONFIG

    role: str
    content: Annotated[str, BeforeValidator(_joined_text)] = ""


class _StreamOptions(BaseModel):
    model_config = _MODEL_CONFIG

    include_usage: bool = False


_PROMPT_SCHEMA = {
    "oneOf": [{"type": "string"}, {"type": "array", "items": {"type": "integer", "minimum": 0}}]
}
_Bound = Annotated[float | None, Field(gt=0, allow_inf_nan=False)]


class _ServiceLevelBody(BaseModel):
    """The extension object `evenflow`; milliseconds only here and in the headers."""

    model_config = _MODEL_CONFIG

    slo_ttft_ms: _Bound = None
    slo_tpot_ms: _Bound = None
    slo_tbt_ms: _Bound = None
    consumption_rate_tps: _Bound = None
    pace_tail: bool = False


class _RequestBody(BaseModel):
    """What chat and plain completions have in common."""

    model_config = _MODEL_CONFIG

    model: str = Field(min_length=1)
    max_tokens: int | None = Field(default=None, ge=1, le=types.MAX_TOKENS)
    temperature: float | None = Field(
        default=None, ge=0, le=types.MAX_TEMPERATURE, allow_inf_nan=False
    )
    top_p: float | None = Field(default=None, gt=0, le=1, allow_inf_nan=False)
    stop: Annotated[tuple[str, ...], BeforeValidator(_stop_strings)] = ()
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    stream: bool = False
    stream_options: _StreamOptions | None = None
    evenflow: _ServiceLevelBody = _ServiceLevelBody()

    @property
    def includes_usage(self) -> bool:
        """Say whether the stream shall tell token counts before it ends."""
        return self.stream_options is not None and self.stream_options.include_usage

    def max_output_tokens(self) -> int | None:
        """Return the stated limit. Raises InvalidRequestError if two limits are stated."""
        return self.max_tokens

    @abstractmethod
    def prompt_value(self) -> types.Prompt:
        """Return what to continue. Raises InvalidRequestError naming the parameter at fault."""


class ChatCompletionBody(_RequestBody):
    """Body of `POST /v1/chat/completions`."""

    messages: list[_Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(default=None, ge=1, le=types.MAX_TOKENS)

    def max_output_tokens(self) -> int | None:
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            raise InvalidRequestError(
                "max_tokens: not allowed together with max_completion_tokens", field="max_tokens"
            )
        return self.max_tokens or self.max_completion_tokens

    def prompt_value(self) -> types.Prompt:
        return checked_conversation([(message.role, message.content) for message in self.messages])


class CompletionBody(_RequestBody):
    """Body of `POST /v1/completions`."""

    prompt: Annotated[Any, BeforeValidator(_one_prompt), WithJsonSchema(_PROMPT_SCHEMA)]

    def prompt_value(self) -> types.Prompt:
        prompt: types.Prompt = self.prompt
        return prompt


BodyT = TypeVar("BodyT", bound=_RequestBody)


def parse_body(body_class: type[BodyT], body: object) -> BodyT:
    """Check a decoded JSON body. Raises InvalidRequestError naming the parameter at fault."""
    if not isinstance(body, dict):
        raise InvalidRequestError("the body must be a JSON object")
    try:
        parsed = body_class.model_validate(_without_nulls(body))
    except ValidationError as error:
        raise _named_fault(error) from None
    except RecursionError:
        raise InvalidRequestError("the body is nested too deeply") from None
    if parsed.stream_options is not None and not parsed.stream:
        raise InvalidRequestError(
            "stream_options: only allowed with stream", field="stream_options"
        )
    return parsed


def to_generation_request(
    body: _RequestBody, headers: Mapping[str, str], request_id: RequestId
) -> GenerationRequest:
    """Make the request that `body` and the service-level headers ask for; the body wins.

    Raises InvalidRequestError naming the parameter or header at fault.
    """
    return GenerationRequest(
        request_id=request_id,
        model=body.model,
        prompt=body.prompt_value(),
        sampling=types.SamplingParams(
            max_tokens=body.max_output_tokens(),
            temperature=body.temperature,
            top_p=body.top_p,
            stop=body.stop,
            seed=body.seed,
        ),
        service_level=_service_level(body.evenflow, headers),
        delivery=types.Delivery.STREAMED if body.stream else types.Delivery.WHOLE,
    )


def _service_level(stated: _ServiceLevelBody, headers: Mapping[str, str]) -> ServiceLevel:
    values: dict[str, float | None] = {}
    for bound, header in _HEADER_BY_BOUND.items():
        values[bound] = getattr(stated, bound) or _header_bound(headers, header)  # both are > 0
    level = ServiceLevel(
        slo_ttft_s=_seconds(values["slo_ttft_ms"]),
        slo_tpot_s=_seconds(values["slo_tpot_ms"]),
        slo_tbt_s=_seconds(values["slo_tbt_ms"]),
        consumption_rate_tps=values["consumption_rate_tps"],
        pace_tail=stated.pace_tail,
    )
    in_body = stated.consumption_rate_tps is not None
    check_reading_rate(
        level, field="evenflow.consumption_rate_tps" if in_body else "x-consumption-rate-tps"
    )
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


def _without_nulls(value: Any) -> Any:
    """Drop null members of objects, at any depth."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return [_without_nulls(item) for item in value]
    return value


def _named_fault(error: ValidationError) -> InvalidRequestError:
    """Turn the first fault that pydantic found into an error that names the parameter."""
    fault = error.errors(include_url=False, include_context=False, include_input=False)[0]
    path = ""
    for part in fault["loc"]:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else str(part)
    if fault["type"] == "extra_forbidden":
        return InvalidRequestError(f"{path}: this parameter is not supported", field=path)
    if fault["type"] == "missing":
        return InvalidRequestError(f"{path}: required", field=path)
    reason = fault["msg"].removeprefix("Value error, ").removeprefix("Input should ")
    return InvalidRequestError(f"{path}: {reason}", field=path)
