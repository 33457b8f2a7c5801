"""The placement policies that need no solver: each decides one snapshot, from nothing else."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TypeAlias

from services.placement.place.dynamic_heuristic import dynamic_heuristic
from services.placement.place.layerkv import layerkv
from services.placement.place.uniform import (
    batch_uniform,
    deepspeed,
    flexgen,
    flexgen_plus,
    slo_aware,
)
from services.placement.presets import PlacementPolicy
from services.placement.step_time.batch import answer, members
from services.placement.step_time.patterns import RESIDENT
from services.placement.types import Plan, PlanStatus, Snapshot

Policy: TypeAlias = Callable[[Snapshot], Plan]


def all_resident(snapshot: Snapshot) -> Plan:
    """Keep everything resident and pause nobody who reads (`vllm`).

    Always optimal: the policy has one answer. The engine preempts and recomputes when it runs out
    of blocks.
    """
    return Plan(
        epoch=snapshot.epoch,
        policy=snapshot.policy,
        status=PlanStatus.OPTIMAL,
        placements=answer(snapshot, {r.request_id: RESIDENT for r in members(snapshot)}, ()),
    )


POLICIES: Mapping[PlacementPolicy, Policy] = MappingProxyType(
    {
        PlacementPolicy.ALL_RESIDENT: all_resident,
        PlacementPolicy.BATCH_UNIFORM: batch_uniform,
        PlacementPolicy.DEEPSPEED: deepspeed,
        PlacementPolicy.FLEXGEN: flexgen,
        PlacementPolicy.FLEXGEN_PLUS: flexgen_plus,
        PlacementPolicy.SLO_AWARE: slo_aware,
        PlacementPolicy.DYNAMIC_HEURISTIC: dynamic_heuristic,
        PlacementPolicy.LAYERKV: layerkv,
    }
)

# Fields of a snapshot that a placement policy cannot do without, beside the required ones.
NEEDED_FIELDS: Mapping[PlacementPolicy, tuple[str, ...]] = MappingProxyType(
    {
        PlacementPolicy.OPTIMISER: ("profile", "h2d"),
        PlacementPolicy.BATCH_UNIFORM: ("profile", "h2d"),
        PlacementPolicy.FLEXGEN: ("profile", "h2d"),
        PlacementPolicy.FLEXGEN_PLUS: ("profile", "h2d"),
        PlacementPolicy.SLO_AWARE: ("profile", "h2d"),
        PlacementPolicy.LAYERKV: ("profile", "h2d", "d2h"),
    }
)
