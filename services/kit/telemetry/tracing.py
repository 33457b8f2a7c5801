"""OpenTelemetry traces of requests. Without an endpoint nothing is recorded or sent.

Spans carry names, sizes, counts and times; never a prompt, an answer or a key.
"""

from collections.abc import Mapping
from contextvars import ContextVar
from typing import TYPE_CHECKING, Annotated

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from pydantic import Field

from services.kit.telemetry.trace_context import TraceContext

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

EXPORT_TIMEOUT_S = 2  # for the collector to take a batch; what it does not take is dropped
SERVICE_NAME_KEY = "service.name"

# Where spans go, by OTLP over gRPC: "http://host:port", or "https://host:port"; empty: nowhere.
OtlpEndpoint = Annotated[str, Field(pattern=r"^(https?://[^\s/:]+:\d{1,5})?$")]
Attributes = Mapping[str, str | int | float | bool | list[str]]

_propagator = TraceContextTextMapPropagator()
_parent: ContextVar[TraceContext | None] = ContextVar("trace_parent", default=None)


class Tracing:
    """Makes the spans of one process and sends them in the background, in batches."""

    def __init__(self, service_name: str, endpoint: str = "") -> None:
        """Send to `endpoint`, see `OtlpEndpoint`. It need not be there: spans are then dropped."""
        self._provider = _make_provider(service_name, endpoint) if endpoint else None
        provider = self._provider or trace.NoOpTracerProvider()
        self._tracer = provider.get_tracer("evenflow")

    def start(
        self,
        name: str,
        *,
        kind: SpanKind,
        parent: TraceContext | None = None,
        attributes: Attributes | None = None,
    ) -> Span:
        """Begin a span, for the caller to end. Off, it only stands for its parent."""
        context = _propagator.extract(parent.headers, Context()) if parent else Context()
        return self._tracer.start_span(
            name, context, kind=kind, attributes=dict(attributes) if attributes else None
        )

    def close(self) -> None:
        """Send what is left; blocks for some seconds if no collector takes it."""
        if self._provider is not None:
            self._provider.shutdown()


NO_TRACING = Tracing("")


def context_of(span: Span) -> TraceContext | None:
    """Return what makes later spans, here or elsewhere, this one's children; None: no trace."""
    headers: dict[str, str] = {}
    _propagator.inject(headers, trace.set_span_in_context(span, Context()))
    return context_from(headers)


def context_from(headers: Mapping[str, str]) -> TraceContext | None:
    """Return what a caller said, in HTTP headers or gRPC metadata with lower-case names."""
    traceparent = headers.get("traceparent", "")
    if not traceparent:
        return None
    return TraceContext(traceparent=traceparent, tracestate=headers.get("tracestate", ""))


def fail(span: Span, reason: str) -> None:
    """Mark a span as failed. `reason` is an error's fixed name, no text of a request."""
    span.set_attribute("error.type", reason)
    span.set_status(Status(StatusCode.ERROR))


def bind_parent(context: TraceContext | None) -> None:
    """Make this task's later spans children of `context`."""
    _parent.set(context)


def current_parent() -> TraceContext | None:
    return _parent.get()


def _make_provider(service_name: str, endpoint: str) -> "TracerProvider":
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    resource = Resource.create({SERVICE_NAME_KEY: service_name})
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    exporter = OTLPSpanExporter(endpoint=endpoint, timeout=EXPORT_TIMEOUT_S)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return provider
