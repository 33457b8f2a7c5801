"""A log of run decisions holds all that makes the same decisions again."""

import json
from pathlib import Path

from hypothesis import given, settings

from services.control.options import ControllerOptions
from services.control.run_log import RunLog, replay
from services.placement.run import evenflow
from services.placement.run.papers.ellm import EllmRules
from services.placement.run.papers.tokenflow import TokenflowRules
from services.placement.run.types import RunSnapshot
from tests.fuzz import examples
from tests.policies import DECIDING
from tests.unit.placement.run.snapshots import ask, make_snapshot, runs, snapshots

RULES = EllmRules(uncached_frac=0.1)


def options(path: Path, policy: str) -> ControllerOptions:
    rules = TokenflowRules(interval_s=0.2)
    return ControllerOptions(policy=policy, run_log=str(path), ellm=RULES, tokenflow=rules)


@settings(max_examples=examples(20))
@given(snapshots(largest=3_000))
def test_what_any_policy_decides_is_decided_again(tmp_path_factory, snapshot: RunSnapshot) -> None:
    path = tmp_path_factory.mktemp("log") / "decisions.jsonl"
    for policy in DECIDING:
        given = options(path, policy)
        assert given.run is not None
        RunLog(given).append(snapshot, given.run(snapshot))

    assert len(path.read_text().splitlines()) == len(DECIDING)
    assert replay(path) == []


def test_another_decision_is_found_by_its_line(tmp_path) -> None:
    path = tmp_path / "decisions.jsonl"
    log = RunLog(options(path, "evenflow"))
    snapshot = make_snapshot(runs("a", 300, rate_tps=5.0), ask("b", 100))
    for _ in range(3):
        log.append(snapshot, evenflow.decide(snapshot))
    lines = path.read_text().splitlines()
    changed = json.loads(lines[1])
    changed["decision"]["run"].reverse()
    path.write_text("\n".join([lines[0], json.dumps(changed), lines[2]]) + "\n")

    assert replay(path) == [2]
