"""When the run policy is asked, and what becomes of its decision."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from services.control.measures.answer_lengths import AnswerLengths
from services.control.measures.rates import Rates
from services.control.options import ControllerOptions
from services.control.plans.counts import ControllerCounts
from services.control.requests.life import Hold
from services.control.requests.request_ledger import RequestLedger
from services.control.requests.request_record import RequestRecord
from services.control.run_director import MAX_NEW, RunDirector, RunPlace, director_of
from services.control.types import Trigger
from services.pacing.request_buffer import RequestBuffer
from services.pacing.types import ServiceLevel
from services.placement.layer_placement import ALL_RESIDENT
from services.placement.run.reason import Reason
from services.placement.run.types import RunDecision, RunPhase, RunSnapshot
from services.placement.types import EngineShape, RequestId
from tests.unit.placement.run.snapshots import make_engine
from tests.unit.records import make_record


def progress(name: str, *, num_output_tokens: int = 0) -> Any:
    return SimpleNamespace(
        request_id=name,
        num_prompt_tokens=10,
        num_output_tokens=num_output_tokens,
        num_tokens=10 + num_output_tokens,
        num_computed_tokens=10,
        max_tokens=50,
    )


class Engine:
    """`RunSeam` by hand."""

    shape: EngineShape = make_engine()

    def __init__(self) -> None:
        self.places: list[RunPlace] = []
        self.looked_up: list[str] = []
        self.parked: list[str] = []
        self.obeyed: list[RunDecision] = []

    def run_places(self) -> Iterator[RunPlace]:
        yield from self.places

    def num_host_tokens(self, place: RunPlace) -> int:
        self.looked_up.append(place.request.request_id)
        return 4

    def num_returning_bytes(self) -> int:
        return 7

    def park(self, record: RequestRecord[Any]) -> None:
        self.parked.append(record.request_id)

    def obey(self, decision: RunDecision) -> None:
        self.obeyed.append(decision)


class Bench:
    """A director, its engine, and what it asks."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.records: dict[str, RequestRecord[Any]] = {}
        self.engine, self.ledger = Engine(), RequestLedger(self.records)
        self.asked: list[RunSnapshot] = []
        self.answer = RunDecision(run=(), valid_for_s=0.25)
        self.noted: list[Trigger] = []
        meter = SimpleNamespace(rates=Rates, costs=lambda: None, prefill_frac=0.1)
        self.controller: Any = SimpleNamespace(
            ledger=self.ledger, meter=meter, note=self.noted.append, counts=ControllerCounts()
        )
        self.director = RunDirector(self.decide, self.engine, self.controller, lambda: self.now_s)

    def decide(self, snapshot: RunSnapshot) -> RunDecision:
        self.asked.append(snapshot)
        return self.answer

    def add(self, name: str, phase: RunPhase, **reader: Any) -> RequestBuffer:
        record = make_record(name, arrival_s=self.now_s - 5.0, level=ServiceLevel(**reader))
        self.records[name] = record
        self.engine.places.append(RunPlace(progress(name), record, phase))
        return record.buffer


def test_a_decision_holds_as_long_as_it_says_and_no_longer_than_anything_changes() -> None:
    bench = Bench()
    for now_s in (100.0, 100.2, 100.26, 100.3):
        bench.now_s = now_s
        bench.director.before_schedule()
    assert len(bench.asked) == 2

    bench.director.changed()
    bench.director.before_schedule()
    assert len(bench.asked) == 3
    assert len(bench.engine.obeyed) == 3


def test_who_is_parked_is_told_to_the_engine_once_and_counted() -> None:
    bench = Bench()
    bench.add("a", RunPhase.RUNNING)
    bench.answer = RunDecision(run=(), park=frozenset({RequestId("a")}), valid_for_s=1.0)

    bench.director.before_schedule()
    bench.director.before_schedule()

    assert bench.engine.parked == ["a"]
    assert bench.records["a"].num_parks == 1


