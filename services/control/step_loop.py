"""The closed loop, once per engine step: measure, decide, ask on triggers, carry out what has come.

Its scheduler calls it around each step and tells it what happens to requests. The loop has two
parts that do not know each other: `Planning` says where layers live, by the planner's plans,
`Admission` says which requests run, by the run policy.
"""

from typing import Any

from services.control.admission import Admission
from services.control.measures.step_timing import StepTiming
from services.control.options import ControllerOptions
from services.control.order.fair_shares import FairShares
from services.control.order.run_order import RunOrder
from services.control.planning import Planning
from services.control.plans.counts import ControllerCounts
from services.control.plans.planner import Planner
from services.control.requests.request_ledger import RequestLedger
from services.control.step_meter import StepMeter
from services.control.types import ScheduledStep, Trigger
from services.kit.clock import Clock
from services.placement.presets import Run

# Which requests run has changed, or what they do.
OF_THE_BATCH = frozenset(
    {Trigger.ADMITTED, Trigger.PREFILLED, Trigger.PREEMPTED, Trigger.FINISHED, Trigger.ABORTED}
)


class StepLoop:
    """One engine's loop, from its first step to its last."""

    def __init__(
        self,
        options: ControllerOptions,
        order: RunOrder[Any, Any],
        planner: Planner | None,
        policy: Run | None,
        now_s: Clock,
    ) -> None:
        """`policy` None: the queue is the engine's own."""
        engine = order.engine
        order.obey(None)  # until the policy decides
        self.counts = ControllerCounts()
        self.ledger = RequestLedger(engine.records)
        self.meter = StepMeter(
            engine, self.ledger, self.counts, mismatch_frac=options.mismatch_frac
        )
        self.planning = Planning(options, engine, planner, self.ledger, self.counts)
        self.admission: Admission[Any, Any] | None = None
        self.shares: FairShares | None = None  # of fairness ids; None: they have none
        if policy is not None:
            if options.fairness_half_life_s:
                self.shares = FairShares(options.fairness_half_life_s)
            self.admission = Admission(policy, order, self.ledger, self.meter, self.shares)
        self.begun_s = 0.0  # of the newest step: the scheduler's turn
        self._now_s = now_s
        self._was_ready = False
        self._own_s = 0.0  # spent here since the last step ended

    # -- each step ---------------------------------------------------------------------------

    def before_schedule(self) -> None:
        """Carry out the plans that came; decide which requests run, if it is time to."""
        called_s = self._now_s()
        self.planning.before_schedule(called_s)
        if self.admission is not None:
            self._decide(self.admission)
        self.begun_s = self._now_s()
        self._own_s += self.begun_s - called_s

    def _decide(self, admission: Admission[Any, Any]) -> None:
        left = admission.layers_leave
        for reason in admission.before_schedule(self._now_s()):
            self.counts.reasons[reason.value] += 1
        if admission.layers_leave and not left:
            self.note(Trigger.LAYERS_LEAVE)

    def after_schedule(self, step: ScheduledStep, since_s: float) -> None:
        """Predict the step, and ask for a plan while it runs if there is a reason to.

        `since_s`: from which on the time is the loop's own.
        """
        self.ledger.scheduled(step.request_ids, step.scheduled_s)
        self.planning.after_schedule(step, since_s)
        if self.planning.has_reason and self.meter.profile.is_ready:
            self._ask()
        self.meter.scheduled(step)
        self._own_s += self._now_s() - since_s

    def _ask(self) -> None:
        reference = self.meter.take_reference()
        if reference is not None:
            layers_leave = self.admission is None or self.admission.layers_leave
            self.planning.ask(*reference, self._now_s(), layers_leave=layers_leave)

    def after_update(self, timing: StepTiming | None, *, busy: bool) -> None:
        """Take in how the oldest step in flight went. `busy`: another step follows at once."""
        begin_s = self._now_s()
        self.counts.decoded(self.ledger.step_ended(begin_s))
        reading = self.meter.ended(timing, begin_s, busy=busy)
        if reading.mismatch:
            self.note(Trigger.MISMATCH)
        if self.meter.profile.is_ready and not self._was_ready:
            self._was_ready = True
            self.note(Trigger.CALIBRATED)
        if self.shares is not None:
            self._attain(self.shares, begin_s)
        own_s, self._own_s = self._own_s + self._now_s() - begin_s, 0.0
        self.counts.stepped(step_s=reading.step_s, own_s=own_s)

    def _attain(self, shares: FairShares, now_s: float) -> None:
        """Let fairness ids attain what they have held."""
        shares.advance(now_s)
        if not self.ledger.records:
            shares.hold({}, now_s)
        self.counts.attained(shares.take(), jain_index=shares.jain_index)

    # -- requests ----------------------------------------------------------------------------

    def note(self, *triggers: Trigger) -> None:
        """Take in what happened to requests, each a reason to ask."""
        self.planning.note(*triggers)
        if not OF_THE_BATCH.isdisjoint(triggers):
            self.changed()

    def changed(self) -> None:
        """Have the run policy asked before the next step."""
        if self.admission is not None:
            self.admission.changed()

    def ended(self, *, num_output_tokens: int | None) -> None:
        """Take in that a request ends; `num_output_tokens`: None if it was aborted."""
        now_s = self._now_s()
        self.ledger.ended(now_s, num_output_tokens=num_output_tokens)
        if self.shares is not None:
            self.shares.suspend(now_s)  # no step may follow for long
        self.note(Trigger.ABORTED if num_output_tokens is None else Trigger.FINISHED)

    def close(self) -> None:
        """End the planner client's thread."""
        self.planning.close()
