"""What is measured of a reader's tokens."""

from collections.abc import Callable
from typing import Any

import pytest
from prometheus_client import REGISTRY

from services.gateway.live.delivery import DeliveryRecord
from services.gateway.live.pacer import DueToken
from services.gateway.types import Delivery, GenerationRequest, RequestId, Token
from services.generation.conversation import ToolCallPart
from services.generation.prompts import TextPrompt
from services.pacing.cause import Cause, Delay
from services.pacing.types import Release, ServiceLevel


def make_record(
    *, interval_s: float = 0.0, delivery: Delivery = Delivery.STREAMED, **bounds: Any
) -> DeliveryRecord:
    request = GenerationRequest(
        request_id=RequestId("r"),
        model="m",
        prompt=TextPrompt("Hi"),
        service_level=ServiceLevel(**bounds),
        delivery=delivery,
    )
    return DeliveryRecord(request, interval_s=interval_s, arrived_s=10.0)


def due(at_s: float, delay: Delay | None = None) -> DueToken:
    return DueToken(Token(0, 0, "x", delay=delay), at_s)


def write(
    record: DeliveryRecord, *due_s: float, at_s: float | None = None, delay: Delay | None = None
) -> None:
    """Have tokens written at once when they are due, or at `at_s`."""
    for one_s in due_s:
        now_s = one_s if at_s is None else at_s
        record.written([due(one_s, delay)], now_s, now_s)


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

    write(record, 11.0, at_s=11.5)  # itself late: that does not excuse the next
    write(record, 12.0, at_s=written_s)

    assert (record.num_written, record.num_late) == (2, num_late)


def test_without_an_interval_no_token_is_late() -> None:
    record = make_record()
    write(record, 11.0, 99.0)

    assert record.num_late == 0


def test_the_first_token_is_timed_from_the_request_s_arrival() -> None:
    record = make_record()

    def use() -> None:
        write(record, 12.5, 12.5)

    assert growth("evenflow_ttft_seconds_sum", use) == 2.5


@pytest.mark.parametrize(("slo_ttft_s", "violations"), [(2.5, 0), (2.4, 1)])
def test_a_late_first_token_is_counted(slo_ttft_s, violations) -> None:
    record = make_record(slo_ttft_s=slo_ttft_s)

    assert sum(misses(lambda: write(record, 12.5), "ttft").values()) == violations


@pytest.mark.parametrize(("slo_tpot_s", "violations"), [(0.5, 0), (0.4, 1)])
def test_the_mean_time_per_token_counts_from_the_first(slo_tpot_s, violations) -> None:
    record = make_record(slo_tpot_s=slo_tpot_s)
    write(record, 20.0, 20.0, 21.0)  # (21 - 20) / 2 = 0.5

    assert sum(misses(record.finish, "tpot").values()) == violations


def test_a_single_token_has_no_mean() -> None:
    record = make_record(slo_tpot_s=0.001)
    write(record, 20.0)

    assert growth("evenflow_delivered_tpot_seconds_count", record.finish) == 0


def test_a_whole_answer_s_tokens_have_no_times_for_its_reader() -> None:
    record = make_record(delivery=Delivery.WHOLE)

    def use() -> None:
        write(record, 12.0, 12.0)
        record.finish()

    assert growth("evenflow_ttft_seconds_count", use) == 0
    assert record.num_written == 2


@pytest.mark.parametrize(
    ("bound", "counted"),
    [("0.15", 0), ("0.25", 1), ("0.5", 1), ("+Inf", 1)],  # the gap is 0.25: its own bound's, too
)
def test_a_gap_counts_in_each_bucket_from_its_own_on(bound, counted) -> None:
    record = make_record()
    write(record, 20.0)
    name = "evenflow_delivered_tbt_seconds_bucket"

    assert growth(name, lambda: write(record, 20.25), le=bound) == counted


