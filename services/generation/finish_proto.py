"""Why an answer ended, on the wire."""

from types import MappingProxyType

from evenflow.gateway.v1 import generation_pb2 as gen
from services.generation.finish import FinishReason

FINISH_TO_PROTO = MappingProxyType(
    {reason: gen.FinishReason.Value(f"FINISH_REASON_{reason.name}") for reason in FinishReason}
)
FINISH_FROM_PROTO = MappingProxyType({proto: own for own, proto in FINISH_TO_PROTO.items()})
