"""Why a token came late, on the wire."""

from types import MappingProxyType

from evenflow.gateway.v1 import generation_pb2 as gen
from services.pacing.cause import Cause, Delay

CAUSE_TO_PROTO = MappingProxyType(
    {
        Cause.QUEUE: gen.DELAY_CAUSE_QUEUE,
        Cause.PROMPTS: gen.DELAY_CAUSE_PROMPTS,
        Cause.COPIES: gen.DELAY_CAUSE_COPIES,
        Cause.PAUSE: gen.DELAY_CAUSE_PAUSE,
        Cause.PLANNER: gen.DELAY_CAUSE_PLANNER,
        Cause.READER: gen.DELAY_CAUSE_READER,
    }
)
CAUSE_FROM_PROTO = MappingProxyType({proto: own for own, proto in CAUSE_TO_PROTO.items()})


def delay_to_proto(delay: Delay) -> gen.Delay:
    return gen.Delay(cause=CAUSE_TO_PROTO[delay.cause], late_s=delay.late_s)


def delay_from_proto(message: gen.Delay) -> Delay:
    return Delay(CAUSE_FROM_PROTO.get(message.cause, Cause.PLANNER), message.late_s)
