"""What a sender still owes the tracker, with the time as an argument."""

import pytest

from evenflow.tracker.v1 import tracker_pb2 as pb
from services.reporting.ledger import Entry, LedgerLimits, ProgressLedger, RequestRef, Sent

LIMITS = LedgerLimits(
    heartbeat_s=10.0,
    first_repeat_s=0.05,
    last_repeat_s=2.0,
    linger_s=60.0,
    unknown_s=30.0,
    unsent_s=600.0,
)
ALL = 1_000


def ref(request_id: str = "r", generation: int = 1) -> RequestRef:
    return RequestRef("ex0", request_id, generation)


def ledger_with(*refs: RequestRef) -> ProgressLedger:
    ledger = ProgressLedger(LIMITS)
    for each in refs or (ref(),):
        assert ledger.entry(each) is not None
    return ledger


def entry_of(ledger: ProgressLedger, which: RequestRef) -> Entry:
    entry = ledger.entry(which)
    assert entry is not None
    return entry


def names(sent: list[Sent]) -> list[str]:
    return [each.entry.ref.request_id for each in sent]


def test_a_new_entry_is_due_at_once_and_an_applied_one_at_its_heartbeat() -> None:
    ledger = ledger_with()

    ledger.mark_applied(ledger.take_due(100.0, limit=ALL), 100.0)

    assert ledger.next_due_s() == 110.0
    assert ledger.take_due(109.99, limit=ALL) == []
    assert names(ledger.take_due(110.0, limit=ALL)) == ["r"]
    assert ledger.num_pending == 0


def test_what_changed_while_a_message_was_under_way_is_still_due() -> None:
    ledger = ledger_with()
    sent = ledger.take_due(100.0, limit=ALL)
    entry_of(ledger, ref()).version += 1

    ledger.mark_applied(sent, 100.0)

    assert ledger.num_pending == 1
    assert names(ledger.take_due(100.0, limit=ALL)) == ["r"]


def test_a_full_message_starves_nobody() -> None:
    ledger = ledger_with(*(ref(name) for name in "abc"))

    taken = [names(ledger.take_due(0.0, limit=2)) for _ in range(3)]

    assert taken == [["a", "b"], ["c", "a"], ["b", "c"]]


def test_an_unknown_entry_is_repeated_after_growing_pauses() -> None:
    ledger = ledger_with()

    pauses_s = []
    now_s = 100.0
    for _ in range(8):
        ledger.mark_unknown(ledger.take_due(now_s, limit=ALL), now_s)
        pauses_s.append(round(ledger.next_due_s() - now_s, 6))
        now_s = ledger.next_due_s()

    assert pauses_s == [0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0]


def test_an_applied_entry_starts_its_pauses_anew() -> None:
    ledger = ledger_with()
    ledger.mark_unknown(ledger.take_due(0.0, limit=ALL), 0.0)
    ledger.mark_unknown(ledger.take_due(1.0, limit=ALL), 1.0)
    ledger.mark_applied(ledger.take_due(2.0, limit=ALL), 2.0)

    ledger.mark_unknown(ledger.take_due(12.0, limit=ALL), 12.0)

    assert ledger.next_due_s() == pytest.approx(12.05)


def test_forgetting_what_was_known_makes_everything_due() -> None:
    ledger = ledger_with(ref("a"), ref("b"))
    ledger.mark_applied(ledger.take_due(0.0, limit=ALL), 0.0)
    [first, _] = ledger.take_due(10.0, limit=ALL)
    ledger.mark_applied([_], 10.0)

    ledger.mark_unknown([first], 10.0)

    assert names(ledger.take_due(10.0, limit=ALL)) == ["b"]
    assert names(ledger.take_due(10.05, limit=ALL)) == ["a", "b"]


def test_not_knowing_a_new_entry_is_no_loss() -> None:
    ledger = ledger_with(ref("a"))
    ledger.mark_applied(ledger.take_due(0.0, limit=ALL), 0.0)
    ledger.entry(ref("b"))

    ledger.mark_unknown(ledger.take_due(1.0, limit=ALL), 1.0)

    assert ledger.take_due(1.0, limit=ALL) == []


def test_an_unknown_entry_with_a_registration_is_registered_again() -> None:
    ledger = ProgressLedger(LIMITS)
    ledger.register(pb.Registration(executor_id="ex0", request_id="r", generation=1))
    sent = ledger.take_due(0.0, limit=ALL)
    ledger.mark_registered(sent)
    assert not entry_of(ledger, ref()).needs_registering

    ledger.mark_unknown(sent, 0.0)

    assert entry_of(ledger, ref()).needs_registering


def test_a_greater_generation_replaces_and_a_smaller_one_is_ignored() -> None:
    ledger = ledger_with(ref(generation=2))
    entry_of(ledger, ref(generation=2)).num_generated = 5

    assert ledger.entry(ref(generation=1)) is None
    assert entry_of(ledger, ref(generation=2)).num_generated == 5
    assert entry_of(ledger, ref(generation=3)).num_generated is None
    assert len(ledger) == 1


def test_an_answer_about_a_replaced_generation_touches_nothing() -> None:
    ledger = ledger_with(ref(generation=1))
    sent = ledger.take_due(0.0, limit=ALL)
    ledger.entry(ref(generation=2))

    ledger.forget(sent)
    ledger.mark_applied(sent, 0.0)

    assert ledger.num_pending == 1


@pytest.mark.parametrize(
    ("answer", "kept_s"),
    [
        pytest.param("applied", 60.0, id="acknowledged-lingers"),
        pytest.param("unknown", 30.0, id="never-known"),
        pytest.param("none", 600.0, id="never-answered"),
    ],
)
def test_an_ended_entry_is_forgotten_after_its_time(answer: str, kept_s: float) -> None:
    ledger = ledger_with()
    entry_of(ledger, ref()).ended_at_s = 100.0
    sent = ledger.take_due(100.0, limit=ALL)
    if answer == "applied":
        ledger.mark_applied(sent, 100.0)
    elif answer == "unknown":
        ledger.mark_unknown(sent, 100.0)

    ledger.take_due(100.0 + kept_s - 0.01, limit=ALL)
    assert len(ledger) == 1
    ledger.take_due(100.0 + kept_s, limit=ALL)
    assert len(ledger) == 0


def test_an_end_that_the_tracker_missed_is_kept_from_the_first_unknown_answer_on() -> None:
    ledger = ledger_with()
    entry_of(ledger, ref()).ended_at_s = 100.0

    # The tracker was away for 100 s; its first answer comes before the gateway has registered.
    ledger.mark_unknown(ledger.take_due(200.0, limit=ALL), 200.0)
    ledger.mark_unknown(ledger.take_due(210.0, limit=ALL), 210.0)

    assert names(ledger.take_due(229.99, limit=ALL)) == ["r"]
    ledger.take_due(230.0, limit=ALL)
    assert len(ledger) == 0


def test_a_live_entry_is_never_given_up() -> None:
    ledger = ledger_with()
    ledger.mark_unknown(ledger.take_due(0.0, limit=ALL), 0.0)

    assert names(ledger.take_due(1e9, limit=ALL)) == ["r"]


def test_an_empty_ledger_is_never_due() -> None:
    assert ProgressLedger(LIMITS).next_due_s() == float("inf")
