"""Measures steps, and compares each with what was predicted for its very composition."""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from services.control.engine import Engine
from services.control.measures.link_rate import LinkRate
from services.control.measures.prediction import MismatchDetector, predicted_step_s
from services.control.measures.profile import OnlineProfile
from services.control.measures.rates import Rates
from services.control.measures.step_timing import StepTiming
from services.control.plans.counts import ControllerCounts
from services.control.requests.request_ledger import RequestLedger
from services.control.types import Links, ScheduledStep, StepSample
from services.placement.run.types import StepCosts
from services.placement.types import Profile

PREFILL_HORIZON_S = 20.0  # over which the share of prompts is a mean
REPREDICT_TOKENS = 16  # by which contexts may grow until steps are predicted anew
MAX_UNTIMED_STEPS = 16  # ended, and what their layers took is not known yet


@dataclass(frozen=True, slots=True, kw_only=True)
class _EndedStep:
    """A step whose output came."""

    step: ScheduledStep
    predicted_s: float | None
    step_s: float  # by the host's clock
    busy: bool  # another one followed at once

    def length_s(self, timing: StepTiming) -> float:
        """Return the step's length by the device's clock if that tells."""
        period_s = timing.period_s if self.busy else None
        return self.step_s if period_s is None else period_s


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReading:
    """What one step told."""

    step_s: float
    mismatch: bool  # steps of this composition take another time than predicted


