"""When the run policy is asked, and what becomes of its decision."""

from types import SimpleNamespace
from typing import Any

import pytest

from lab.planning.snapshots import BLOCK_SIZE
from services.control.admission import MAX_NEW, Admission, run_policy_of
from services.control.measures.rates import Rates
from services.control.options import ControllerOptions
from services.control.order.fair_shares import FairShares
from services.control.requests.life import Hold, State
from services.control.requests.request_ledger import RequestLedger
from services.pacing.request_buffer import RequestBuffer
from services.pacing.types import ServiceLevel
from services.placement.layer_placement import ALL_RESIDENT
from services.placement.run.reason import Reason
from services.placement.run.types import IDLE, RunDecision, RunPhase, RunSnapshot
from services.placement.types import RequestId
from tests.unit.control.fake_engine import FakeEngine


class Bench:
    """An engine, and what its run policy is asked."""

    def __init__(self, shares: FairShares | None = None) -> None:
        self.now_s = 100.0
        self.engine = FakeEngine()
        self.ledger = RequestLedger(self.engine.records)
        self.asked: list[RunSnapshot] = []
        self.answer = RunDecision(run=(), valid_for_s=0.25)
        meter: Any = SimpleNamespace(rates=Rates, costs=lambda: None, prefill_frac=0.1)
        self.line = self.engine.line()
        self.admission = Admission(self.decide, self.line, self.ledger, meter, shares)

    def decide(self, snapshot: RunSnapshot) -> RunDecision:
        self.asked.append(snapshot)
        return self.answer

    def before_schedule(self) -> list[Reason]:
        return self.admission.before_schedule(self.now_s)

    def add(self, name: str, phase: RunPhase, **reader: Any) -> RequestBuffer:
        record = self.engine.add(name, arrival_s=self.now_s - 5.0, level=ServiceLevel(**reader))
        if phase is RunPhase.RUNNING:
            record.enter(State.RUNNING)
        else:
            record.kv = None
        self.engine.requests[name].num_preemptions = int(phase is RunPhase.PARKED)
        return record.buffer


def test_a_decision_holds_as_long_as_it_says_and_no_longer_than_anything_changes() -> None:
    bench = Bench()
    for now_s in (100.0, 100.2, 100.26, 100.3):
        bench.now_s = now_s
        bench.before_schedule()
    assert len(bench.asked) == 2

    bench.admission.changed()
    bench.before_schedule()
    assert len(bench.asked) == 3
    assert bench.line.decision is bench.answer


def test_one_that_was_held_in_the_queue_is_decided_about_as_soon_as_it_may_run() -> None:
    """However long the decision holds: there may be nothing else to end it."""
    bench = Bench()
    bench.answer = IDLE
    bench.add("parked", RunPhase.PARKED)
    record = bench.engine.records["parked"]
    record.hold(Hold.REST, bench.now_s)
    bench.before_schedule()
    bench.before_schedule()
    assert len(bench.asked) == 1

    record.release(Hold.REST, bench.now_s)
    bench.before_schedule()
    bench.before_schedule()
    assert len(bench.asked) == 2
    (seen,) = bench.asked[-1].requests
    assert seen.request_id == "parked"


def test_who_is_parked_is_told_to_the_engine_once_and_counted() -> None:
    bench = Bench()
    bench.add("a", RunPhase.RUNNING)
    bench.answer = RunDecision(run=(), park=frozenset({RequestId("a")}), valid_for_s=1.0)

    bench.before_schedule()
    bench.before_schedule()

    assert bench.engine.parked == ["a"]
    assert bench.engine.records["a"].num_parks == 1


def test_each_request_is_told_why_it_runs_or_waits_and_new_reasons_are_counted() -> None:
    bench = Bench()
    for name in ("a", "b", "c"):
        bench.add(name, RunPhase.RUNNING)
    a, b, c = map(RequestId, "abc")
    bench.answer = RunDecision(run=(a, b), park=frozenset({c}), reasons={a: Reason.DUE})
    new = [bench.before_schedule() for _ in range(3)]
    assert new == [[Reason.DUE, Reason.RUN, Reason.SENT], [], []]
    bench.answer = RunDecision(run=(a,))
    bench.engine.records["b"].hold(Hold.READER, 100.0)
    new = [bench.before_schedule()]

    assert [bench.engine.records[name].why for name in (a, b, c)] == [
        Reason.RUN,
        Reason.READER,  # a hold goes before what a policy says
        Reason.NOT_NAMED,
    ]
    assert new == [[Reason.RUN, Reason.NOT_NAMED]]  # a policy does not see a request that is held