def test_the_gaps_of_all_tokens_are_summed_up() -> None:
    record = make_record()

    def use() -> None:
        write(record, 20.0, 20.5, 22.0)  # gaps of 0.5 and 1.5

    assert growth("evenflow_delivered_tbt_seconds_sum", use) == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("name", "counted"),
    [
        ("evenflow_delivered_tokens_total", 3),
        ("evenflow_paced_tokens_total", 2),  # the first is not
        ("evenflow_reading_seconds_total", 2.0),
    ],
)
def test_tokens_are_counted_and_the_paced_and_late_ones_among_them(name, counted) -> None:
    record = make_record(interval_s=1.0)

    def use() -> None:
        for due_s, written_s in ((20.0, 20.0), (21.0, 21.1), (22.0, 22.0)):
            write(record, due_s, at_s=written_s)

    assert growth(name, use) == counted


def by_cause(name: str, **labels: str) -> dict[Cause, float]:
    values = {
        cause: REGISTRY.get_sample_value(name, {**labels, "cause": cause.value}) for cause in Cause
    }
    return {cause: value for cause, value in values.items() if value is not None}


def losses(use: Callable[[], None], name: str, **labels: str) -> dict[Cause, float]:
    """Return by how much `use` lets a metric of each cause grow, those that it does alone."""
    before = by_cause(name, **labels)
    assert before.keys() == set(Cause)
    use()
    after = by_cause(name, **labels)
    return {cause: after[cause] - before[cause] for cause in Cause if after[cause] > before[cause]}


def misses(use: Callable[[], None], slo: str) -> dict[Cause, float]:
    return losses(use, "evenflow_slo_misses_total", slo=slo)


def test_waiting_is_counted_in_seconds_and_once() -> None:
    record = make_record(interval_s=1.0)
    write(record, 20.0)

    def use() -> None:  # due at 21, 22 and 23: all come when their reader takes them again
        record.written([due(21.0), due(22.0), due(23.0)], 25.0, 21.0)

    assert losses(use, "evenflow_rebuffering_seconds_total") == {Cause.READER: pytest.approx(4.0)}
    assert record.num_late == 3


DELAY = Delay(Cause.PAUSE, 0.5)


@pytest.mark.parametrize(
    ("delay", "due_s", "there_s", "expected"),
    [
        # It should be there at 21, and is written at 21.6.
        pytest.param(DELAY, 21.6, 21.6, Cause.PAUSE, id="late-from-the-engine"),
        pytest.param(None, 21.6, 21.6, Cause.NETWORK, id="late-on-the-way"),
        pytest.param(None, 21.0, 21.6, Cause.NETWORK, id="late-in-the-gateway"),
        pytest.param(None, 21.0, 21.0, Cause.READER, id="in-time-and-not-taken"),
        pytest.param(DELAY, 21.05, 21.05, Cause.READER, id="late-and-then-not-taken-for-longer"),
    ],
)
def test_a_late_token_has_the_cause_of_most_of_its_lateness(
    delay: Delay | None, due_s: float, there_s: float, expected: Cause
) -> None:
    record = make_record(interval_s=1.0)
    write(record, 20.0)

    found = misses(lambda: record.written([due(due_s, delay)], 21.6, there_s), "tbt")

    assert found == {expected: 1}


@pytest.mark.parametrize(
    ("delay", "expected"), [(Delay(Cause.QUEUE, 2.0), Cause.QUEUE), (None, Cause.NETWORK)]
)
def test_a_late_first_token_has_a_cause_too(delay: Delay | None, expected: Cause) -> None:
    record = make_record(slo_ttft_s=0.5)

    assert misses(lambda: write(record, 12.6, delay=delay), "ttft") == {expected: 1}


def test_a_mean_time_that_is_missed_has_the_cause_of_most_of_the_waiting() -> None:
    record = make_record(interval_s=1.0, slo_tpot_s=1.0)
    write(record, 20.0)
    write(record, 23.0, delay=Delay(Cause.COPIES, 2.0))
    write(record, 24.5, 26.0, delay=Delay(Cause.PROMPTS, 0.5))

    assert misses(record.finish, "tpot") == {Cause.COPIES: 1}


