"""The service level of a request on the wire, as every service reads and writes it."""

import math

from evenflow.gateway.v1 import generation_pb2 as gen
from services.kit.errors import InvalidRequestError
from services.kit.wire import write
from services.pacing.types import ServiceLevel

BOUNDS = ("slo_ttft_s", "slo_tpot_s", "slo_tbt_s", "consumption_rate_tps")


def service_level_from_proto(level: gen.ServiceLevel, *, path: str) -> ServiceLevel:
    """Return the service level of a message. Raises InvalidRequestError naming `path.name`.

    Whether the bounds fit each other is not looked at. An empty path names the field alone.
    """
    stated = {field.name for field, _ in level.ListFields()}
    bounds = {name: getattr(level, name) for name in BOUNDS if name in stated}
    for name, value in bounds.items():
        if not (value > 0.0 and math.isfinite(value)):
            field = f"{path}.{name}" if path else name
            raise InvalidRequestError(f"{field}: must be finite and > 0", field=field)
    return ServiceLevel(**bounds, pace_tail=level.pace_tail)


def service_level_to_proto(level: ServiceLevel) -> gen.ServiceLevel:
    return write(level, gen.ServiceLevel())