def test_several_are_parked_in_the_same_order_in_every_process() -> None:
    bench = Bench()
    names = [f"r{number}" for number in range(20)]
    for name in names:
        bench.add(name, RunPhase.RUNNING)
    bench.answer = RunDecision(run=(), park=frozenset(map(RequestId, names)), valid_for_s=1.0)

    bench.before_schedule()

    assert bench.engine.parked == names


def test_the_placement_policy_is_asked_only_while_layers_leave() -> None:
    bench = Bench()
    bench.add("a", RunPhase.RUNNING)
    trunk = bench.engine.share("t", "a")
    bench.engine.records["a"].floor = trunk.floor = ALL_RESIDENT
    bench.before_schedule()
    assert not bench.admission.layers_leave
    assert bench.engine.records["a"].floor is None
    assert trunk.floor is None

    bench.answer = RunDecision(run=(), offloads=True)
    bench.admission.changed()
    bench.engine.records["a"].floor = ALL_RESIDENT
    bench.before_schedule()
    assert bench.admission.layers_leave
    assert bench.engine.records["a"].floor is ALL_RESIDENT


def test_a_policy_sees_readers_as_they_are() -> None:
    bench = Bench()
    reader = bench.add("paced", RunPhase.RUNNING, consumption_rate_tps=10.0)
    bench.add("unpaced", RunPhase.NEW)
    bench.ledger.scheduled(["paced"], 98.0)
    reader.generated(3, 99.9)  # due at 99.9, 100.0 and 100.1

    bench.before_schedule()

    paced, unpaced = bench.asked[0].requests
    assert abs(paced.slack_s - 0.2) < 1e-9
    assert abs(paced.rate_tps - 10.0) < 1e-9
    assert (paced.run_age_s, paced.arrival_age_s, paced.num_host_tokens) == (
        2.0,
        5.0,
        2 * BLOCK_SIZE,
    )
    assert (unpaced.rate_tps, unpaced.slack_s, unpaced.phase) == (0.0, float("inf"), RunPhase.NEW)
    assert bench.asked[0].h2d_queued_bytes == 7


def test_a_policy_sees_no_rate_and_no_slack_while_nobody_reads() -> None:
    bench = Bench()
    reader = bench.add("thinks", RunPhase.RUNNING, consumption_rate_tps=10.0)
    reader.turned(0, reads=False, now_s=90.0)
    bench.engine.requests["thinks"].num_output_tokens = 50
    reader.generated(50, 99.9)

    bench.before_schedule()
    reader.turned(40, reads=True, now_s=100.0)
    bench.admission.changed()
    bench.before_schedule()

    ((thinks,), (reads,)) = (snapshot.requests for snapshot in bench.asked)
    assert (thinks.rate_tps, thinks.spare_s) == (0.0, 0.0)
    assert (reads.rate_tps, reads.spare_s) == (pytest.approx(10.0), pytest.approx(0.9))


def test_of_a_long_queue_the_first_are_shown_and_nobody_else_is_left_out() -> None:
    bench = Bench()
    for number in range(40):
        bench.add(f"n{number}", RunPhase.NEW)
    bench.add("parked", RunPhase.PARKED)

    bench.before_schedule()

    names = [request.request_id for request in bench.asked[0].requests]
    assert names == [*(f"n{number}" for number in range(MAX_NEW)), "parked"]
    assert bench.engine.looked_up == names


def test_of_a_long_queue_the_oldest_is_shown_however_urgent_the_others_are() -> None:
    bench = Bench()
    for name in ("oldest", "old"):
        bench.add(name, RunPhase.NEW)
        bench.engine.records[name].priority = 1
    for number in range(40):
        bench.add(f"n{number}", RunPhase.NEW)

    bench.before_schedule()

    shown = bench.asked[0].requests
    assert [r.request_id for r in shown] == [*(f"n{n}" for n in range(MAX_NEW)), "oldest"]
    assert [(r.priority, r.waited_s) for r in (shown[0], shown[-1])] == [(0, 5.0), (1, 5.0)]


