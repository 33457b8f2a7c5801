"""What is remembered of requests."""

import pytest

from services.control.requests.life import State
from services.control.requests.request_ledger import RequestLedger
from tests.unit.records import make_record


def ledger_of(*names: str) -> RequestLedger:
    return RequestLedger({name: make_record(name, arrival_s=10.0) for name in names})


def test_the_first_token_is_dated_once() -> None:
    ledger = ledger_of("a", "b")
    ledger.step_ended(11.0)
    ledger.records["a"].buffer.generated(1, 12.0)
    ledger.step_ended(12.0)
    ledger.records["a"].buffer.generated(2, 13.0)
    ledger.step_ended(13.0)

    assert ledger.records["a"].first_token_s == 12.0
    assert ledger.records["b"].first_token_s is None


def test_a_request_runs_since_its_first_step_after_it_was_admitted() -> None:
    ledger = ledger_of("a", "b")
    record = ledger.records["a"]
    record.enter(State.RUNNING)
    ledger.scheduled(["a", "b"], 20.0)
    ledger.scheduled(["a", "b"], 21.0)
    assert record.run_since_s == 20.0

    record.preempted()
    ledger.scheduled(["b"], 22.0)
    assert record.run_since_s is None
    record.enter(State.RUNNING)
    ledger.scheduled(["a"], 23.0)

    assert record.run_since_s == 23.0


def test_a_wait_is_since_the_last_step_or_the_arrival_and_is_known_after_it() -> None:
    ledger = ledger_of("a")
    record = ledger.records["a"]
    assert record.away_s(14.0) == 4.0
    record.enter(State.RUNNING)
    ledger.scheduled(["a"], 15.0)
    ledger.scheduled(["a"], 16.0)
    assert record.waited_s == 5.0

    record.preempted()
    assert record.away_s(18.0) == 2.0
    record.enter(State.RUNNING)
    ledger.scheduled(["a"], 24.0)
    assert record.waited_s == 8.0


def test_only_complete_answers_teach_lengths_but_every_end_is_one() -> None:
    ledger = ledger_of()
    ledger.ended(30.0, num_output_tokens=None)
    assert ledger.answer_lengths.predict(num_output_tokens=0, max_tokens=100) is None
    assert ledger.last_completion_s == 30.0
    ledger.ended(31.0, num_output_tokens=40)

    assert ledger.last_completion_s == 31.0
    assert ledger.answer_lengths.predict(num_output_tokens=0, max_tokens=100) == (40, 40)


def test_what_steps_bring_is_learnt_of_those_that_decode_and_first_tokens_come_alone() -> None:
    ledger = ledger_of("a", "b", "late")
    a, b, late = ledger.records.values()
    a.buffer.generated(1, 11.0)
    assert ledger.step_ended(11.0) == []
    assert a.tokens_per_step is None
    for step in range(1, 200):
        a.buffer.generated(1 + 3 * step, 11.0 + step)
        b.buffer.generated(step, 11.0 + step)
        brought = ledger.step_ended(11.0 + step)
        assert sorted(brought) == ([3] if step == 1 else [1, 3])

    assert ledger.tokens_per_step_of(a) == pytest.approx(3.0, abs=1e-3)
    assert ledger.tokens_per_step_of(b) == pytest.approx(1.0, abs=1e-3)
    assert (
        ledger.tokens_per_step_of(late)
        == ledger.tokens_per_step.mean
        == pytest.approx(2.0, abs=0.1)
    )


def test_without_drafts_a_step_brings_exactly_one_token() -> None:
    ledger = ledger_of("a", "b")
    for step in range(1, 500):
        for record in ledger.records.values():
            record.buffer.generated(step, 11.0 + step)
        ledger.step_ended(11.0 + step)

    assert [ledger.tokens_per_step_of(record) for record in ledger.records.values()] == [1.0, 1.0]


def test_tokens_of_an_answer_that_was_begun_elsewhere_are_no_step_s() -> None:
    ledger = ledger_of("a")
    record = ledger.records["a"]
    record.buffer.resumed(40, num_delivered=10, last_due_s=12.0, now_s=11.0)
    record.first_token_s, record.num_counted_tokens = 9.0, 40
    record.buffer.generated(42, 12.0)

    assert ledger.step_ended(12.0) == [2]
