"""`bench.planner.decisions`: its crowds are what a policy can be asked about."""

from collections import Counter

import pytest

from bench.planner.decisions import CROWDS, Crowd, admission_for
from services.placement.run.types import RunPhase


@pytest.mark.parametrize("crowd", CROWDS, ids=lambda crowd: crowd.name)
def test_every_crowd_is_decided_on(crowd: Crowd) -> None:
    admission = admission_for(crowd, "evenflow", seed=0)

    admission.before_schedule(0.0)

    snapshot = admission.snapshot(0.0)
    phases = Counter(request.phase for request in snapshot.requests)
    assert phases[RunPhase.RUNNING] == 32
    assert phases[RunPhase.PARKED] == crowd.num_parked
    assert bool(phases[RunPhase.NEW]) == bool(crowd.num_waiting)
    assert snapshot.costs is not None
