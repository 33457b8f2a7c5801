"""The closed loop, once per engine step: measure, ask on triggers, carry out what has come.

Nothing here waits: a step without a trigger costs some additions, a step with one a snapshot.
"""

from typing import Protocol

from services.control.measures.step_timing import StepTiming
from services.control.options import ControllerOptions
from services.control.plans.counts import ControllerCounts
from services.control.plans.plan_keeper import PlanKeeper
from services.control.plans.planner import Answer, Planner
from services.control.requests.request_ledger import RequestLedger
from services.control.seam import EngineSeam, ScheduledStep
from services.control.step_meter import StepMeter
from services.control.types import Trigger
from services.kit.clock import Clock
from services.placement.presets import preset_of
from services.placement.types import Replan

# Who runs has changed, or what those who run do.
OF_THE_BATCH = frozenset(
    {Trigger.ADMITTED, Trigger.PREFILLED, Trigger.PREEMPTED, Trigger.FINISHED, Trigger.ABORTED}
)
NOT_OF_THE_BATCH = frozenset({Trigger.WINDOW_END, Trigger.MISMATCH})


def asks(trigger: Trigger, replan: Replan) -> bool:
    """Return whether a policy wants to be asked for this reason."""
    if replan is Replan.NEVER:
        return False
    return replan is not Replan.BATCH_CHANGE or trigger not in NOT_OF_THE_BATCH


class Director(Protocol):
    """Who decides who runs, as the controller sees it."""

    @property
    def wants_layers_away(self) -> bool:
        """Return whether the planner is to be asked."""

    def changed(self) -> None:
        """Take in that the batch has changed."""


class Controller:
    """One engine's loop. `planner` None: nobody is asked, the guard acts alone."""

    def __init__(
        self,
        options: ControllerOptions,
        engine: EngineSeam,
        planner: Planner | None,
        ledger: RequestLedger,
        now_s: Clock,
    ) -> None:
        self.options = options
        self.counts = ControllerCounts()
        self.ledger = ledger
        self.meter = StepMeter(engine, self.counts, mismatch_frac=options.mismatch_frac)
        self._plans = PlanKeeper(options, engine, self.ledger, self.counts)
        self._engine, self._planner, self._now_s = engine, planner, now_s
        self._replan = preset_of(options.policy).placing.replan
        self._triggers: list[Trigger] = []  # not yet asked about
        self._epoch = 0
        self._step = 0
        self._retry_at_s: float | None = None
        self._was_ready = False
        self.lacks_plan = False  # the planner's last answer was none, or none that holds
        self.director: Director | None = None  # None: no run policy
        self._own_s = 0.0  # spent here since the last step ended

    def note(self, *triggers: Trigger) -> None:
        """Remember that the planner must be asked; the question is put after the next schedule."""
        for trigger in triggers:
            self.counts.triggered(trigger)
            if self.director is not None and trigger in OF_THE_BATCH:
                self.director.changed()
            if asks(trigger, self._replan):
                self._triggers.append(trigger)

    def spent(self, seconds: float) -> None:
        """Add to the loop's own part of the present step, on the engine's thread."""
        self._own_s += seconds

    def before_schedule(self) -> None:
        """Carry out what has come, and end pauses that nobody else ends."""
        begin_s = self._now_s()
        self.note(*self._plans.look_after_readers(begin_s))
        if self._planner is not None:
            while (answer := self._planner.take()) is not None:
                self._take(answer, begin_s)
        self.note(*self._plans.fall_back(self._step, begin_s))
        self.note(*self._plans.look_after_pauses(begin_s))

    def _take(self, answer: Answer, now_s: float) -> None:
        if answer.failure:
            self.counts.failed(answer.failure)
            self._retry_at_s = now_s + self.options.retry_s
            self.lacks_plan = True
        if answer.shadow is not None:
            self.counts.shadowed(answer.shadow)
        if answer.plan is not None:
            self.note(*self._plans.came(answer.epoch, answer.plan, step=self._step, now_s=now_s))
            self.lacks_plan = answer.epoch > self._plans.last_applied_epoch
            self._retry_at_s = now_s + self.options.retry_s if self.lacks_plan else None

    def after_schedule(self, step: ScheduledStep) -> None:
        """Predict the step's length, and ask while it runs if there is a reason to."""
        begin_s = self._now_s()
        if step.num_tokens:
            self._step += 1
            self.note(*self._plans.due(self._step))
            if self._replan is Replan.EVERY_STEP:
                self._triggers.append(Trigger.STEP)
        if self._retry_at_s is not None and begin_s >= self._retry_at_s:
            self._retry_at_s = None
            self.note(Trigger.RETRY)
        if self._triggers and self.meter.profile.is_ready:
            self._ask(begin_s)
        self.meter.scheduled(step)

    def _ask(self, now_s: float) -> None:
        reference = self.meter.take_reference()
        if reference is None:
            return
        self._triggers.clear()
        layers_stay = self.director is not None and not self.director.wants_layers_away
        if self._planner is None or layers_stay:
            return
        profile, links = reference
        self._epoch += 1
        snapshot = self._engine.snapshot(epoch=self._epoch, profile=profile, links=links)
        self._plans.asked(snapshot, step=self._step, now_s=now_s)
        for request in snapshot.requests:
            record = self.ledger.records[request.request_id]
            record.num_deposited_tokens = request.num_deposited_tokens
        self.counts.asked(dropped=self._planner.post(snapshot))

    def after_update(self, timing: StepTiming | None, *, busy: bool) -> None:
        """Take in how the oldest step in flight went. `busy`: another step follows at once."""
        begin_s = self._now_s()
        self.ledger.step_ended(begin_s)
        reading = self.meter.ended(timing, begin_s, busy=busy)
        if reading.mismatch:
            self.note(Trigger.MISMATCH)
        if self.meter.profile.is_ready and not self._was_ready:
            self._was_ready = True
            self.note(Trigger.CALIBRATED)
        own_s, self._own_s = self._own_s + self._now_s() - begin_s, 0.0
        self.counts.stepped(step_s=reading.step_s, own_s=own_s)

    def close(self) -> None:
        """End the planner client's thread."""
        if self._planner is not None:
            self._planner.close()