def test_each_request_is_told_why_it_runs_or_waits_and_new_reasons_are_counted() -> None:
    bench = Bench()
    for name in ("a", "b", "c"):
        bench.add(name, RunPhase.RUNNING)
    a, b, c = map(RequestId, "abc")
    bench.answer = RunDecision(run=(a, b), park=frozenset({c}), reasons={a: Reason.DUE})
    for _ in range(3):
        bench.director.before_schedule()
    bench.answer = RunDecision(run=(a,))
    bench.records["b"].hold(Hold.READER, 100.0)
    bench.director.before_schedule()

    assert [bench.records[name].why for name in (a, b, c)] == [
        Reason.RUN,
        Reason.READER,  # a hold goes before what a policy says
        Reason.NOT_NAMED,
    ]
    counts = bench.controller.counts.take()["reasons"]
    assert counts == {"due": 1, "run": 2, "sent": 1, "not_named": 2}


def test_several_are_parked_in_the_same_order_in_every_process() -> None:
    bench = Bench()
    names = [f"r{number}" for number in range(20)]
    for name in names:
        bench.add(name, RunPhase.RUNNING)
    bench.answer = RunDecision(run=(), park=frozenset(map(RequestId, names)), valid_for_s=1.0)

    bench.director.before_schedule()

    assert bench.engine.parked == names


def test_the_placement_policy_is_asked_only_while_layers_leave() -> None:
    bench = Bench()
    bench.add("a", RunPhase.RUNNING)
    bench.records["a"].floor = ALL_RESIDENT
    bench.director.before_schedule()
    assert not bench.controller.director.wants_layers_away
    assert bench.records["a"].floor is None

    bench.answer = RunDecision(run=(), offloads=True)
    bench.director.changed()
    bench.records["a"].floor = ALL_RESIDENT
    bench.director.before_schedule()
    assert bench.controller.director.wants_layers_away
    assert bench.noted == [Trigger.LAYERS_LEAVE]
    assert bench.records["a"].floor is ALL_RESIDENT


def test_a_policy_sees_readers_as_they_are() -> None:
    bench = Bench()
    reader = bench.add("paced", RunPhase.RUNNING, consumption_rate_tps=10.0)
    bench.add("unpaced", RunPhase.NEW)
    bench.ledger.scheduled(["paced"], 98.0)
    reader.generated(3, 99.9)  # due at 99.9, 100.0 and 100.1

    bench.director.before_schedule()

    paced, unpaced = bench.asked[0].requests
    assert abs(paced.slack_s - 0.2) < 1e-9
    assert abs(paced.rate_tps - 10.0) < 1e-9
    assert (paced.run_age_s, paced.arrival_age_s, paced.num_host_tokens) == (2.0, 5.0, 4)
    assert (unpaced.rate_tps, unpaced.slack_s, unpaced.phase) == (0.0, float("inf"), RunPhase.NEW)
    assert bench.asked[0].h2d_queued_bytes == 7
    assert isinstance(bench.ledger.answer_lengths, AnswerLengths)


def test_of_a_long_queue_the_first_are_shown_and_nobody_else_is_left_out() -> None:
    bench = Bench()
    for number in range(40):
        bench.add(f"n{number}", RunPhase.NEW)
    bench.add("parked", RunPhase.PARKED)

    bench.director.before_schedule()

    names = [request.request_id for request in bench.asked[0].requests]
    assert names == [*(f"n{number}" for number in range(MAX_NEW)), "parked"]
    assert bench.engine.looked_up == names


def test_vllms_own_order_needs_no_director() -> None:
    bench = Bench()

    def made(policy: str) -> RunDirector | None:
        options = ControllerOptions(policy=policy)
        return director_of(options, bench.engine, bench.controller, lambda: 0.0)

    assert made("orbitflow") is None
    assert made("evenflow") is not None
