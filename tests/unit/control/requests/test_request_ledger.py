"""What is remembered of requests."""

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


def test_only_complete_answers_teach_lengths_but_every_end_is_one() -> None:
    ledger = ledger_of()
    ledger.ended(30.0, num_output_tokens=None)
    assert ledger.answer_lengths.predict(num_output_tokens=0, max_tokens=100) is None
    assert ledger.last_completion_s == 30.0
    ledger.ended(31.0, num_output_tokens=40)

    assert ledger.last_completion_s == 31.0
    assert ledger.answer_lengths.predict(num_output_tokens=0, max_tokens=100) == (40, 40)
