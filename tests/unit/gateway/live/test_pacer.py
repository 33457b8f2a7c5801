"""The pacing loop on a clock that the test moves: no real time passes."""

import gc
import heapq
from collections.abc import Callable, Sequence
from itertools import count, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.live.pacer import MAX_TIMER_S, DueToken, PacedStream, Pacer
from services.gateway.types import Token
from services.pacing.deposit import due_times_s


class _Timer:
    def __init__(self, callback: Callable[[], None]) -> None:
        self.callback = callback
        self.is_cancelled = False

    def cancel(self) -> None:
        self.is_cancelled = True


class Time:
    """A clock and its timers; `late_s` is how late every timer fires."""

    def __init__(self, late_s: float = 0.0) -> None:
        self.now_s = 0.0
        self.late_s = late_s
        self.num_wakes = 0
        self._tickets = count()
        self._timers: list[tuple[float, int, _Timer]] = []

    def __call__(self) -> float:
        return self.now_s

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> _Timer:
        assert 0 <= delay_s <= MAX_TIMER_S
        timer = _Timer(callback)
        at_s = self.now_s + delay_s + self.late_s
        heapq.heappush(self._timers, (at_s, next(self._tickets), timer))
        return timer

    @property
    def num_armed(self) -> int:
        return sum(not timer.is_cancelled for _, _, timer in self._timers)

    def advance_to(self, until_s: float) -> None:
        while self._timers and self._timers[0][0] <= until_s:
            at_s, _, timer = heapq.heappop(self._timers)
            self.now_s = max(self.now_s, at_s)
            if not timer.is_cancelled:
                self.num_wakes += 1
                timer.callback()
        self.now_s = max(self.now_s, until_s)


class Reader:
    """Writes down which token came when."""

    def __init__(self, time: Time) -> None:
        self._time = time
        self.got: list[tuple[int, float]] = []
        self.due_s: list[float] = []

    def __call__(self, tokens: Sequence[DueToken]) -> None:
        self.got += [(due.token.index, self._time.now_s) for due in tokens]
        self.due_s += [due.due_s for due in tokens]


def make_token(index: int) -> Token:
    return Token(index, 100 + index, "x")


@pytest.fixture
def time() -> Time:
    return Time()


@pytest.fixture
def pacer(time: Time) -> Pacer:
    return Pacer(clock=time, timer=time.call_later)


def feed(pacer: Pacer, time: Time, stream: PacedStream, generated_s: Sequence[float]) -> None:
    """Push one token at each of these times, which ascend."""
    for index, at_s in enumerate(generated_s):
        time.advance_to(at_s)
        stream.push([make_token(index)], at_s)
        pacer.check_integrity()


@pytest.mark.parametrize(
    ("generated_s", "released_s"),
    [
        # d_1 = g_1 = 0, then one per second however early the next is there.
        pytest.param([0, 0.25, 0.5], [0, 1, 2], id="fast-generation-is-paced"),
        # d_2 = max(1.5, 0 + 1): a late token is not held, and moves those after it.
        pytest.param([0, 1.5, 1.75], [0, 1.5, 2.5], id="a-late-token-shifts-the-rest"),
        # The deposit of tokens 1 and 2 bridges the pause from 0.5 to 3.
        pytest.param([0, 0.25, 0.5, 3], [0, 1, 2, 3], id="a-deposit-covers-a-pause"),
        pytest.param([0, 1, 2], [0, 1, 2], id="as-fast-as-read"),
    ],
)
def test_tokens_go_out_when_they_are_due(pacer, time, generated_s, released_s) -> None:
    reader = Reader(time)
    stream = pacer.open(1.0, reader)

    feed(pacer, time, stream, generated_s)
    time.advance_to(100)

    assert reader.got == list(enumerate(released_s))
    assert reader.due_s == released_s


def test_an_unpaced_stream_passes_straight_through(pacer, time) -> None:
    reader = Reader(time)
    stream = pacer.open(0.0, reader)

    stream.push([make_token(0), make_token(1)], 0.0)
    stream.push([make_token(2)], 0.0)

    assert [index for index, _ in reader.got] == [0, 1, 2]
    assert time.num_armed == 0


def test_a_frame_of_many_tokens_is_spread(pacer, time) -> None:
    reader = Reader(time)
    stream = pacer.open(2.0, reader)

    stream.push([make_token(k) for k in range(4)], 0.0)
    time.advance_to(3.9)

    assert reader.got == [(0, 0), (1, 2)]
    assert stream.num_held == 2


