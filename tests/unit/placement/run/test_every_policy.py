"""Laws of every run policy, over random engines."""

import pytest
from hypothesis import given, settings

from services.placement.run.papers import fcfs
from services.placement.run.types import RunSnapshot
from tests.fuzz import examples
from tests.policies import DECIDING
from tests.unit.placement.run.snapshots import ask, make_snapshot, snapshots

EVERY = {**DECIDING, "streams": fcfs.streams}
pytestmark = pytest.mark.parametrize("decide", EVERY.values(), ids=EVERY.keys())


@settings(max_examples=examples(50))
@given(snapshot=snapshots(largest=3_000))
def test_somebody_runs_nobody_is_lost_and_the_snapshot_is_all_that_counts(
    decide, snapshot: RunSnapshot
) -> None:
    decision = decide(snapshot)
    running = {request.request_id for request in snapshot.requests if request.runs}

    assert decision.run
    assert len(set(decision.run)) == len(decision.run)
    assert not decision.park & set(decision.run)
    assert decision.park <= running
    assert running <= decision.park | set(decision.run)
    assert decide(snapshot) == decision


def test_an_empty_engine_lets_somebody_in(decide) -> None:
    assert decide(make_snapshot(ask("a", 100, rate_tps=20.0))).run == ("a",)


def test_nobody_is_let_into_an_engine_without_requests(decide) -> None:
    assert decide(make_snapshot()).run == ()
