"""Why an answer ended, on the wire."""

from types import MappingProxyType

from evenflow.gateway.v1 import generation_pb2 as gen
from services.generation.finish import FinishReason

FINISH_TO_PROTO = MappingProxyType(
    {
        FinishReason.STOP: gen.FINISH_REASON_STOP,
        FinishReason.LENGTH: gen.FINISH_REASON_LENGTH,
        FinishReason.CANCELLED: gen.FINISH_REASON_CANCELLED,
        FinishReason.TOOL_CALLS: gen.FINISH_REASON_TOOL_CALLS,
    }
)
FINISH_FROM_PROTO = MappingProxyType({proto: own for own, proto in FINISH_TO_PROTO.items()})
