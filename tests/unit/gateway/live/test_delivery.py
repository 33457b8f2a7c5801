"""What is measured of a reader's tokens."""

from collections.abc import Callable

import pytest
from prometheus_client import REGISTRY

from services.gateway.live.delivery import DeliveryRecord
from services.gateway.live.pacer import DueToken
from services.gateway.types import Delivery, GenerationRequest, RequestId, Token
from services.generation.prompts import TextPrompt
from services.pacing.types import ServiceLevel


def make_record(
    *, interval_s: float = 0.0, delivery: Delivery = Delivery.STREAMED, **bounds: float
) -> DeliveryRecord:
    request = GenerationRequest(
        request_id=RequestId("r"),
        model="m",
        prompt=TextPrompt("Hi"),
        service_level=ServiceLevel(**bounds),
        delivery=delivery,
    )
    return DeliveryRecord(request, interval_s=interval_s, arrived_s=10.0)


def due(at_s: float) -> DueToken:
    return DueToken(Token(0, 0, "x"), at_s)


def growth(name: str, use: Callable[[], None], **labels: str) -> float:
    """Return by how much `use` lets a metric grow."""
    before = REGISTRY.get_sample_value(name, labels) or 0.0
    use()
    return (REGISTRY.get_sample_value(name, labels) or 0.0) - before


@pytest.mark.parametrize(
    ("written_s", "num_late"),
    [
        pytest.param(12.0, 0, id="when-due"),
        # The second is due at 11 + 1; 5 ms are allowed, 6 are not.
        pytest.param(12.0049, 0, id="within-the-tolerance"),
        pytest.param(12.0061, 1, id="beyond-the-tolerance"),
    ],
)
def test_a_token_is_late_against_the_due_time_before_it(written_s, num_late) -> None:
    record = make_record(interval_s=1.0)

    record.written([due(11.0)], 11.5)  # itself late: that does not excuse the next
    record.written([due(12.0)], written_s)

    assert (record.num_written, record.num_late) == (2, num_late)


def test_without_an_interval_no_token_is_late() -> None:
    record = make_record()
    record.written([due(11.0)], 11.0)
    record.written([due(99.0)], 99.0)

    assert record.num_late == 0


def test_the_first_token_is_timed_from_the_request_s_arrival() -> None:
    record = make_record()

    def use() -> None:
        record.written([due(12.5), due(12.5)], 12.5)

    assert growth("evenflow_ttft_seconds_sum", use) == 2.5


@pytest.mark.parametrize(("slo_ttft_s", "violations"), [(2.5, 0), (2.4, 1)])
def test_a_late_first_token_is_counted(slo_ttft_s, violations) -> None:
    record = make_record(slo_ttft_s=slo_ttft_s)
    name = "evenflow_request_slo_violations_total"

    assert growth(name, lambda: record.written([due(12.5)], 12.5), type="ttft") == violations


@pytest.mark.parametrize(("slo_tpot_s", "violations"), [(0.5, 0), (0.4, 1)])
def test_the_mean_time_per_token_counts_from_the_first(slo_tpot_s, violations) -> None:
    record = make_record(slo_tpot_s=slo_tpot_s)
    for at_s in (20.0, 20.0, 21.0):  # (21 - 20) / 2 = 0.5
        record.written([due(at_s)], at_s)
    name = "evenflow_request_slo_violations_total"

    assert growth(name, record.finish, type="tpot") == violations


def test_a_single_token_has_no_mean() -> None:
    record = make_record(slo_tpot_s=0.001)
    record.written([due(20.0)], 20.0)

    assert growth("evenflow_delivered_tpot_seconds_count", record.finish) == 0


def test_a_whole_answer_s_tokens_are_only_counted() -> None:
    record = make_record(delivery=Delivery.WHOLE)

    def use() -> None:
        record.written([due(12.0), due(12.0)], 12.0)
        record.finish()

    assert growth("evenflow_ttft_seconds_count", use) == 0
    assert record.num_written == 2


@pytest.mark.parametrize(
    ("bound", "counted"),
    [("0.15", 0), ("0.25", 1), ("0.5", 1), ("+Inf", 1)],  # the gap is 0.25: its own bound's, too
)
def test_a_gap_counts_in_each_bucket_from_its_own_on(bound, counted) -> None:
    record = make_record()
    record.written([due(20.0)], 20.0)
    name = "evenflow_delivered_tbt_seconds_bucket"

    def use() -> None:
        record.written([due(20.25)], 20.25)

    assert growth(name, use, le=bound) == counted


def test_the_gaps_of_all_tokens_are_summed_up() -> None:
    record = make_record()

    def use() -> None:
        for at_s in (20.0, 20.5, 22.0):  # 0.5 and 1.5
            record.written([due(at_s)], at_s)

    assert growth("evenflow_delivered_tbt_seconds_sum", use) == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("name", "counted"),
    [
        ("evenflow_delivered_tokens_total", 3),
        ("evenflow_paced_tokens_total", 2),  # the first is not
        ("evenflow_delivered_tbt_violations_total", 1),
        ("evenflow_reading_seconds_total", 2.0),
        ("evenflow_rebuffering_seconds_total", pytest.approx(0.1)),  # the last one is in time
    ],
)
def test_tokens_are_counted_and_the_paced_and_late_ones_among_them(name, counted) -> None:
    record = make_record(interval_s=1.0)

    def use() -> None:
        for due_s, written_s in ((20.0, 20.0), (21.0, 21.1), (22.0, 22.0)):
            record.written([due(due_s)], written_s)

    assert growth(name, use) == counted
