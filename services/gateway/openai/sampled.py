"""What bodies that ask for an answer have in common: how its tokens are drawn, and when they are
due.
"""

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Annotated, Any, Literal

from pydantic import Field, WithJsonSchema

from services.gateway.access.fairness import stated_fairness_id
from services.gateway.checks import (
    MAX_SLO_S,
    MIN_SLO_S,
    check_service_level,
    session_of,
)
from services.gateway.left_out.members import LenientBody, StrictBody
from services.gateway.openai.fields import (
    CacheSalt,
    Penalty,
    TemplateVariables,
    TokenBiases,
    TokenId,
    TokenIds,
)
from services.gateway.types import (
    MAX_RATE_TPS,
    MIN_RATE_TPS,
    Begun,
    Delivery,
    GenerationRequest,
    RequestId,
)
from services.generation import sampling_params as limits
from services.generation.prompts import Prompt
from services.generation.retention import (
    MAX_RETENTION_S,
    MAX_SESSION_ID_LENGTH,
    RetentionHint,
    RetentionMark,
    without_needless,
)
from services.generation.sampling_params import ADVISABLE, SamplingParams, check_sampling
from services.kit.errors import InvalidRequestError
from services.pacing.types import Release, ServiceLevel

# Our own first, then llm-d's, which its gateways route by.
HEADERS_BY_BOUND: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "slo_ttft_ms": ("x-slo-ttft-ms", "x-llm-d-slo-ttft-ms"),
        "slo_tpot_ms": ("x-slo-tpot-ms", "x-llm-d-slo-tpot-ms"),
        "slo_tbt_ms": ("x-slo-tbt-ms",),
        "consumption_rate_tps": ("x-consumption-rate-tps",),
    }
)

# OpenAI keeps "in memory" for five to ten minutes.
SECONDS_BY_RETENTION: Mapping[str, float] = MappingProxyType(
    {"in_memory": 300.0, "in-memory": 300.0, "24h": 86_400.0}
)


def _bound_schema(low: float, high: float) -> WithJsonSchema:
    """Describe a bound that may be stated; `checks` has it, in seconds."""
    number = {"type": "number", "minimum": low, "maximum": high}
    return WithJsonSchema({"anyOf": [number, {"type": "null"}]})


Bound = Annotated[float | None, Field(gt=0, allow_inf_nan=False)]
SloMs = Annotated[Bound, _bound_schema(MIN_SLO_S * 1e3, MAX_SLO_S * 1e3)]
InHandS = Annotated[Bound, _bound_schema(MIN_SLO_S, MAX_SLO_S)]
RateTps = Annotated[Bound, _bound_schema(MIN_RATE_TPS, MAX_RATE_TPS)]
RetentionS = Annotated[float | None, Field(ge=0, le=MAX_RETENTION_S, allow_inf_nan=False)]
Priority = Annotated[int | None, Field(ge=-(2**31), lt=2**31)]  # lower is more urgent
SessionId = Annotated[str, Field(max_length=MAX_SESSION_ID_LENGTH)]


class ServiceLevelBody(StrictBody):
    """The extension object `evenflow`; milliseconds only here and in the headers, for SLOs."""

    slo_ttft_ms: SloMs = None
    slo_tpot_ms: SloMs = None
    slo_tbt_ms: SloMs = None
    consumption_rate_tps: RateTps = None
    pace_tail: bool = False
    release: Literal["paced", "at_once", "smooth"] | None = None
    max_in_hand_s: InHandS = None
    priority: Priority = None  # as beside this object
    retention_s: RetentionS = None  # for so long, from its end, the request's KV is kept
    next_prefix: bool = False  # what the next turn begins with is computed ahead of it
    resumable: bool = Field(
        default=False,
        description="A reader that has left may take it up again; only with `stream`: true.",
    )
    strict: bool = False  # refuse what has no effect


