"""From a snapshot to a plan: the preset's placement policy, with the solver where it needs one."""

from services.placement.judging.rating import rated
from services.placement.policies import POLICIES
from services.placement.presets import PlacementPolicy, resolved
from services.placement.types import Plan, Snapshot
from services.planner.policy.orbitflow import OrbitFlow
from services.planner.solver.budget import Budget


def needs_solver(snapshot: Snapshot) -> bool:
    preset, _ = resolved(snapshot)
    return preset.placement is PlacementPolicy.OPTIMISER


def make_plan(snapshot: Snapshot, budget: Budget, optimiser: OrbitFlow) -> Plan:
    """Return the plan of the snapshot's policy. The same snapshot and nodes give the same plan."""
    preset, complete = resolved(snapshot)
    if preset.placement is PlacementPolicy.OPTIMISER:
        return optimiser(complete, budget)
    return rated(POLICIES[preset.placement](complete), complete, preset.placement)
