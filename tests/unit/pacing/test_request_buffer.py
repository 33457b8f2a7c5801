"""The scheduler's view of one reader, on a clock that the test sets."""

import pytest

from services.pacing.request_buffer import RequestBuffer
from services.pacing.types import NO_SERVICE_LEVEL, Release, ServiceLevel


def make_buffer(rate_tps: float = 1.0) -> RequestBuffer:
    return RequestBuffer(ServiceLevel(consumption_rate_tps=rate_tps))


def test_the_deposit_is_what_was_generated_and_not_delivered() -> None:
    buffer = make_buffer(rate_tps=0.01)  # due at 0, 100, 200, ...
    buffer.generated(40, now_s=0.0)
    buffer.deliver(1, counted_s=1.0)

    assert buffer.num_deposited(2.0) == 39


def test_between_two_counts_the_reader_takes_tokens_as_they_are_due() -> None:
    buffer = make_buffer()  # due at 0, 1, 2, ...
    buffer.generated(10, now_s=0.0)
    buffer.deliver(1, counted_s=0.0)

    assert buffer.num_deposited(3.5) == 6  # those due at 1, 2, 3 are gone
    buffer.deliver(2, counted_s=3.5)
    assert buffer.num_deposited(3.5) == 8


def test_an_older_count_changes_nothing() -> None:
    buffer = make_buffer()
    buffer.generated(10, now_s=0.0)
    buffer.deliver(5, counted_s=2.0)
    buffer.deliver(3, counted_s=4.0)

    assert buffer.num_delivered == 5
    assert buffer.num_deposited(4.0) == 3  # not 5: what was due at 3 and 4 counts as read


def test_what_came_due_while_a_count_was_under_way_is_read() -> None:
    buffer = make_buffer()
    for num_generated in (1, 2, 3, 4):
        buffer.generated(num_generated, now_s=10.0 * num_generated)  # a dry reader
    buffer.deliver(2, counted_s=25.0)  # and here at 40

    assert buffer.num_deposited(40.0) == 0


def test_a_count_beyond_what_was_generated_is_cut() -> None:
    buffer = make_buffer()
    buffer.generated(3, now_s=0.0)
    buffer.deliver(1_000, counted_s=0.5)
    buffer.generated(8, now_s=0.5)

    assert buffer.num_delivered == 3
    assert buffer.num_deposited(0.5) == 5


def test_without_a_pace_nothing_is_deposited_or_late() -> None:
    buffer = RequestBuffer(NO_SERVICE_LEVEL)
    buffer.generated(5, now_s=0.0)
    buffer.generated(6, now_s=100.0)

    assert buffer.num_deposited(100.0) == 0
    assert buffer.num_late == 0


@pytest.mark.parametrize(
    ("num_first", "num_late"),
    [
        pytest.param(1, 1, id="without-a-deposit-a-gap-is-felt"),
        pytest.param(3, 1, id="a-deposit-that-ends-before-the-gap-does"),
        pytest.param(4, 0, id="a-deposit-covers-the-gap"),
    ],
)
def test_a_token_is_late_when_the_deposit_does_not_cover_its_gap(
    num_first: int, num_late: int
) -> None:
    buffer = make_buffer()
    buffer.generated(num_first, now_s=0.0)  # the last one is due at num_first - 1
    buffer.generated(num_first + 1, now_s=4.0)  # in time if due at 4 or later

    assert buffer.num_late == num_late


def test_a_reader_that_has_stopped_takes_nothing() -> None:
    buffer = make_buffer()  # due at 0, 1, 2, ...
    buffer.generated(10, now_s=0.0)
    buffer.deliver(3, counted_s=2.0)
    buffer.on_hold = True

    assert buffer.num_deposited(100.0) == 7


def test_while_a_model_thinks_its_reader_has_neither_rate_nor_slack() -> None:
    buffer = RequestBuffer(ServiceLevel(consumption_rate_tps=1.0), reads=False)
    buffer.generated(10, now_s=0.0)

    assert (buffer.rate_tps, buffer.num_deposited(0.0), buffer.slack_s(0.5)) == (0.0, 0, -0.5)
    buffer.turned(6, reads=True, now_s=0.5)  # due at 0, 1, 2 and 3

    assert (buffer.rate_tps, buffer.num_deposited(0.5), buffer.slack_s(0.5)) == (1.0, 3, 3.5)
    buffer.turned(8, reads=False, now_s=0.5)
    assert (buffer.rate_tps, buffer.slack_s(0.5)) == (0.0, 0.0)


def test_no_thought_is_late_and_the_first_token_s_bound_is_on_the_answer() -> None:
    level = ServiceLevel(slo_ttft_s=2.0, consumption_rate_tps=1.0)
    buffer = RequestBuffer(level, reads=False)
    delays = [buffer.generated(k, now_s=1.5 * k) for k in (1, 2)]  # at 1.5 and 3.0

    assert [delay and delay.late_s for delay in delays] == [None, 1.0]
    buffer.turned(1, reads=True, now_s=3.0)
    buffer.turned(2, reads=False, now_s=3.0)
    buffer.generated(3, now_s=99.0)
    assert buffer.num_late == 0