class ResumeBody(StrictBody):
    """The beginning of an answer that the client has, to go on with."""

    token_ids: list[TokenId] = Field(min_length=1, max_length=limits.MAX_TOKENS)
    delivered: int | None = Field(default=None, ge=0)  # of these, not told again; None: all

    def begun(self) -> Begun:
        """Return it. Raises InvalidRequestError for more delivered than there are."""
        num_delivered = len(self.token_ids) if self.delivered is None else self.delivered
        return Begun(
            token_ids=array("i", self.token_ids),
            num_delivered=num_delivered,
            name="evenflow.resume",
        )


class CompletionLevelBody(ServiceLevelBody):
    """The extension object where answers tell their tokens' ids."""

    resume: ResumeBody | None = None


def _change_schema(low: float, high: float) -> WithJsonSchema:
    """Describe a bound that may be changed, or taken off with 0."""
    number = {"type": "number", "minimum": low, "maximum": high}
    return WithJsonSchema({"anyOf": [number, {"const": 0}, {"type": "null"}]})


Change = Annotated[float | None, Field(ge=0, allow_inf_nan=False)]
SloChange = Annotated[Change, _change_schema(MIN_SLO_S * 1e3, MAX_SLO_S * 1e3)]
RateChange = Annotated[Change, _change_schema(MIN_RATE_TPS, MAX_RATE_TPS)]


class PaceBody(StrictBody):
    """A running stream's new pace: what is not stated stays, 0 takes a bound off."""

    slo_tpot_ms: SloChange = None
    slo_tbt_ms: SloChange = None
    consumption_rate_tps: RateChange = None

    def stated(self) -> dict[str, float | None]:
        """Return what is stated, in seconds, by the names of a `ServiceLevel`; None: taken off."""
        return {
            bound: (value / 1e3 if name.endswith("_ms") else value) or None
            for bound, name in PACE_NAMES.items()
            if (value := getattr(self, name)) is not None
        }


PACE_NAMES = MappingProxyType({name.replace("_ms", "_s"): name for name in PaceBody.model_fields})


class SampledBody(StrictBody):
    """What every body has that asks for an answer; sampling beyond its API has vLLM's names."""

    model: str = Field(min_length=1)
    stream: bool = False
    temperature: float | None = Field(
        default=None, ge=0, le=limits.MAX_TEMPERATURE, allow_inf_nan=False
    )
    top_p: float | None = Field(default=None, gt=0, le=1, allow_inf_nan=False)
    top_k: int | None = Field(default=None, ge=-1, le=limits.MAX_TOKEN_ID)  # -1, as vLLM has it: 0
    min_p: float | None = Field(default=None, ge=0, le=1, allow_inf_nan=False)
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: float | None = Field(
        default=None, gt=0, le=limits.MAX_REPETITION_PENALTY, allow_inf_nan=False
    )
    logit_bias: TokenBiases = Field(default_factory=dict)
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    min_tokens: int = Field(default=0, ge=0, le=limits.MAX_TOKENS)
    stop_token_ids: TokenIds = Field(default_factory=list)
    ignore_eos: bool = False
    priority: Priority = None
    cache_salt: CacheSalt = ""
    session_id: SessionId = ""
    prompt_cache_key: SessionId = ""
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = None
    evenflow: ServiceLevelBody = ServiceLevelBody()

    @property
    def uses_extension(self) -> bool:
        """Say whether the body has the extension object, be it empty."""
        return "evenflow" in self.model_fields_set

    def retention_marks(self) -> tuple[RetentionMark, ...]:
        """Return what the API's own marks ask to be kept, shortest beginning first."""
        return ()

    def sampling(self, default: SamplingParams, **more: Any) -> SamplingParams:
        """Return how tokens are drawn: as stated here and in `more`, else as `default` advises.

        Raises InvalidRequestError naming the parameter at fault.
        """
        advisable = {name: getattr(self, name) for name in ADVISABLE}
        stated = {name: value for name, value in advisable.items() if value is not None}
        if self.top_k is not None:
            stated["top_k"] = max(self.top_k, 0)
        sampling = replace(
            default,
            **stated,
            seed=self.seed,
            logit_bias=MappingProxyType(self.logit_bias),
            min_tokens=self.min_tokens,
            stop_token_ids=tuple(self.stop_token_ids),
            ignore_eos=self.ignore_eos,
            **more,
        )
        check_sampling(sampling)
        return sampling

    def request(
        self,
        request_id: RequestId,
        prompt: Prompt,
        *,
        sampling: SamplingParams,
        headers: Mapping[str, str],
        **more: Any,
    ) -> GenerationRequest:
        """Return the request for an answer. Raises InvalidRequestError for a service level that is
        none, for headers at fault, and for an answer that is no stream and to be taken up again.
        """
        if self.evenflow.resumable and not self.stream:
            field = "evenflow.resumable"
            raise InvalidRequestError(f"{field}: only allowed with stream", field=field)
        is_in_object = self.evenflow.priority is not None
        return GenerationRequest(
            request_id=request_id,
            model=self.model,
            prompt=prompt,
            sampling=sampling,
            service_level=_service_level(self.evenflow, headers),
            delivery=Delivery.STREAMED if self.stream else Delivery.WHOLE,
            priority=self.evenflow.priority if is_in_object else self.priority,
            priority_name="evenflow.priority" if is_in_object else "priority",
            cache_salt=self.cache_salt,
            fairness_id=stated_fairness_id(headers),
            session_id=session_of(self.session_id, headers),
            is_resumable=self.evenflow.resumable,
            retention=_retention(self, headers),
            **more,
        )