def test_all_streams_share_one_timer(pacer, time) -> None:
    readers = [Reader(time) for _ in range(50)]
    for k, reader in enumerate(readers):
        pacer.open(1.0 + k / 100, reader).push([make_token(i) for i in range(3)], 0.0)
        assert time.num_armed == 1
    pacer.check_integrity()

    time.advance_to(10)

    for k, reader in enumerate(readers):
        assert [at_s for _, at_s in reader.got] == pytest.approx([0, 1 + k / 100, 2 + k / 50])
    assert time.num_armed == 0
    assert time.num_wakes <= 100  # two due times for each stream, none for nothing


def test_streams_due_together_are_served_by_one_wake(pacer, time) -> None:
    for _ in range(50):
        pacer.open(1.0, Reader(time)).push([make_token(0), make_token(1)], 0.0)

    time.advance_to(10)

    assert time.num_wakes == 1


def test_an_earlier_token_moves_the_timer(pacer, time) -> None:
    slow, fast = Reader(time), Reader(time)
    pacer.open(10.0, slow).push([make_token(0), make_token(1)], 0.0)
    pacer.open(1.0, fast).push([make_token(0), make_token(1)], 0.0)

    time.advance_to(20)

    assert fast.got[1] == (1, 1.0)
    assert slow.got[1] == (1, 10.0)


def test_a_release_that_raises_stops_no_other_stream(pacer, time) -> None:
    def broken(tokens: Sequence[DueToken]) -> None:
        if tokens[0].token.index:
            raise KeyError("a bug")

    readers = [Reader(time), broken, Reader(time)]
    for reader in readers:
        pacer.open(1.0, reader).push([make_token(k) for k in range(3)], 0.0)

    with pytest.raises(KeyError):
        time.advance_to(1)
    pacer.check_integrity()
    time.advance_to(1)  # the loop goes on after what it logs
    with pytest.raises(KeyError):
        time.advance_to(2)
    time.advance_to(10)

    for reader in (readers[0], readers[2]):
        assert reader.got == [(0, 0), (1, 1), (2, 2)]
    pacer.check_integrity()


def test_a_flush_releases_the_rest_at_once(pacer, time) -> None:
    reader = Reader(time)
    stream = pacer.open(1.0, reader)
    stream.push([make_token(k) for k in range(4)], 0.0)
    time.advance_to(1.5)

    stream.flush()
    pacer.check_integrity()
    time.advance_to(10)

    assert reader.got == [(0, 0), (1, 1), (2, 1.5), (3, 1.5)]
    assert reader.due_s == due_times_s([0.0] * 4, 1.0, flushed_s=1.5)


def test_a_closed_stream_releases_nothing_more(pacer, time) -> None:
    reader = Reader(time)
    stream = pacer.open(1.0, reader)
    stream.push([make_token(0), make_token(1)], 0.0)

    stream.close()
    stream.close()
    stream.push([make_token(2)], 0.0)
    stream.flush()
    pacer.check_integrity()
    time.advance_to(10)

    assert reader.got == [(0, 0.0)]
    assert stream.num_held == 0


def test_streams_that_close_early_leave_nothing_behind(pacer, time) -> None:
    for _ in range(1_000):
        stream = pacer.open(1e9, Reader(time))
        stream.push([make_token(0), make_token(1)], 0.0)
        stream.close()
        pacer.check_integrity()

    assert len(pacer._heads) < 100


def test_an_interval_beyond_what_timers_take_is_waited_for_in_parts(pacer, time) -> None:
    reader = Reader(time)
    pacer.open(2.5 * MAX_TIMER_S, reader).push([make_token(0), make_token(1)], 0.0)

    time.advance_to(2.5 * MAX_TIMER_S - 1)
    early = list(reader.got)
    time.advance_to(2.5 * MAX_TIMER_S)

    assert early == [(0, 0.0)]
    assert reader.got[1:] == [(1, 2.5 * MAX_TIMER_S)]


def test_an_infinite_interval_waits_for_the_flush(pacer, time) -> None:
    reader = Reader(time)
    stream = pacer.open(float("inf"), reader)
    stream.push([make_token(0), make_token(1)], 0.0)
    time.advance_to(10 * MAX_TIMER_S)
    held = stream.num_held

    stream.flush()

    assert held == 1
    assert [index for index, _ in reader.got] == [0, 1]


gaps = st.lists(st.integers(0, 40), min_size=1, max_size=30)
streams = st.lists(st.tuples(st.integers(1, 24), gaps), min_size=1, max_size=6)


