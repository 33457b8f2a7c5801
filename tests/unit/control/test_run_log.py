"""A log of run decisions holds all that makes the same decisions again."""

import json
from itertools import product

from hypothesis import given, settings

from services.control.run_log import RunLog, replay
from services.control.run_policies import POLICIES, policy_of
from services.placement.presets import AdmissionPolicy, PlacementPolicy, Preset, RunPolicy
from services.placement.run.papers.ellm import EllmRules
from services.placement.run.types import RunSnapshot
from tests.fuzz import examples
from tests.unit.placement.run.snapshots import ask, make_snapshot, runs, snapshots

RULES = EllmRules(uncached_frac=0.1)


@settings(max_examples=examples(20))
@given(snapshots(largest=3_000))
def test_what_any_policy_decides_is_decided_again(tmp_path_factory, snapshot: RunSnapshot) -> None:
    path = tmp_path_factory.mktemp("log") / "decisions.jsonl"
    num_decisions = 0
    for run, admission in product(RunPolicy, AdmissionPolicy):
        policy = policy_of(run, admission, ellm=RULES)
        if policy is None:
            assert (run, admission) == (RunPolicy.FCFS, AdmissionPolicy.FCFS)
            continue
        preset = Preset(placement=PlacementPolicy.ALL_RESIDENT, run=run, admission=admission)
        RunLog(path, preset, RULES).append(snapshot, policy(snapshot))
        num_decisions += 1

    assert num_decisions == 2 * (len(POLICIES) + 1) + 1  # and ellm, by its rules
    assert len(path.read_text().splitlines()) == num_decisions
    assert replay(path) == []


def test_another_decision_is_found_by_its_line(tmp_path) -> None:
    path = tmp_path / "decisions.jsonl"
    preset = Preset(placement=PlacementPolicy.ALL_RESIDENT, run=RunPolicy.EVENFLOW)
    log = RunLog(path, preset, RULES)
    snapshot = make_snapshot(runs("a", 300, rate_tps=5.0), ask("b", 100))
    for _ in range(3):
        log.append(snapshot, POLICIES[RunPolicy.EVENFLOW](snapshot))
    lines = path.read_text().splitlines()
    changed = json.loads(lines[1])
    changed["decision"]["run"].reverse()
    path.write_text("\n".join([lines[0], json.dumps(changed), lines[2]]) + "\n")

    assert replay(path) == [2]
