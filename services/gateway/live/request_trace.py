"""One generation request as a span, by OpenTelemetry's conventions for generative AI."""

from opentelemetry.trace import SpanKind

from services.gateway.types import Finish, GenerationRequest
from services.generation.prompts import ChatPrompt
from services.kit.telemetry.trace_context import TraceContext
from services.kit.telemetry.tracing import (
    NO_TRACING,
    Attributes,
    Tracing,
    context_of,
    current_parent,
    fail,
)

PROVIDER = "evenflow"


class RequestTrace:
    """Begins with the request's admission and ends when it is dropped."""

    def __init__(self, request: GenerationRequest, tracing: Tracing = NO_TRACING) -> None:
        operation = "chat" if isinstance(request.prompt, ChatPrompt) else "text_completion"
        self._span = tracing.start(
            f"{operation} {request.model}",
            kind=SpanKind.CLIENT,
            parent=current_parent(),
            attributes=_attributes(request, operation),
        )

    @property
    def context(self) -> TraceContext | None:
        """Return what the executor's spans belong to."""
        return context_of(self._span)

    def moved(self, told: Attributes) -> None:
        """Note that another executor has the request, or its own again."""
        attributes = {f"evenflow.move.{name}": value for name, value in told.items()}
        self._span.add_event("evenflow.move", attributes)

    def end(
        self,
        result: str,
        finish: Finish | None,
        *,
        ttft_s: float | None,
        ttfat_s: float | None,
    ) -> None:
        """End with how it went: `result` names it, `finish` has it if the reader has all of it,
        `ttft_s` is None if no token was written, `ttfat_s` if none of the answer was.
        """
        span = self._span
        if ttfat_s is not None:
            span.set_attribute("evenflow.response.time_to_first_answer_token", ttfat_s)
        if ttft_s is not None:
            span.set_attribute("gen_ai.response.time_to_first_chunk", ttft_s)
        if finish is None:
            fail(span, result)
        else:
            span.set_attribute("gen_ai.response.finish_reasons", [finish.reason.value])
            span.set_attribute("gen_ai.usage.input_tokens", finish.num_prompt_tokens)
            span.set_attribute("gen_ai.usage.output_tokens", finish.num_output_tokens)
        span.end()


def _attributes(request: GenerationRequest, operation: str) -> dict[str, str | int | float]:
    sampling = request.sampling
    attributes: dict[str, str | int | float] = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": PROVIDER,
        "gen_ai.request.model": request.model,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.response.id": request.request_id,
    }
    if sampling.max_tokens is not None:
        attributes["gen_ai.request.max_tokens"] = sampling.max_tokens
    return attributes
