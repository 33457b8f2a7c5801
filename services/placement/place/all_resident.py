"""`vllm`: every layer in the pool. Without blocks the engine preempts, and computes anew."""

from services.placement.step_time.batch import answer, holders_of, members
from services.placement.step_time.patterns import RESIDENT
from services.placement.types import Plan, PlanStatus, Snapshot


def all_resident(snapshot: Snapshot) -> Plan:
    """Keep everything resident, and pause no request whose reader reads.

    Always optimal: the policy has one answer.
    """
    holders = holders_of(snapshot, members(snapshot))
    patterns = {one.holder_id: RESIDENT for one in holders}
    return answer(snapshot, PlanStatus.OPTIMAL, patterns, ())