class GeneratingBody(LenientBody, SampledBody):
    """What a body has of the APIs that ask for one answer to a conversation."""

    chat_template_kwargs: TemplateVariables = Field(default_factory=dict)


def _service_level(stated: ServiceLevelBody, headers: Mapping[str, str]) -> ServiceLevel:
    """Return the bounds that the extension object and headers state; the object wins.

    Raises InvalidRequestError naming the parameter or header at fault.
    """
    values: dict[str, float | None] = {}
    fields = {"max_in_hand_s": "evenflow.max_in_hand_s"}
    for bound, names in HEADERS_BY_BOUND.items():
        own = getattr(stated, bound)
        header, value = _header_bound(headers, names)
        values[bound] = own or value  # both are > 0
        fields[bound.replace("_ms", "_s")] = header if own is None else f"evenflow.{bound}"
    level = ServiceLevel(
        slo_ttft_s=_seconds(values["slo_ttft_ms"]),
        slo_tpot_s=_seconds(values["slo_tpot_ms"]),
        slo_tbt_s=_seconds(values["slo_tbt_ms"]),
        consumption_rate_tps=values["consumption_rate_tps"],
        pace_tail=stated.pace_tail,
        release=stated.release and Release(stated.release),
        max_in_hand_s=stated.max_in_hand_s,
    )
    check_service_level(level, fields)
    return level


def _retention(body: SampledBody, headers: Mapping[str, str]) -> RetentionHint | None:
    """Return what is to be kept, or computed ahead, and for which session; None if none is stated.
    Raises InvalidRequestError as `session_of`.
    """
    session = session_of(body.session_id, headers) or body.prompt_cache_key
    of_cache = SECONDS_BY_RETENTION.get(body.prompt_cache_retention or "", 0.0)
    whole_s = max(body.evenflow.retention_s or 0.0, of_cache)
    marks = without_needless([*body.retention_marks(), RetentionMark(retention_s=whole_s)])
    next_prefix = body.evenflow.next_prefix
    if not (session or marks or next_prefix):
        return None
    return RetentionHint(session_id=session, marks=marks, next_prefix=next_prefix)


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1e3


def _header_bound(headers: Mapping[str, str], names: Sequence[str]) -> tuple[str, float | None]:
    """Return the header of these that states a bound, and the bound."""
    given = {name: _number(headers[name], name) for name in names if name in headers}
    if len(set(given.values())) > 1:
        raise InvalidRequestError(f"{' and '.join(given)}: must not differ", field=names[0])
    return next(iter(given.items()), (names[0], None))


def _number(text: str, name: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise InvalidRequestError(f"{name}: must be a number > 0", field=name)
    return value
