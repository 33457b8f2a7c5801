"""Each late token has one cause, which is what most of its lateness is due to."""

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.pacing.cause import Cause, Delay, cause_of
from services.pacing.request_buffer import RequestBuffer
from services.pacing.step_times import StepTimes
from services.pacing.token_time import Step
from services.pacing.types import ServiceLevel

INTERVAL_S = 0.1


@pytest.mark.parametrize(
    ("late_s", "engine_s", "reader_s", "expected"),
    [
        pytest.param(3.0, 2.0, 0.0, Cause.COPIES, id="most-of-it-in-the-engine"),
        pytest.param(3.0, 1.0, 0.0, Cause.NETWORK, id="most-of-it-on-the-way"),
        pytest.param(3.0, 1.0, 1.5, Cause.READER, id="most-of-it-at-the-reader"),
        pytest.param(3.0, 0.0, 0.0, Cause.NETWORK, id="nobody-else"),
        pytest.param(2.0, 1.0, 1.0, Cause.COPIES, id="equals-the-engine-first"),
        pytest.param(2.0, 0.0, 1.0, Cause.READER, id="equals-then-the-reader"),
        pytest.param(0.5, 9.0, 0.0, Cause.COPIES, id="later-in-the-engine-than-at-the-reader"),
    ],
)
def test_the_largest_part_of_the_lateness_is_the_cause(
    late_s: float, engine_s: float, reader_s: float, expected: Cause
) -> None:
    delay = Delay(Cause.COPIES, engine_s) if engine_s else None

    assert cause_of(late_s, delay=delay, reader_s=reader_s) is expected


class Engine:
    """Steps of a test's own, on a clock of its own."""

    def __init__(self, **level: float) -> None:
        self.now_s = 10.0
        self.buffers = {"a": RequestBuffer(ServiceLevel(**level), arrived_s=10.0)}
        self.away: dict[str, Cause] = {}
        self._times = StepTimes()

    def step(
        self, seconds: float, scheduled: Mapping[str, int] | None = None, **how: object
    ) -> Delay | None:
        """Run a step; return the delay of the token that "a" got, if it was part of it."""
        num_scheduled = {"a": 1} if scheduled is None else scheduled
        begin_s, self.now_s = self.now_s, self.now_s + seconds
        step = Step(begin_s=begin_s, end_s=self.now_s, num_scheduled=num_scheduled, **how)  # type: ignore[arg-type]
        self._times.ended(step, self.buffers, self.away.get)
        if "a" not in num_scheduled:
            return None
        buffer = self.buffers["a"]
        return buffer.generated(buffer.num_generated + 1, self.now_s)


def decoding() -> Engine:
    """Return an engine in which "a" has just got two tokens in time."""
    engine = Engine(consumption_rate_tps=1 / INTERVAL_S)
    assert engine.step(0.05, {"a": 64}) is None
    assert engine.step(0.05) is None
    return engine


def test_a_token_in_time_has_no_delay() -> None:
    engine = decoding()

    # Due at 10.05 and 10.15; the third is there at 10.15, the fourth has until 10.35.
    assert engine.step(0.05) is None
    assert engine.step(0.19) is None
    assert engine.buffers["a"].late_cause is None


def test_its_own_long_step_is_the_planners() -> None:
    engine = decoding()

    assert engine.step(0.5) == Delay(Cause.PLANNER, pytest.approx(0.35))
    assert engine.buffers["a"].late == {Cause.PLANNER: 1}


def test_a_step_that_would_have_been_in_time_without_its_stall_is_the_copies() -> None:
    engine = decoding()

    # 0.14 of its own would do; 0.15 are left.
    assert engine.step(0.16, stall_s=0.02) == Delay(Cause.COPIES, pytest.approx(0.01))


def test_copies_that_no_plan_ordered_are_the_planners() -> None:
    engine = decoding()

    delay = engine.step(0.3, stall_s=0.25, stalled_by=Cause.PLANNER)

    assert delay is not None
    assert delay.cause is Cause.PLANNER


