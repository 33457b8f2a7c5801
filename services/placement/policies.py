"""Policies by name: each decides one snapshot, from nothing else."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TypeAlias

from services.placement.types import Placement, Plan, PlanStatus, Snapshot

Policy: TypeAlias = Callable[[Snapshot], Plan]


def all_resident(snapshot: Snapshot) -> Plan:
    """Keep everything resident and pause nobody (`vllm`).

    Always optimal: the policy has one answer. The engine preempts and recomputes when it runs out
    of blocks.
    """
    return Plan(
        epoch=snapshot.epoch,
        policy=snapshot.policy,
        status=PlanStatus.OPTIMAL,
        placements=tuple(Placement(request_id=r.request_id) for r in snapshot.requests),
    )


POLICIES: Mapping[str, Policy] = MappingProxyType({"vllm": all_resident})
