"""Which planner is asked for plans, as `Planning` sees it."""

from dataclasses import dataclass
from typing import Protocol

from services.control.plans.shadow import ShadowReport
from services.placement.types import Plan, Snapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanAnswer:
    """What came of one snapshot."""

    epoch: int  # of the snapshot
    plan: Plan | None = None
    failure: str = ""  # why there is no plan: status of gRPC, or "GARBAGE"; empty: none
    shadow: ShadowReport | None = None  # follows the plan in an answer of its own


class Planner(Protocol):
    """Where snapshots go and answers come from."""

    def post(self, snapshot: Snapshot) -> bool:
        """Hand over a snapshot; return whether an older one, not yet sent, was dropped for it."""

    def take(self) -> PlanAnswer | None:
        """Return the oldest answer not yet taken; None if there is none."""

    def close(self) -> None:
        """Stop; a call under way is cancelled. Idempotent."""
