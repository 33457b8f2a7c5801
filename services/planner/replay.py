"""`python -m services.planner replay FILE`: make logged plans again and compare.

A plan is reproduced if its status, its placements and its objective to 1e-9 are the same. Policies
beside the presets are those that the planner's settings name.
"""

import math
from collections.abc import Collection
from pathlib import Path

from evenflow.planner.v1 import planner_pb2 as pb
from services.planner import convert
from services.planner.decision_log import entry_of
from services.planner.policy.orbitflow import OrbitFlow
from services.planner.policy.policies import make_plan
from services.planner.solver.budget import NodeBudget

TOLERANCE = 1e-9  # relative


def replay(path: Path, optimiser: OrbitFlow, policies: Collection[str] = ()) -> int:
    """Print one line per logged plan. Returns how many were not reproduced."""
    num_different = 0
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            problem = difference(line, optimiser, policies)
            num_different += problem is not None
            print(f"{path}:{number}: {problem or 'reproduced'}")
    return num_different


def difference(line: str, optimiser: OrbitFlow, policies: Collection[str] = ()) -> str | None:
    """Return what is different when the plan of a line is made again, None for nothing."""
    snapshot, logged = entry_of(line)
    domain = convert.snapshot_from_proto(pb.PlanRequest(snapshot=snapshot), policies)
    budget = NodeBudget(logged.quality.num_nodes)
    again = convert.plan_to_proto(make_plan(domain, budget, optimiser))
    if again.status != logged.status:
        return f"status {_name(again.status)} instead of {_name(logged.status)}"
    new, old = again.quality.objective_s, logged.quality.objective_s
    if not math.isclose(new, old, rel_tol=TOLERANCE, abs_tol=0.0):
        return f"objective {new} s instead of {old} s"
    if again.placements != logged.placements or again.prefixes != logged.prefixes:
        return "other placements at the same objective"
    return None


def _name(status: pb.PlanStatus.ValueType) -> str:
    return pb.PlanStatus.Name(status)
