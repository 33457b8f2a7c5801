"""From a snapshot to a plan: by the policy's rule, or by the solver."""

from services.placement.judging.rating import rated
from services.placement.presets import preset_of, resolved
from services.placement.types import Plan, Snapshot
from services.planner.policy.orbitflow import OrbitFlow
from services.planner.solver.budget import Budget


def needs_solver(snapshot: Snapshot) -> bool:
    return preset_of(snapshot.policy).placing.rule is None


def make_plan(snapshot: Snapshot, budget: Budget, optimiser: OrbitFlow) -> Plan:
    """Return the plan of the snapshot's policy. The same snapshot and nodes give the same plan."""
    preset, complete = resolved(snapshot)
    if preset.placing.rule is None:
        return optimiser(complete, budget)
    return rated(preset.placing.rule(complete), complete, preset.placing.replan)
