"""A service level means the same on every edge."""

import math

import pytest

from evenflow.gateway.v1 import generation_pb2 as gen
from services.kit.errors import InvalidRequestError
from services.kit.wire import read, write
from services.pacing.types import NO_SERVICE_LEVEL, Release, ServiceLevel

NAMES = ("slo_ttft_s", "slo_tpot_s", "slo_tbt_s", "consumption_rate_tps", "max_in_hand_s")


def test_a_service_level_survives_the_wire() -> None:
    full = ServiceLevel(
        slo_ttft_s=1.5,
        slo_tpot_s=0.2,
        slo_tbt_s=0.25,
        consumption_rate_tps=8.0,
        pace_tail=True,
        release=Release.SMOOTH,
        max_in_hand_s=20.0,
    )

    for level in (full, NO_SERVICE_LEVEL, ServiceLevel(slo_tbt_s=0.25)):
        assert read(ServiceLevel, write(level, gen.ServiceLevel)) == level


def test_every_bound_of_the_message_is_read() -> None:
    names = {field.name for field in gen.ServiceLevel.DESCRIPTOR.fields}
    assert names == {*NAMES, "pace_tail", "release"}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("value", [0.0, -1.0, math.inf, math.nan])
def test_a_bound_that_is_none_is_refused_by_its_path(name: str, value: float) -> None:
    with pytest.raises(
        InvalidRequestError, match=f"^a.{name}: {value} is not finite and > 0"
    ) as caught:
        read(ServiceLevel, gen.ServiceLevel(**{name: value}), "a")
    assert caught.value.field == f"a.{name}"

    with pytest.raises(InvalidRequestError, match=f"^{name}: ") as bare:
        read(ServiceLevel, gen.ServiceLevel(**{name: value}))
    assert bare.value.field == name
