"""Which trace a request belongs to, as one process tells the next (W3C Trace Context). Pure."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceContext:
    """The place in a trace below which the receiver's spans belong."""

    traceparent: str  # version, trace, parent span, flags; one that is malformed counts as none
    tracestate: str = ""  # vendors' additions

    @property
    def headers(self) -> dict[str, str]:
        """Return what goes into HTTP headers or gRPC metadata."""
        state = {"tracestate": self.tracestate} if self.tracestate else {}
        return {"traceparent": self.traceparent} | state
