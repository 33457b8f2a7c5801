"""How many readers are held."""

import pytest

from simulator.comparison.sizing import Readers, Trial, largest_held
from simulator.engine.records import Outcome, RunRecord, Totals
from simulator.workload import ArrivingRequest

READERS = Readers(num_prompt_tokens=10, num_output_tokens=20, consumption_rate_tps=10.0)


def run_that_holds(limit: int):
    """Return an engine that keeps up with so many readers and stops answering with more."""

    def run(requests: list[ArrivingRequest]) -> RunRecord:
        num_readers = len(requests) // READERS.num_questions
        gap_s = 0.1 if num_readers <= limit else 0.2
        outcomes = tuple(
            Outcome(
                request_id=r.request_id,
                arrival_s=r.arrival_s,
                num_prompt_tokens=r.num_prompt_tokens,
                num_output_tokens=r.num_output_tokens,
                level=r.level,
                generated_s=tuple(r.arrival_s + 1 + gap_s * k for k in range(r.num_output_tokens)),
            )
            for r in requests
        )
        return RunRecord(outcomes=outcomes, totals=Totals(), num_events=0, end_s=0.0)

    return run


@pytest.mark.parametrize("limit", [0, 1, 2, 5, 12, 13, 16])
def test_the_largest_number_is_found(limit) -> None:
    trials: list[Trial] = []

    found = largest_held(run_that_holds(limit), READERS, max_readers=16, tried=trials.append)

    assert found == limit
    assert len(trials) <= 9
    assert all(trial.held == (trial.num_readers <= limit) for trial in trials)


def test_policies_are_told_the_pace_at_which_answers_are_read() -> None:
    levels = {request.level for request in READERS.requests(2)}

    assert [(level.slo_tbt_s, level.consumption_rate_tps) for level in levels] == [(0.1, 10.0)]


def test_no_more_than_asked_for_are_tried() -> None:
    trials: list[Trial] = []

    assert largest_held(run_that_holds(99), READERS, max_readers=11, tried=trials.append) == 11
    assert max(trial.num_readers for trial in trials) == 11


def test_readers_begin_spread_over_the_reading_of_an_answer() -> None:
    # 20 tokens at 10 per second: 2 s. Four readers begin half a second apart.
    starts = [request.arrival_s for request in READERS.requests(4)]

    assert starts == [0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5]


def test_an_answer_that_begins_too_late_is_not_held() -> None:
    impatient = Readers(
        num_prompt_tokens=10, num_output_tokens=20, consumption_rate_tps=10.0, ttft_s=0.5
    )

    assert largest_held(run_that_holds(9), impatient, max_readers=4, tried=lambda t: None) == 0
