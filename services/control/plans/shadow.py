"""What another policy would have gained: its plan against the one that acts, by one model."""

from dataclasses import dataclass

from services.placement.step_time.batch import placed_by, predicted_step_s
from services.placement.types import Plan, RequestPhase, Snapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class ShadowReport:
    """Predictions for the snapshot's decoding requests, paused ones left out."""

    policy: str  # whose plans do not act
    acting_step_s: float
    shadow_step_s: float
    acting_tps: float  # tokens per second
    shadow_tps: float

    @property
    def gain_frac(self) -> float:
        """Return how many more tokens per second the shadow would make, as a fraction."""
        return self.shadow_tps / self.acting_tps - 1.0 if self.acting_tps > 0.0 else 0.0


def compare(snapshot: Snapshot, acting: Plan, shadow: Plan) -> ShadowReport | None:
    """Compare two plans for one snapshot; None if it cannot be predicted or none decodes."""
    if snapshot.profile is None or snapshot.h2d is None:
        return None
    acting_step_s, num_acting = _step(snapshot, acting)
    shadow_step_s, num_shadow = _step(snapshot, shadow)
    if not num_acting or not num_shadow:
        return None
    return ShadowReport(
        policy=shadow.policy,
        acting_step_s=acting_step_s,
        shadow_step_s=shadow_step_s,
        acting_tps=num_acting / acting_step_s,
        shadow_tps=num_shadow / shadow_step_s,
    )


def _step(snapshot: Snapshot, plan: Plan) -> tuple[float, int]:
    """Return the predicted step and how many requests it serves."""
    placed = {placement.request_id: placement for placement in plan.placements}
    served = []
    for request in snapshot.requests:
        if request.phase not in (RequestPhase.DECODING, RequestPhase.PAUSED):
            continue
        placement = placed.get(request.request_id)
        paused = request.phase is RequestPhase.PAUSED if placement is None else placement.paused
        if not paused:
            served.append(request)
    if not served:
        return 0.0, 0
    return predicted_step_s(snapshot, placed_by(plan, snapshot, served)), len(served)
