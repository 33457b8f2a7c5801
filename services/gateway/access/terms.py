"""What a caller may ask for: how tight a service level. Pure."""

from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from services.gateway.types import MAX_RATE_TPS, MIN_RATE_TPS
from services.kit.errors import InvalidRequestError
from services.pacing.types import ServiceLevel


def _check_rate(rate_tps: float) -> float:
    if rate_tps and not MIN_RATE_TPS <= rate_tps <= MAX_RATE_TPS:
        raise ValueError(f"is neither 0 nor from {MIN_RATE_TPS:g} to {MAX_RATE_TPS:g}")
    return rate_tps


DefaultRate = Annotated[float, AfterValidator(_check_rate)]  # tokens per second; 0: none


class SloFloors(BaseModel):
    """The tightest bounds that may be stated, in seconds; None: any."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    min_slo_ttft_s: float | None = Field(default=None, gt=0)
    min_slo_tpot_s: float | None = Field(default=None, gt=0)
    min_slo_tbt_s: float | None = Field(default=None, gt=0)  # also of 1 / reading rate

    def over(self, other: "SloFloors") -> "SloFloors":
        """Return these floors, and `other`'s where there are none."""
        mine = self.model_dump(include=set(SloFloors.model_fields), exclude_none=True)
        return SloFloors(**{**other.model_dump(), **mine})

    def check(self, level: ServiceLevel) -> None:
        """Raise InvalidRequestError naming a bound of `level` that is tighter."""
        _check("slo_ttft", level.slo_ttft_s, self.min_slo_ttft_s)
        _check("slo_tpot", level.slo_tpot_s, self.min_slo_tpot_s)
        _check("slo_tbt", level.slo_tbt_s, self.min_slo_tbt_s)
        if level.consumption_rate_tps is not None:
            _check("1 / rate", 1 / level.consumption_rate_tps, self.min_slo_tbt_s)


def _check(name: str, stated_s: float | None, floor_s: float | None) -> None:
    if stated_s is not None and floor_s is not None and stated_s < floor_s:
        field = "consumption_rate_tps" if name == "1 / rate" else name
        rule = f"you may state {1e3 * floor_s:g} ms at the tightest, for this model and key"
        raise InvalidRequestError(f"{name}: {rule}", field=field)
