"""What a service level must satisfy beyond the range of each field. Pure."""

from services.kit.errors import InvalidRequestError
from services.pacing.types import ServiceLevel


def check_reading_rate(level: ServiceLevel, *, field: str) -> None:
    """Raise InvalidRequestError naming `field` if a reader would read slower than its TBT SLO.

    Tokens paced at that rate would break the SLO by design.
    """
    if level.consumption_rate_tps is None or level.slo_tbt_s is None:
        return
    if 1.0 / level.consumption_rate_tps > level.slo_tbt_s:
        raise InvalidRequestError(
            f"{field}: 1 / rate is longer than the time-between-tokens SLO", field=field
        )
