"""`vllm`: every layer in the pool. Without blocks the engine preempts, and computes anew."""

from services.placement.step_time.batch import answer, members
from services.placement.step_time.patterns import RESIDENT
from services.placement.types import Plan, PlanStatus, Snapshot


def all_resident(snapshot: Snapshot) -> Plan:
    """Keep everything resident, and pause no request whose reader reads.

    Always optimal: the policy has one answer.
    """
    return Plan(
        epoch=snapshot.epoch,
        policy=snapshot.policy,
        status=PlanStatus.OPTIMAL,
        placements=answer(snapshot, {r.request_id: RESIDENT for r in members(snapshot)}, ()),
    )