def test_a_mean_time_that_the_stated_pace_exceeds_is_missed_by_the_reader() -> None:
    record = make_record(interval_s=1.0, slo_tpot_s=0.5)
    write(record, 20.0, 21.0)
    write(record, 22.5, delay=Delay(Cause.COPIES, 0.5))  # 0.5 s of it, where the pace adds 1 s

    assert misses(record.finish, "tpot") == {Cause.READER: 1}


@pytest.mark.parametrize(("last_s", "result"), [(22.004, "met"), (22.006, "missed")])
def test_a_paced_answer_keeps_its_pace_or_does_not(last_s, result) -> None:
    record = make_record(interval_s=1.0)
    write(record, 20.0, 21.0)
    write(record, 22.0, at_s=last_s)

    assert growth("evenflow_paced_requests_total", record.finish, tpot=result) == 1


def test_tokens_far_ahead_of_their_reader_do_not_count_as_effective() -> None:
    record = make_record(interval_s=1.0)
    record.generated(20, 19, 20.0)  # the first is due at once; 0, 0, 1, 2, 3, ... are in hand

    # 0, 1 and 2 of 20 count in full, 3 half.
    assert growth("evenflow_effective_tokens_total", record.finish) == pytest.approx(4.5)


def test_tokens_that_a_reader_would_have_read_while_waiting_are_missed() -> None:
    record = make_record(interval_s=0.5)  # came at 10

    def use() -> None:
        write(record, 12.0)  # 2 s to the first: 4 tokens
        write(record, 12.5, 14.0)  # due at 13.0: 1 s late, 2 tokens

    assert growth("evenflow_missed_tokens_total", use) == pytest.approx(6.0)
    assert growth("evenflow_missed_tokens_total", lambda: write(make_record(), 99.0)) == 0.0


def think(record: DeliveryRecord, at_s: float) -> None:
    """Have a thought written."""
    token = Token(0, 0, "", reasoning="hm", is_read=False)
    record.written([DueToken(token, at_s)], at_s, at_s)


def test_the_answer_begins_after_the_thoughts() -> None:
    record = make_record(interval_s=1.0, slo_ttft_s=2.0)  # came at 10

    def use() -> None:
        think(record, 11.0)
        think(record, 19.0)  # no gap of the reader's
        write(record, 20.0, 21.0)

    assert growth("evenflow_ttfat_seconds_sum", lambda: misses(use, "tbt")) == 10.0
    assert (record.ttft_s, record.ttfat_s, record.num_late) == (1.0, 10.0, 0)


def test_the_bound_of_the_first_token_is_on_that_of_the_answer() -> None:
    record = make_record(slo_ttft_s=2.0)

    assert misses(lambda: think(record, 11.0), "ttft") == {}
    assert misses(lambda: write(record, 12.5), "ttft") == {Cause.NETWORK: 1}


def test_thoughts_do_not_count_in_the_mean_time_per_token() -> None:
    record = make_record(slo_tpot_s=0.5)
    think(record, 11.0)
    think(record, 15.0)
    write(record, 20.0, 20.5)

    assert misses(record.finish, "tpot") == {}


def test_a_call_is_an_answer_that_nobody_reads() -> None:
    record = make_record(interval_s=1.0)
    call = Token(0, 0, "", tool_calls=(ToolCallPart(0, "c", "f"),), is_read=False)

    def use() -> None:
        record.written([DueToken(call, 12.0)] * 2, 12.0, 12.0)
        record.finish()

    assert growth("evenflow_paced_tokens_total", use) == 0
    assert record.ttfat_s == 2.0


def test_what_is_on_the_screen_makes_no_later_token_late() -> None:
    """Five tokens at 20 are read until 25: the sixth may come then, the seventh by 26."""
    record = make_record(interval_s=1.0, release=Release.AT_ONCE)

    def use() -> None:
        record.written([due(20.0)] * 5, 20.0, 20.0)
        write(record, 24.9, 26.5)

    assert sum(misses(use, "tbt").values()) == 1
    assert record.num_late == 1


