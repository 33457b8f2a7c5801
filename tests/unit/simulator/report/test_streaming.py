"""What readers felt, on streams that can be followed by hand."""

import pytest

from services.pacing.types import ServiceLevel
from services.placement.types import RequestId
from simulator.engine.records import Outcome
from simulator.report.streaming import figures, rebuffering


def stream(*generated_s: float, rate_tps: float | None = 1.0, arrival_s: float = 0.0) -> Outcome:
    return Outcome(
        request_id=RequestId("r"),
        arrival_s=arrival_s,
        num_prompt_tokens=5,
        num_output_tokens=len(generated_s),
        level=ServiceLevel(consumption_rate_tps=rate_tps),
        generated_s=generated_s,
    )


def test_a_reader_waits_for_whatever_comes_later_than_his_next_turn() -> None:
    # Due at 0, 1, 2 and 5: the last is 2 s late, of 3 s that he reads.
    assert rebuffering(stream(0.0, 0.5, 1.0, 5.0)) == (2.0, 3.0)
    assert rebuffering(stream(0.0, 9.0, rate_tps=None)) == (0.0, 0.0)


def test_quality_of_service_takes_off_what_would_have_been_read_while_waiting() -> None:
    late = stream(3.0, 4.0, 7.0, rate_tps=1.0)  # 3 s to the first token, and 2 s in between

    found = figures([late], seconds=10.0)

    assert found["effective_tokens_per_s"] == pytest.approx(0.3)
    assert found["qos"] == pytest.approx((3 - 3 - 2) / 10)
    assert found["rebuffering"] == pytest.approx(2 / 2)