def test_a_step_with_another_ones_prompt_is_the_prompts() -> None:
    engine = decoding()

    delay = engine.step(0.4, {"a": 1, "b": 512})

    assert delay == Delay(Cause.PROMPTS, pytest.approx(0.25))


def test_its_own_prompt_is_not_another_ones() -> None:
    engine = Engine(slo_ttft_s=0.3)
    engine.step(0.05, {"b": 1})

    delay = engine.step(0.4, {"a": 512, "b": 1})

    assert delay == Delay(Cause.PLANNER, pytest.approx(0.15))


def test_the_wait_for_the_first_step_is_the_queues() -> None:
    engine = Engine(slo_ttft_s=0.3)
    for _ in range(10):
        engine.step(0.05, {"b": 1})

    assert engine.step(0.06, {"a": 64, "b": 1}) == Delay(Cause.QUEUE, pytest.approx(0.26))


@pytest.mark.parametrize("cause", [Cause.PAUSE, Cause.READER])
def test_the_time_away_has_the_reason_for_it(cause: Cause) -> None:
    engine = decoding()
    engine.away["a"] = cause
    for _ in range(10):
        engine.step(0.05, {"b": 1})

    delay = engine.step(0.05)

    assert delay == Delay(cause, pytest.approx(0.4))


def test_computing_again_what_was_given_up_is_part_of_the_pause() -> None:
    engine = decoding()
    engine.away["a"] = Cause.PAUSE
    engine.step(0.05, {"b": 1})

    delay = engine.step(1.0, {"a": 66, "b": 1})

    assert delay is not None
    assert delay.cause is Cause.PAUSE


def test_steps_of_a_pipeline_that_others_are_in_are_its_own_time() -> None:
    engine = decoding()
    engine.step(0.2, {"b": 1})

    assert engine.step(0.2) == Delay(Cause.PLANNER, pytest.approx(0.25))


def test_a_deposit_covers_a_pause() -> None:
    engine = Engine(consumption_rate_tps=1 / INTERVAL_S)
    engine.step(0.0, {"a": 64})
    for _ in range(10):
        engine.step(0.01)
    engine.away["a"] = Cause.PAUSE
    engine.step(0.8, {"b": 1})

    assert engine.step(0.01) is None


@given(
    st.lists(
        st.tuples(
            st.floats(0.0, 2.0),  # the step's time
            st.floats(0.0, 2.0),  # its stall, which may be wrong
            st.sampled_from([{"a": 1}, {"a": 1, "b": 9}, {"a": 9}, {"b": 9}, {"b": 1}, {}]),
            st.sampled_from([None, Cause.PAUSE, Cause.READER]),
        ),
        min_size=1,
        max_size=30,
    ),
    st.floats(0.01, 1.0),
)
def test_every_late_token_has_exactly_one_cause(
    steps: list[tuple[float, float, Mapping[str, int], Cause | None]], interval_s: float
) -> None:
    engine = Engine(slo_ttft_s=interval_s, slo_tbt_s=interval_s)
    turn_s, num_delays = 10.0 + interval_s, 0
    for seconds, stall_s, scheduled, away in steps:
        engine.away = {} if away is None else {"a": away}
        delay = engine.step(seconds, scheduled, stall_s=stall_s)
        if "a" not in scheduled:
            continue
        late_s = engine.now_s - turn_s
        assert (delay is not None) == (late_s > 0.0)
        if delay is not None:
            assert delay.late_s == pytest.approx(late_s)
            assert cause_of(late_s, delay=delay, reader_s=0.0) is delay.cause
            num_delays += 1
        is_first = engine.buffers["a"].num_generated == 1
        turn_s = (engine.now_s if is_first else max(turn_s, engine.now_s)) + interval_s
    assert engine.buffers["a"].num_late <= num_delays
