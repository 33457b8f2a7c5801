"""One submission as a span: from its coming in to its ending, the engine's span below it."""

from opentelemetry.trace import SpanKind

from services.executor.types import Ending, Failure, Rejection, Submission
from services.kit.telemetry.trace_context import TraceContext
from services.kit.telemetry.tracing import NO_TRACING, Tracing, context_of, fail


class RequestTrace:
    """Ends by `ended` or `rejected`."""

    def __init__(self, submission: Submission, tracing: Tracing = NO_TRACING) -> None:
        self._span = tracing.start(
            f"generate {submission.model}",
            kind=SpanKind.SERVER,
            parent=submission.trace,
            attributes={
                "gen_ai.request.model": submission.model,
                "gen_ai.response.id": submission.request_id,
            },
        )

    @property
    def context(self) -> TraceContext | None:
        """Return what the engine's span belongs to."""
        return context_of(self._span)

    def prepared(self, num_prompt_tokens: int) -> None:
        """Note that the prompt is rendered and checked."""
        self._span.add_event("prepared")
        self._span.set_attribute("gen_ai.usage.input_tokens", num_prompt_tokens)

    def ended(self, ending: Ending, num_generated: int) -> None:
        self._span.set_attribute("gen_ai.usage.output_tokens", num_generated)
        if isinstance(ending, Failure):
            fail(self._span, "failed")
        else:
            self._span.set_attribute("gen_ai.response.finish_reasons", [ending.value])
        self._span.end()

    def rejected(self, rejection: Rejection) -> None:
        fail(self._span, rejection.code.value)
        self._span.end()
