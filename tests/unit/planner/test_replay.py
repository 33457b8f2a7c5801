"""The decision log holds all that makes the same plan again."""

import itertools
import json
from functools import partial
from pathlib import Path

import pytest

from evenflow.planner.v1 import planner_pb2 as pb
from lab.planning.protos import make_engine, make_plan_request, make_prefix, make_request
from lab.policies.presets import full_name
from services.planner import convert
from services.planner.decision_log import DecisionLog, entry_of, line_of
from services.planner.policy.orbitflow import OrbitFlow
from services.planner.policy.policies import make_plan
from services.planner.replay import replay
from services.planner.solver.budget import DeadlineBudget
from services.planner.solver.solver import warm_solver

pytestmark = pytest.mark.timeout(3_600)  # the first run compiles the kernels

OPTIMISER = OrbitFlow(warm_solver)
HEURISTIC = full_name("dynamic-heuristic")


def decided(num_requests: int, num_looks: int, **overrides) -> tuple[pb.Snapshot, pb.Plan]:
    """Return a snapshot of a crowded engine and its plan, under a clock that its looks advance."""
    requests = [
        make_request(
            request_id=f"r{i}",
            num_prompt_tokens=1_000 + 371 * i,
            num_computed_tokens=1_000 + 371 * i,
            slo_tbt_s=0.05 if i % 2 else None,
            num_host_blocks=[(1_000 + 371 * i) // 16] * 16,
            prefix_ids=["t"] if i % 3 == 1 else [],
        )
        for i in range(num_requests)
    ]
    blocks = sum((1_000 + 371 * i) // 16 for i in range(num_requests)) * 9
    request = make_plan_request(
        engine=make_engine(num_layers=16, num_blocks=10**6),
        requests=requests,
        prefixes=[make_prefix(num_tokens=640, num_host_blocks=[40] * 16)],
        num_free_blocks=blocks,
        **overrides,
    )
    budget = DeadlineBudget(partial(next, itertools.count()), num_looks)
    plan = make_plan(convert.snapshot_from_proto(request, [HEURISTIC]), budget, OPTIMISER)
    return request.snapshot, convert.plan_to_proto(plan)


def test_plans_made_under_a_deadline_are_reproduced_from_their_nodes(tmp_path, capsys) -> None:
    path = tmp_path / "decisions.jsonl"
    log = DecisionLog(path)
    searched = set()
    for num_requests in (1, 3, 5, 9, 14):
        for num_looks in (0, 3, 40):
            entry = decided(num_requests, num_looks, seed=num_requests)
            searched.add(entry[1].quality.num_nodes > 0)
            log.append(*entry)
    log.append(*decided(3, 5, policy=HEURISTIC))
    log.close()

    assert replay(path, OPTIMISER, [HEURISTIC]) == 0
    assert capsys.readouterr().out.count("reproduced") == 16
    assert searched == {True, False}


@pytest.mark.parametrize("spoil", ["status", "objective", "placement", "prefix"])
def test_a_plan_that_was_not_made_like_this_is_told(tmp_path: Path, capsys, spoil) -> None:
    snapshot, plan = decided(3, 5)
    if spoil == "status":
        plan.status = pb.PLAN_STATUS_UNDECIDED
    elif spoil == "objective":
        plan.quality.objective_s *= 1 + 1e-8
    elif spoil == "placement":
        plan.placements[0].paused = True
    else:
        plan.prefixes[0].num_prefetch_buffers += 1
    path = tmp_path / "decisions.jsonl"
    path.write_text(line_of(snapshot, plan) + "\n")

    assert replay(path, OPTIMISER) == 1
    assert spoil.replace("prefix", "placement") in capsys.readouterr().out


def test_a_line_survives_the_round_trip_and_is_json() -> None:
    entry = decided(2, 5)

    assert entry_of(line_of(*entry)) == entry
    assert set(json.loads(line_of(*entry))) == {"snapshot", "plan"}


@pytest.mark.parametrize("line", ["", "{}", "[]", '{"snapshot": {"epoch": "x"}, "plan": {}}'])
def test_anything_else_is_not_a_decision(line) -> None:
    with pytest.raises(ValueError, match="not a decision"):
        entry_of(line)
