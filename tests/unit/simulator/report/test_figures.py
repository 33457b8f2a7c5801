"""Figures against hand-computed runs."""

import pytest

from services.pacing.types import ServiceLevel
from services.placement.types import RequestId
from simulator.engine.records import Outcome, RunRecord, Totals
from simulator.report.figures import delivered_s, figures, promptness


def make_outcome(**overrides) -> Outcome:
    given = {
        "request_id": RequestId("a"),
        "arrival_s": 0.0,
        "num_prompt_tokens": 5,
        "num_output_tokens": 5,
        "level": ServiceLevel(slo_tbt_s=1.0),
        # Gaps 0.5, 0.5, 2, 1: one is too long. Due at 1, 2, 3, 4: the fourth comes at 4, on time.
        "generated_s": (1.0, 1.5, 2.0, 4.0, 5.0),
    }
    return Outcome(**(given | overrides))


def make_run(*outcomes: Outcome) -> RunRecord:
    return RunRecord(outcomes=outcomes, totals=Totals(busy_s=1.0), num_events=1, end_s=5.0)


def test_a_deposit_hides_a_gap_that_the_engine_made() -> None:
    one = promptness(make_outcome())

    assert one is not None
    assert (one.num_gaps, one.num_in_time, one.num_in_time_deposit) == (4, 3, 4)


def test_a_late_token_moves_the_clock_of_those_after_it() -> None:
    # Due 1, 2, then g = 4.5 is 1.5 late, from there 5.5: g = 5.4 is on time again.
    one = promptness(make_outcome(generated_s=(1.0, 1.5, 4.5, 5.4, 6.0)))

    assert one is not None
    assert (one.num_in_time, one.num_in_time_deposit) == (3, 3)


def test_tolerance_is_five_milliseconds() -> None:
    late = make_outcome(num_output_tokens=2, generated_s=(1.0, 2.006))
    in_time = make_outcome(num_output_tokens=2, generated_s=(1.0, 2.004))

    assert [promptness(one).num_in_time for one in (late, in_time)] == [0, 1]


def test_readers_get_tokens_when_due_and_the_rest_at_the_end() -> None:
    outcome = make_outcome(generated_s=(1.0, 1.1, 1.2, 1.3, 3.5))

    assert delivered_s(outcome) == [1.0, 2.0, 3.0, 3.5, 3.5]


def test_a_paced_tail_keeps_its_pace() -> None:
    level = ServiceLevel(consumption_rate_tps=1.0, pace_tail=True)

    assert delivered_s(make_outcome(generated_s=(1.0, 1.1, 1.2), level=level)) == [1.0, 2.0, 3.0]


def test_a_rejected_request_counts_as_late_with_all_its_tokens() -> None:
    found = figures(make_run(make_outcome(), make_outcome(generated_s=(), rejected=True)))

    assert found["tbt"] == pytest.approx(3 / 8)
    assert found["tbt_deposit"] == pytest.approx(4 / 8)
    assert found["tpot"] == found["tpot_deposit"] == 0.5
    assert found["rejected"] == 1


def test_what_a_reader_leaves_behind_is_unread_and_judges_nobody() -> None:
    # Two tokens are read, three of ten asked for were not made: the late fourth concerns nobody.
    left = make_outcome(generated_s=(1.0, 1.5, 2.0, 9.0), num_output_tokens=10, leaves_after=2)
    one, found = promptness(left), figures(make_run(left, make_outcome()))

    assert one is not None
    assert (one.num_gaps, one.num_in_time_deposit, one.tpot_met_deposit) == (1, 1, True)
    assert delivered_s(left) == [1.0, 2.0, 3.0, 9.0]  # its generation never ended
    assert found["unread"] == pytest.approx(2 / 9)
    assert found["unmade"] == pytest.approx(6 / 15)
    assert found["read_tokens_per_s"] == pytest.approx(7 / 9.0)
    assert found["tokens_per_s"] == pytest.approx(9 / 9.0)
    assert found["rebuffering"] == 0.0
    assert "unread" not in figures(make_run(make_outcome()))


def test_rates_and_latencies() -> None:
    found = figures(make_run(make_outcome()))

    assert found["ttft_s"] == 1.0
    assert found["e2e_s"] == 5.0
    assert found["tokens_per_s"] == 1.0
    assert found["requests_per_min"] == 12.0
    assert (found["p50_s"], found["p95_s"], found["p99_s"]) == (1.0, 2.0, 2.0)


def test_without_a_promise_nothing_is_judged() -> None:
    found = figures(make_run(make_outcome(level=ServiceLevel())))

    assert "tbt" not in found
    assert found["p99_s"] == 2.0
