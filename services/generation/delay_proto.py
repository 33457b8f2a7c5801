"""Why a token came late, on the wire."""

from types import MappingProxyType

from evenflow.gateway.v1 import generation_pb2 as gen
from services.pacing.cause import Cause, Delay

CAUSE_TO_PROTO: "MappingProxyType[Cause, gen.DelayCause.ValueType]" = MappingProxyType(
    {
        cause: gen.DelayCause.Value(f"DELAY_CAUSE_{cause.name}")
        for cause in Cause
        if cause is not Cause.NETWORK  # which only gateways see
    }
)
CAUSE_FROM_PROTO = MappingProxyType({proto: own for own, proto in CAUSE_TO_PROTO.items()})


def delay_to_proto(delay: Delay) -> gen.Delay:
    return gen.Delay(cause=CAUSE_TO_PROTO[delay.cause], late_s=delay.late_s)


def delay_from_proto(message: gen.Delay) -> Delay:
    return Delay(CAUSE_FROM_PROTO.get(message.cause, Cause.PLANNER), message.late_s)
