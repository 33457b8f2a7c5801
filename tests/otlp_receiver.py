"""A collector of traces: a real gRPC server that speaks OTLP and keeps what it gets."""

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as otlp
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as otlp_grpc
from opentelemetry.proto.common.v1.common_pb2 import AnyValue

WAIT_S = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceivedSpan:
    service: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str  # empty: a root
    attributes: dict[str, Any]
    is_error: bool
    events: dict[str, dict[str, Any]]  # attributes by name


class OtlpReceiver(otlp_grpc.TraceServiceServicer):
    """Receives in threads of its own, whatever the test does meanwhile."""

    def __init__(self) -> None:
        self.spans: list[ReceivedSpan] = []
        self.raw = b""  # every message as it came
        self.port = 0

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def Export(  # noqa: N802
        self, request: otlp.ExportTraceServiceRequest, context: grpc.ServicerContext
    ) -> otlp.ExportTraceServiceResponse:
        self.raw += request.SerializeToString()
        for group in request.resource_spans:
            service = _plain(group.resource.attributes).get("service.name", "")
            for scope in group.scope_spans:
                self.spans += [_received(service, span) for span in scope.spans]
        return otlp.ExportTraceServiceResponse()

    def of_trace(self, trace_id: str) -> list[ReceivedSpan]:
        return [span for span in self.spans if span.trace_id == trace_id]

    async def until(self, holds: Callable[[], bool], timeout_s: float = WAIT_S) -> None:
        """Wait until `holds`; TimeoutError after the timeout."""
        async with asyncio.timeout(timeout_s):
            while not holds():  # noqa: ASYNC110
                await asyncio.sleep(0.02)


def named(spans: list[ReceivedSpan], service: str, prefix: str) -> ReceivedSpan:
    """Return the one span of a service whose name begins so."""
    (span,) = [s for s in spans if s.service == service and s.name.startswith(prefix)]
    return span


def _received(service: str, span: Any) -> ReceivedSpan:
    return ReceivedSpan(
        events={event.name: _plain(event.attributes) for event in span.events},
        service=service,
        name=span.name,
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        attributes=_plain(span.attributes),
        is_error=span.status.code == span.status.STATUS_CODE_ERROR,
    )


def _plain(attributes: Any) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in attributes}


def _value(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(item) for item in value.array_value.values]
    return getattr(value, kind) if kind else None


@contextmanager
def otlp_receiver() -> Iterator[OtlpReceiver]:
    receiver, server = OtlpReceiver(), grpc.server(ThreadPoolExecutor(1))
    otlp_grpc.add_TraceServiceServicer_to_server(receiver, server)
    receiver.port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield receiver
    finally:
        server.stop(grace=None).wait()