def test_text_that_goes_out_at_once_is_in_hand_until_it_is_read() -> None:
    record = make_record(interval_s=1.0, release=Release.AT_ONCE)
    write(record, *[20.0] * 10)  # nine are not read
    record.generated(10, 0, 20.0)

    # 0, 0, 1, 2, ... of 10: 0, 0 and 1 count in full.
    assert growth("evenflow_effective_tokens_total", record.finish) == pytest.approx(3.0)


@pytest.mark.parametrize(
    ("release", "label"),
    [(None, "paced"), (Release.AT_ONCE, "at_once"), (Release.SMOOTH, "smooth")],
)
def test_the_longest_gap_of_an_answer_is_told_by_what_keeps_it_back(release, label) -> None:
    record = make_record(interval_s=1.0, release=release)
    think(record, 12.0)
    write(record, 20.0, 21.0, 25.5, 26.0)

    assert growth("evenflow_longest_gap_seconds_sum", record.finish, release=label) == 4.5


def test_the_gap_of_an_answer_without_a_pace_is_told_apart() -> None:
    record = make_record()
    write(record, 20.0, 21.5)

    assert growth("evenflow_longest_gap_seconds_sum", record.finish, release="unpaced") == 1.5


@pytest.mark.parametrize(
    ("left_s", "num_kept", "num_unread", "read_frac"),
    [
        (23.0, 0, 6.0, 0.4),  # those of 20, 21, 22 and 23 are read
        (23.5, 10, 6.0, 0.2),
        (99.0, 0, 0.0, 1.0),
    ],
)
def test_who_leaves_has_read_a_share_of_what_was_there(
    left_s: float, num_kept: int, num_unread: float, read_frac: float
) -> None:
    record = make_record(interval_s=1.0, release=Release.AT_ONCE)
    write(record, *[20.0] * 10)

    def leave() -> None:
        record.left(num_kept, left_s)

    share = growth("evenflow_abandoned_read_frac_sum", leave)
    assert share == pytest.approx(read_frac)
    assert growth("evenflow_unread_tokens_total", leave) == num_unread


def test_who_reads_nothing_leaves_nothing_unread() -> None:
    record = make_record()
    write(record, 20.0)

    assert growth("evenflow_abandoned_read_frac_count", lambda: record.left(3, 20.0)) == 0


@pytest.mark.parametrize("delivery", list(Delivery))
def test_the_first_token_and_the_longest_wait_count_for_the_class(delivery) -> None:
    record = make_record(delivery=delivery)

    def use() -> None:
        write(record, 12.5, 13.0, 16.0, 17.0)
        record.finish()

    of = {"class": "unpaced"}
    assert growth("evenflow_class_ttft_seconds_sum", use, **of) == 2.5
    record = make_record(delivery=delivery)
    assert growth("evenflow_class_wait_seconds_sum", use, **of) == 3.0
    record = make_record(delivery=delivery)
    assert growth("evenflow_class_wait_seconds_count", use, **of) == 1


def test_a_whole_answer_that_begins_again_has_one_first_token() -> None:
    record = make_record(delivery=Delivery.WHOLE)

    def use() -> None:
        write(record, 12.5)
        record.forget()
        write(record, 14.0)

    assert growth("evenflow_class_ttft_seconds_count", use, **{"class": "unpaced"}) == 1


def test_a_reader_with_a_pace_waits_beyond_it() -> None:
    record = make_record(interval_s=1.0, consumption_rate_tps=1.0)
    write(record, 20.0, 21.0, 22.0)  # as it reads
    write(record, 23.0, at_s=25.5)

    assert growth("evenflow_class_wait_seconds_sum", record.finish, **{"class": "paced"}) == 2.5


def test_tokens_are_counted_by_class() -> None:
    record = make_record(consumption_rate_tps=1.0)

    def use() -> None:
        write(record, 20.0, 21.0)

    assert growth("evenflow_class_tokens_total", use, **{"class": "paced"}) == 2
    record = make_record()
    assert growth("evenflow_class_tokens_total", use, **{"class": "paced"}) == 0