def test_the_queue_is_shown_by_priority_and_arrival_whatever_its_order() -> None:
    bench = Bench()
    for name in ("late", "early", "urgent"):
        bench.add(name, RunPhase.NEW)
    bench.engine.requests["early"].arrival_time = -1.0
    bench.engine.records["urgent"].priority = -1

    bench.before_schedule()

    assert [one.request_id for one in bench.asked[0].requests] == ["urgent", "early", "late"]


# -- fair shares -----------------------------------------------------------------------------------


def test_without_shares_a_policy_sees_no_fairness_ids() -> None:
    bench = Bench()
    bench.add("a", RunPhase.NEW)
    bench.engine.records["a"].fairness_id = "alice"

    bench.before_schedule()

    (seen,) = bench.asked[0].requests
    assert (seen.fairness_id, seen.attained, bench.asked[0].ahead_s) == ("", 0.0, 0.0)


def test_of_a_long_queue_newcomers_of_the_id_that_has_least_are_shown_within_a_priority() -> None:
    bench = Bench(FairShares(50.0))
    bench.add("runs", RunPhase.RUNNING)
    for number in range(40):
        bench.add(f"n{number}", RunPhase.NEW)
    for name in ("runs", *(f"n{number}" for number in range(38))):
        bench.engine.records[name].fairness_id = "much"
    bench.engine.records["runs"].kv.num_owned = 80  # ten rows of 8 groups
    bench.engine.records["n39"].priority = 1

    bench.before_schedule()

    seen = {one.request_id: one for one in bench.asked[0].requests}
    assert list(seen) == ["runs", *(f"n{n}" for n in range(MAX_NEW - 1)), "n38"]
    assert seen["runs"].attained == seen["n0"].attained == 10 * BLOCK_SIZE * 5.0
    assert (seen["n38"].fairness_id, seen["n38"].attained) == ("", 0.0)
    assert bench.asked[0].ahead_s == 5.0


def test_what_requests_share_is_held_by_each_in_part() -> None:
    shares = FairShares(50.0)
    bench = Bench(shares)
    for name in "abc":
        bench.add(name, RunPhase.RUNNING)
        bench.engine.records[name].fairness_id = name
        bench.engine.records[name].kv.num_owned = 8
    trunk = bench.engine.share("t", "a", "b")
    trunk.num_owned, trunk.users = 32, ("a", "b")
    bench.engine.records["c"].kv = None  # the engine's own blocks

    bench.before_schedule()
    shares.advance(bench.now_s + 1.0)

    held = 3.0 * BLOCK_SIZE
    assert shares.take() == {"a": held, "b": held, "c": 1_600.0}


@pytest.mark.parametrize(
    ("blocks_per_s", "step_s", "free_frac"),
    [
        (None, None, 1.0),  # nothing is measured
        (50.0, None, 0.0),
        (50.0, 0.4, 0.5),  # the loads take 0.2 s
        (50.0, 0.1, 0.0),  # steps wait for them
    ],
)
def test_policies_see_what_the_steps_loads_leave_of_the_link(
    blocks_per_s: float | None, step_s: float | None, free_frac: float
) -> None:
    bench = Bench()
    bench.engine.num_step_loads = 10
    rate = blocks_per_s and blocks_per_s * bench.engine.shape.block_bytes
    bench.admission._meter.rates = lambda: Rates(h2d_bytes_per_s=rate, step_s=step_s)

    bench.before_schedule()

    assert bench.asked[0].h2d_free_frac == pytest.approx(free_frac)


def test_a_request_that_leaves_is_shown_as_parked() -> None:
    bench = Bench()
    bench.add("a", RunPhase.RUNNING)
    bench.engine.records["a"].enter(State.LEAVING)

    bench.before_schedule()

    assert [one.phase for one in bench.asked[0].requests] == [RunPhase.PARKED]


@pytest.mark.parametrize(("policy", "decides"), [("orbitflow", False), ("evenflow", True)])
def test_vllms_own_order_needs_no_policy(policy: str, decides: bool) -> None:
    assert (run_policy_of(ControllerOptions(policy=policy)) is not None) == decides