@pytest.mark.parametrize(
    ("release", "num_in_hand"),
    [(None, 0), (Release.PACED, 0), (Release.AT_ONCE, 7), (Release.SMOOTH, 7)],
)
def test_text_on_the_screen_is_in_hand_until_it_is_read(
    release: Release | None, num_in_hand: int
) -> None:
    buffer = RequestBuffer(ServiceLevel(consumption_rate_tps=1.0, release=release))
    buffer.generated(10, now_s=0.0)  # due at 0, 1, 2, ...
    buffer.deliver(10, counted_s=2.5)

    assert buffer.num_delivered == 10
    assert buffer.num_deposited(2.5) == num_in_hand
    assert buffer.slack_s(2.5) == 7.5


@pytest.mark.parametrize(
    ("num_tokens", "rests", "has_enough"),
    [
        (5, False, False),  # 5 s in hand
        (6, False, True),
        (4, True, True),
        (3, True, True),
        (2, True, False),
        (0, False, False),
    ],
)
def test_a_reader_has_enough_until_half_of_it_is_left(
    num_tokens: int, rests: bool, has_enough: bool
) -> None:
    level = ServiceLevel(consumption_rate_tps=1.0, max_in_hand_s=6.0, release=Release.AT_ONCE)
    buffer = RequestBuffer(level)
    buffer.generated(num_tokens, now_s=0.0)

    assert buffer.has_enough(0.0, rests=rests) is has_enough
    buffer.turned(0, reads=False, now_s=0.0)
    assert not buffer.has_enough(0.0, rests=rests)


def test_without_a_limit_no_reader_has_enough() -> None:
    buffer = make_buffer()
    buffer.generated(10_000, now_s=0.0)

    assert not buffer.has_enough(0.0, rests=False)


def resumed(num_delivered: int, last_due_s: float, *, now_s: float = 100.0) -> RequestBuffer:
    """Return the buffer of an answer that comes with ten tokens, read at one per second."""
    buffer = make_buffer()
    buffer.resumed(10, num_delivered=num_delivered, last_due_s=last_due_s, now_s=now_s)
    return buffer


def test_a_reader_who_comes_with_tokens_in_hand_reads_on() -> None:
    buffer = resumed(4, last_due_s=105.5)  # due at 100.5, 101.5, ... 105.5

    assert buffer.num_deposited(100.0) == 6
    assert buffer.num_deposited(103.0) == 3
    assert buffer.slack_s(100.0) == 6.5
    assert (buffer.num_generated, buffer.num_delivered) == (10, 4)
    assert buffer.last_release_s(100.0) == 100.0


def test_a_reader_who_comes_with_nothing_in_hand_has_waited() -> None:
    buffer = resumed(10, last_due_s=97.0)

    assert buffer.num_deposited(100.0) == 0
    assert buffer.slack_s(100.0) == -2.0


def test_counts_and_tokens_go_on_from_there() -> None:
    buffer = resumed(4, last_due_s=105.5)
    buffer.deliver(5, counted_s=100.6)
    assert buffer.generated(11, now_s=101.0) is None

    assert buffer.num_deposited(101.0) == 6
    assert buffer.slack_s(101.0) == 6.5


def test_of_what_is_late_only_the_time_here_is_this_engine_s() -> None:
    buffer = resumed(10, last_due_s=97.0)  # the next token was due at 98
    delay = buffer.generated(11, now_s=100.25)

    assert delay is not None
    assert delay.late_s == 0.25
    delay = buffer.generated(12, now_s=101.75)
    assert delay is not None
    assert delay.late_s == 0.5


def test_counts_of_text_that_goes_out_at_once_say_nothing_of_what_is_read() -> None:
    level = ServiceLevel(consumption_rate_tps=1.0, release=Release.AT_ONCE)
    buffer = RequestBuffer(level)
    buffer.resumed(10, num_delivered=10, last_due_s=103.5, now_s=100.0)

    assert buffer.num_deposited(100.0) == 4


def test_while_nobody_reads_what_comes_nothing_is_in_hand() -> None:
    buffer = RequestBuffer(ServiceLevel(consumption_rate_tps=1.0), reads=False)
    buffer.resumed(10, num_delivered=10, last_due_s=99.0, now_s=100.0)
    buffer.generated(11, now_s=101.0)
    buffer.turned(11, reads=True, now_s=101.0)
    buffer.generated(13, now_s=102.0)

    assert buffer.num_deposited(102.0) == 1  # due at 102 and 103, behind thoughts


def test_a_new_pace_is_what_later_tokens_are_late_by() -> None:
    buffer = RequestBuffer(ServiceLevel(consumption_rate_tps=1.0))
    buffer.generated(1, 10.0)
    assert buffer.slack_s(10.0) == 1.0

    buffer.repace(ServiceLevel(consumption_rate_tps=4.0), 10.0)

    assert (buffer.rate_tps, buffer.interval_s, buffer.slack_s(10.0)) == (4.0, 0.25, 0.25)
    buffer.generated(2, 10.5)
    assert buffer.num_late == 1
