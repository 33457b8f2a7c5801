"""Bodies of the APIs that ask for one answer."""

from collections.abc import Mapping
from dataclasses import replace

from pydantic import Field, ValidationInfo, model_validator

from services.gateway.left_out.members import LenientBody, Part, ignored, note
from services.gateway.openai.fields import SampledBody, ServiceLevelBody, TemplateVariables
from services.gateway.openai.requests import service_level
from services.gateway.types import Delivery, GenerationRequest, RequestId
from services.generation.prompts import ChatPrompt
from services.generation.sampling_params import SamplingParams, StructuredOutputs, check_sampling


class OtherTool(Part):
    """A tool that the API's own servers run, or of a form that no template knows: left out."""

    type: str = Field(min_length=1)

    @model_validator(mode="after")
    def _leave_out(self, info: ValidationInfo) -> "OtherTool":
        names = ignored(info)
        if names is None:
            raise ValueError("only tools with a schema of their own are supported")
        note(names, "tools.", self.type)
        return self


class GeneratingBody(LenientBody, SampledBody):
    """What a body of these APIs has that asks for an answer."""

    chat_template_kwargs: TemplateVariables = Field(default_factory=dict)
    evenflow: ServiceLevelBody = ServiceLevelBody()

    def sampling(
        self,
        default: SamplingParams,
        *,
        max_tokens: int | None,
        stop: tuple[str, ...] = (),
        logprobs: int | None = None,
        structured_outputs: StructuredOutputs | None = None,
    ) -> SamplingParams:
        """Return how tokens are drawn; what is not stated is `default`'s. Raises
        InvalidRequestError naming the parameter at fault.
        """
        stated = {
            name: value
            for name in _SAMPLING & self.model_fields_set
            if (value := getattr(self, name)) is not None
        }
        if self.top_k is not None:
            stated["top_k"] = max(self.top_k, 0)
        if "stop_token_ids" in stated:
            stated["stop_token_ids"] = tuple(self.stop_token_ids)
        params = replace(
            default,
            max_tokens=default.max_tokens if max_tokens is None else max_tokens,
            stop=stop,
            logprobs=logprobs,
            structured_outputs=structured_outputs,
            **stated,
        )
        check_sampling(params)
        return params

    def request(
        self,
        prompt: ChatPrompt,
        sampling: SamplingParams,
        *,
        headers: Mapping[str, str],
        request_id: RequestId,
    ) -> GenerationRequest:
        """Return the request for the answer. Raises InvalidRequestError for a service level that
        is none.
        """
        return GenerationRequest(
            request_id=request_id,
            model=self.model,
            prompt=prompt,
            sampling=sampling,
            service_level=service_level(self.evenflow, headers),
            delivery=Delivery.STREAMED if self.stream else Delivery.WHOLE,
            priority=self.priority,
            cache_salt=self.cache_salt,
        )


_SAMPLING = frozenset(
    {
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
        "logit_bias",
        "seed",
        "min_tokens",
        "stop_token_ids",
        "ignore_eos",
    }
)