class StepMeter:
    """Profile, link rates and predictions. Steps end in the order in which they were scheduled.

    What a device's layers took comes with a later step's output, and is that of its own step.
    """

    def __init__(
        self,
        engine: Engine[Any, Any],
        ledger: RequestLedger,
        counts: ControllerCounts,
        *,
        mismatch_frac: float,
    ) -> None:
        self._engine, self._ledger, self._counts = engine, ledger, counts
        self.profile = OnlineProfile(num_layers=engine.shape.num_layers)
        self._h2d, self._d2h = LinkRate(), LinkRate()
        self._mismatch = MismatchDetector(mismatch_frac)
        self._reference: tuple[Profile, Links] | None = None  # that predictions are made with
        self._predicted_s: float | None = None  # of the present composition
        self._prediction_age = 0.0  # tokens
        self.predicted_step_s: float | None = None  # of the newest step that ended
        self._in_flight: deque[tuple[ScheduledStep, float | None]] = deque()
        self._untimed: dict[int, _EndedStep] = {}  # by number
        self._last_end_s: float | None = None  # None: the engine rested
        self.prefill_frac = 0.0  # of the engine's time that prompts took of late
        self._prefill_counted_s: float | None = None

    def rates(self) -> Rates:
        """Return what is measured now."""
        return Rates(
            h2d_bytes_per_s=self._h2d.bytes_per_s,
            d2h_bytes_per_s=self._d2h.bytes_per_s,
            step_s=self.profile.tpot_s,
            prompt=self.profile.prompt_cost,
        )

    def costs(self) -> StepCosts | None:
        """Return a step by its parts; None while too little is measured."""
        return self.profile.costs()

    def take_reference(self) -> tuple[Profile, Links] | None:
        """Return what is measured now, and predict with it from now on.

        None, and nothing changed, while too little is measured.
        """
        profile = self.profile.profile()
        links = self._engine.links(self._h2d, self._d2h)
        if profile is None or links.h2d is None:
            return None
        self._reference, self._predicted_s = (profile, links), None
        self._mismatch.restart()
        return self._reference

    def scheduled(self, step: ScheduledStep) -> None:
        """Take in a step that begins to run."""
        if not step.same_batch:
            self._predicted_s = None
            self._mismatch.restart()
        self._in_flight.append((step, self._predict(step)))

    def recomputes(self, chunks: Sequence[int]) -> None:
        """Take in that the step that was scheduled last computes prompts of so many tokens anew.

        They take what prompts take.
        """
        if not chunks:
            return
        step, _ = self._in_flight.pop()
        num_tokens = sum(chunks)
        step = replace(
            step,
            num_tokens=step.num_tokens + num_tokens,
            num_context_tokens=step.num_context_tokens + num_tokens,
            num_prefill_tokens=step.num_prefill_tokens + num_tokens,
            num_prefill_pairs=step.num_prefill_pairs + sum(n * (n + 1) // 2 for n in chunks),
        )
        self._in_flight.append((step, None))

    def _predict(self, step: ScheduledStep) -> float | None:
        """Return the predicted length of a decode step, None where nothing can be said."""
        if step.num_prefill_tokens or not step.num_tokens or self._reference is None:
            return None
        self._prediction_age += self._ledger.tokens_per_step.mean
        if self._predicted_s is None or self._prediction_age >= REPREDICT_TOKENS:
            profile, links = self._reference
            batch = self._ledger.placed()
            self._predicted_s = predicted_step_s(batch, self._engine.shape, profile, links.h2d)
            self._prediction_age = 0.0
        return self._predicted_s if step.undisturbed else None

    def ended(self, timing: StepTiming | None, now_s: float, *, busy: bool) -> StepReading:
        """Take in how the oldest step in flight went. `busy`: another one follows at once."""
        if not self._in_flight:
            return StepReading(step_s=0.0, mismatch=False)  # a step that was not scheduled by us
        step, predicted_s = self._in_flight.popleft()
        self.predicted_step_s = predicted_s
        begin_s = self._last_end_s if self._last_end_s is not None else step.scheduled_s
        self._last_end_s = now_s if busy else None
        step_s = now_s - begin_s
        self._count_prompts(step, step_s, now_s)
        ended = _EndedStep(step=step, predicted_s=predicted_s, step_s=step_s, busy=busy)
        mismatch = False
        if timing is None:
            mismatch = self._compare(ended, step_s)
        else:
            self._add_links(timing)
            timed = self._timed(ended, timing.step)
            if timed is not None:
                length_s = timed.length_s(timing)
                self._add(timed.step, length_s, timing)
                mismatch = self._compare(timed, length_s)
        return StepReading(step_s=step_s, mismatch=mismatch)

    def _timed(self, ended: _EndedStep, number: int) -> _EndedStep | None:
        """Return the step that a timing is of; None if it tells of none that is remembered."""
        if not ended.step.number:
            return ended
        self._untimed[ended.step.number] = ended
        while len(self._untimed) > MAX_UNTIMED_STEPS:
            del self._untimed[next(iter(self._untimed))]
        return self._untimed.pop(number, None)

    def _compare(self, ended: _EndedStep, measured_s: float) -> bool:
        """Return whether steps have become unlike their prediction."""
        if ended.predicted_s is None:
            return False
        self._counts.predicted(predicted_s=ended.predicted_s, measured_s=measured_s)
        return self._mismatch.add(measured_s=measured_s, predicted_s=ended.predicted_s)

    def _count_prompts(self, step: ScheduledStep, step_s: float, now_s: float) -> None:
        """Let the share of prompts follow the newest step."""
        since_s = self._prefill_counted_s
        passed_s = step_s if since_s is None else now_s - since_s
        self._prefill_counted_s = now_s
        if passed_s <= 0.0:
            return
        rate = self.profile.prefill_tokens_per_s
        prompts_s = min(step_s, step.num_prefill_tokens / rate) if rate else 0.0
        weight = 1.0 - math.exp(-passed_s / PREFILL_HORIZON_S)
        self.prefill_frac += weight * (prompts_s / passed_s - self.prefill_frac)

    def _add_links(self, timing: StepTiming) -> None:
        if timing.calibration is not None:
            links = timing.calibration
            self._h2d.calibrate(links.small_h2d, links.large_h2d)
            self._d2h.calibrate(links.small_d2h, links.large_d2h)
        self._h2d.add(timing.h2d)
        self._d2h.add(timing.d2h)

    def _compare_prompts(self, step: ScheduledStep, step_s: float, timing: StepTiming) -> None:
        """Compare a step that computes part of a prompt with what run policies expect of it."""
        costs = self.profile.costs() if step.num_prefill_tokens else None
        if costs is None or not costs.chunk_token_s:
            return
        predicted_s = costs.decode_s(self.profile.num_decodes(step), step.num_context_tokens)
        predicted_s += costs.prompt_s(step.num_prefill_tokens)
        # An output that is taken in late makes the next step seem shorter than its own waits.
        measured_s = max(0.0, step_s - timing.stall_s)
        self._counts.predicted_prompts(predicted_s=predicted_s, measured_s=measured_s)

    def _add(self, step: ScheduledStep, step_s: float, timing: StepTiming) -> None:
        self._compare_prompts(step, step_s, timing)
        self.profile.add(
            StepSample(
                step_s=step_s,
                layer_s=timing.layer_s,
                stall_s=timing.stall_s,
                num_tokens=step.num_tokens,
                num_context_tokens=step.num_context_tokens,
                num_prefill_tokens=step.num_prefill_tokens,
                num_prefill_pairs=step.num_prefill_pairs,
                num_requests=len(step.request_ids),
            )
        )
