"""What is remembered of requests."""

from services.control.request_ledger import RequestLedger
from services.pacing.request_buffer import RequestBuffer
from services.pacing.types import NO_SERVICE_LEVEL


def ledger_of(*names: str) -> RequestLedger:
    ledger = RequestLedger()
    for name in names:
        ledger.arrived(name, RequestBuffer(NO_SERVICE_LEVEL), 10.0)
    return ledger


def test_the_first_token_is_dated_once() -> None:
    ledger = ledger_of("a", "b")
    ledger.step_ended(11.0)
    ledger.entries["a"].buffer.generated(1, 12.0)
    ledger.step_ended(12.0)
    ledger.entries["a"].buffer.generated(2, 13.0)
    ledger.step_ended(13.0)

    assert ledger.entries["a"].first_token_s == 12.0
    assert ledger.entries["b"].first_token_s is None


def test_pauses_are_counted_and_dated() -> None:
    ledger = ledger_of("a")
    for begin_s in (20.0, 30.0):
        ledger.paused("a", begin_s)
        ledger.paused("a", begin_s + 1.0)  # paused already
        ledger.resumed("a", begin_s + 5.0)
        ledger.resumed("a", begin_s + 6.0)  # runs already

    entry = ledger.entries["a"]
    assert (entry.num_pauses, entry.paused_s, entry.resumed_s) == (2, None, 35.0)
    assert list(ledger.pauses()) == []


def test_a_preemption_ends_when_the_request_is_scheduled_again() -> None:
    ledger = ledger_of("a", "b")
    ledger.preempted("a", 20.0)
    ledger.scheduled(["b", "gone"], 21.0)
    assert ledger.entries["a"].preempted_s == 20.0

    ledger.scheduled(["a"], 22.0)

    assert (ledger.entries["a"].preempted_s, ledger.entries["a"].last_scheduled_s) == (None, 22.0)


def test_only_complete_answers_teach_lengths_but_every_end_is_one() -> None:
    ledger = ledger_of("a", "b")
    ledger.gone("a", 30.0, num_output_tokens=None)
    assert ledger.answer_lengths.predict(num_output_tokens=0, max_tokens=100) is None
    ledger.gone("b", 31.0, num_output_tokens=40)
    ledger.gone("b", 99.0, num_output_tokens=40)  # gone already
    ledger.step_ended(32.0)

    assert ledger.last_completion_s == 31.0
    assert ledger.answer_lengths.predict(num_output_tokens=0, max_tokens=100) == (40, 40)