@given(streams=streams, late=st.integers(0, 8))
def test_tokens_come_in_order_on_time_and_no_two_in_an_interval(streams, late) -> None:
    # Times are multiples of 1/16 s, so that sums are exact.
    late_s = late / 16
    time = Time(late_s)
    pacer = Pacer(clock=time, timer=time.call_later)
    readers, expected, pushes = [], [], []
    for number, (interval, gaps) in enumerate(streams):
        reader = Reader(time)
        readers.append(reader)
        stream = pacer.open(interval / 16, reader)
        generated_s = [sum(gaps[: k + 1]) / 16 for k in range(len(gaps))]
        expected.append(due_times_s(generated_s, interval / 16))
        pushes += [(at_s, number, index, stream) for index, at_s in enumerate(generated_s)]
    for at_s, _, index, stream in sorted(pushes, key=lambda push: push[:3]):
        time.advance_to(at_s)
        stream.push([make_token(index)], at_s)
        pacer.check_integrity()
    time.advance_to(1_000)

    for (interval, _), reader, due_s in zip(streams, readers, expected, strict=True):
        assert [index for index, _ in reader.got] == list(range(len(due_s)))
        assert reader.due_s == due_s
        released_s = [at_s for _, at_s in reader.got]
        for at_s, on_time_s in zip(released_s, due_s, strict=True):
            assert on_time_s <= at_s <= on_time_s + late_s
        if not late:
            pairs = pairwise(released_s)
            assert all(second - first >= interval / 16 for first, second in pairs)


def test_waiting_tokens_are_nothing_to_the_garbage_collector() -> None:
    token = Token(0, 1, "x")

    assert not gc.is_tracked(token)
    assert not gc.is_tracked(DueToken(token, 1.0))


def test_what_nobody_reads_takes_no_turn_and_keeps_its_place(pacer, time) -> None:
    reader = Reader(time)
    stream = pacer.open(1.0, reader)
    thoughts = [Token(k, k, "", reasoning="hm", is_read=False) for k in range(3)]

    stream.push([*thoughts, make_token(3), make_token(4)], 0.0)  # the text is due at 0 and 1
    time.advance_to(0.5)
    stream.push([Token(5, 5, "", reasoning="hm", is_read=False), make_token(6)], 0.5)
    time.advance_to(10)

    assert reader.got == [(0, 0), (1, 0), (2, 0), (3, 0), (4, 1), (5, 1), (6, 2)]


def test_after_a_flush_text_is_paced_anew(pacer, time) -> None:
    reader = Reader(time)
    stream = pacer.open(1.0, reader)
    stream.push([make_token(k) for k in range(10)], 0.0)

    stream.flush()
    stream.push([make_token(10), make_token(11)], 0.0)
    time.advance_to(10)

    assert reader.got[9:] == [(9, 0), (10, 1), (11, 2)]


def test_no_token_is_kept_back_for_longer_than_is_allowed(pacer, time) -> None:
    reader = Reader(time)
    stream = pacer.open(1.0, reader, max_held_s=1.5)

    stream.push([make_token(k) for k in range(4)], 0.0)
    stream.push([make_token(4)], 0.0)
    time.advance_to(1.25)
    stream.push([make_token(5), make_token(6)], 1.25)  # due at 2.5, and at 3.5 but for 1.5 s
    time.advance_to(10)

    assert reader.got == [(0, 0), (1, 1), (2, 1.5), (3, 1.5), (4, 1.5), (5, 2.5), (6, 2.75)]


def make_stream(
    interval_s: float, num_tokens: int, time: Time
) -> tuple[PacedStream, Reader, Pacer]:
    pacer, reader = Pacer(clock=time, timer=time.call_later), Reader(time)
    stream = pacer.open(interval_s, reader)
    stream.push([make_token(index) for index in range(num_tokens)], time.now_s)
    return stream, reader, pacer


def test_tokens_that_wait_take_a_new_pace_from_the_turn_of_the_newest_that_is_out() -> None:
    time = Time()
    stream, reader, pacer = make_stream(4.0, 6, time)  # due at 0, 4, 8, 12, 16, 20
    time.advance_to(5.0)

    stream.repace(2.0)
    pacer.check_integrity()
    time.advance_to(8.0)
    stream.repace(0.5)  # the third was out at 6, the fourth at 8
    pacer.check_integrity()
    time.advance_to(10.0)

    assert [at_s for _, at_s in reader.got] == [0.0, 4.0, 6.0, 8.0, 8.5, 9.0]
    stream.push([make_token(6)], 9.0)
    assert reader.due_s[-1] == 9.5


def test_a_slower_pace_waits_from_the_newest_token_on_and_none_ends_the_wait() -> None:
    time = Time()
    stream, reader, pacer = make_stream(1.0, 4, time)
    time.advance_to(1.5)  # two are out

    stream.repace(5.0)
    time.advance_to(5.9)
    assert len(reader.got) == 2
    time.advance_to(6.0)
    assert reader.got[2:] == [(2, 6.0)]
    stream.repace(0.0)

    assert reader.got[3:] == [(3, 6.0)]
    pacer.check_integrity()
