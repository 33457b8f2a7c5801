"""When the policy is asked, and what becomes of its plans: the rules of the closed loop.

Nothing waits for a plan: it answers the snapshot of an earlier step and is carried out before a
later one. One question is under way at a time.
"""

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from statistics import median
from typing import TypeAlias

from services.placement.plan_rules import LiveRequest, Moment, Question, Verdict, judge
from services.placement.presets import PRESETS, REPLAN, PlacementPolicy, Replan
from services.placement.types import EngineShape, Plan, PolicyParameters, Snapshot

Policy: TypeAlias = Callable[[Snapshot], Plan]

NUM_MISMATCH_STEPS = 8  # whose median counts
RETRY_S = 1.0  # from a refused plan to the next question, if there is no other reason


class Reason(Enum):
    """Why the policy is asked."""

    BATCH = "batch"  # somebody joined, began to decode, left, resumed, may resume, was mirrored
    WINDOW = "window"  # the plan has held as long as it was meant to
    EXPIRED = "expired"  # the plan breaks the pool or the SLO from here on
    MISMATCH = "mismatch"  # steps take another time than predicted
    STEP = "step"  # the policy decides every step
    RETRY = "retry"  # a while after a plan was refused


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanningOptions:
    """Who decides, and how late."""

    policy: str  # a preset
    parameters: PolicyParameters = field(default_factory=PolicyParameters)
    seed: int = 0
    plan_latency_s: float = 0.005  # from the snapshot to the plan, >= 0
    report_interval_s: float = 0.0  # of what readers have, see `reader_reports`; 0: known at once
    mismatch_frac: float = 0.15  # of the predicted step that a measured one may differ; 0: any

    @property
    def placement_policy(self) -> PlacementPolicy:
        axis = self.parameters.placement_policy
        return PlacementPolicy(axis) if axis else PRESETS[self.policy].placement

    @property
    def replan(self) -> Replan:
        """When the policy is asked: never where the scheduler's guard is the policy."""
        if self.placement_policy is PlacementPolicy.DYNAMIC_HEURISTIC:
            return Replan.NEVER
        return REPLAN[self.placement_policy]


@dataclass(slots=True, kw_only=True)
class PlanCounts:
    """What became of questions."""

    asked: int = 0
    applied: int = 0
    refused: dict[str, int] = field(default_factory=dict)  # by the rule that it broke
    reasons: dict[str, int] = field(default_factory=dict)


class Planning:
    """Reasons to ask, the question under way, and the plan in force."""

    def __init__(self, options: PlanningOptions, shape: EngineShape) -> None:
        self.options = options
        self._shape = shape
        self.counts = PlanCounts()
        self.epoch = 0
        self.waiting_for_plan = False
        self._reasons: list[Reason] = []
        self._question: Question | None = None
        self._last_applied_epoch = 0
        self._asked_step = 0  # before the snapshot of the plan in force
        self._plan: Plan | None = None  # in force
        self._due: set[Reason] = set()  # reasons that the plan in force has given
        self._ratios: deque[float] = deque(maxlen=NUM_MISMATCH_STEPS)
        self._retry_at_s = math.inf

    def note(self, reason: Reason) -> None:
        """Remember a reason if the policy listens to it."""
        replan = self.options.replan
        if replan is Replan.NEVER:
            return
        deaf = replan is Replan.BATCH_CHANGE and reason in (Reason.WINDOW, Reason.MISMATCH)
        if not deaf:
            self.counts.reasons[reason.value] = self.counts.reasons.get(reason.value, 0) + 1
            self._reasons.append(reason)

    def wants_to_ask(self, step: int, now_s: float) -> bool:
        """Return whether to ask during `step`; looks at the plan in force, too."""
        if now_s >= self._retry_at_s:
            self._retry_at_s = math.inf
            self.note(Reason.RETRY)
        if self.options.replan is Replan.EVERY_STEP:
            self.note(Reason.STEP)
        quality = self._plan.quality if self._plan else None
        if quality is not None:
            # The window's end comes a step early, so that the next plan is there in time.
            self._note_once(Reason.WINDOW, step - self._asked_step >= quality.window - 1)
            self._note_once(Reason.EXPIRED, step - self._asked_step >= quality.expires_after)
        return bool(self._reasons) and not self.waiting_for_plan

    def _note_once(self, reason: Reason, due: bool) -> None:
        if due and reason not in self._due:
            self._due.add(reason)
            self.note(reason)

    def asked(self, snapshot: Snapshot, *, step: int, now_s: float) -> None:
        """Begin a question."""
        self._reasons.clear()
        self._question = Question.of(snapshot, step=step, posted_s=now_s)
        self.epoch = snapshot.epoch
        self.counts.asked += 1
        self.waiting_for_plan = True

    def judge(self, plan: Plan, live: Sequence[LiveRequest], *, step: int, now_s: float) -> bool:
        """Return whether a plan that has come is to be carried out; then it is in force."""
        self.waiting_for_plan, self._retry_at_s = False, now_s + RETRY_S
        now = Moment(
            step=step,
            last_applied_epoch=self._last_applied_epoch,
            live=live,
            engine=self._shape,
        )
        verdict = judge(plan, self._question, now)
        if verdict is not Verdict.APPLIED or self._question is None:
            self.counts.refused[verdict.value] = self.counts.refused.get(verdict.value, 0) + 1
            return False
        self._retry_at_s = math.inf
        self._last_applied_epoch = plan.epoch
        self._plan, self._asked_step = plan, self._question.step
        self._due.clear()
        self._ratios.clear()
        self.counts.applied += 1
        return True

    def batch_changed(self) -> None:
        """Forget measured steps: they were of another batch."""
        self._ratios.clear()

    def measured(self, step_s: float, *, step: int) -> None:
        """Compare a decode step with what the plan in force predicts for it."""
        quality = self._plan.quality if self._plan else None
        if quality is None or not self.options.mismatch_frac:
            return
        share = min(1.0, (step - self._asked_step) / max(1, quality.window - 1))
        predicted_s = quality.first_latency_s
        predicted_s += share * (quality.latency_s - quality.first_latency_s)
        if predicted_s <= 0.0:
            return
        self._ratios.append(step_s / predicted_s)
        if len(self._ratios) == NUM_MISMATCH_STEPS:
            far = abs(median(self._ratios) - 1.0) > self.options.mismatch_frac
            self._note_once(Reason.MISMATCH, far)
