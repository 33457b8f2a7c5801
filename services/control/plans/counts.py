"""What the step loop counts, on its way to the metrics endpoint."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from services.control.plans.shadow import ShadowReport
from services.control.types import Trigger
from services.placement.judging.plan_rules import Verdict

Data = dict[str, Any]
MAX_LATENESSES = 1_024  # kept between two reports


class ControllerCounts:
    """Counted since the last `take`."""

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        self.sums: defaultdict[str, float] = defaultdict(float)
        self.triggers: Counter[str] = Counter()
        self.plans: Counter[str] = Counter()
        self.reasons: Counter[str] = Counter()  # of the run policy, each time one is new
        self.attained_kv_token_s: Counter[str] = Counter()  # by fairness id
        self.lateness_s: list[float] = []
        self.lateness_steps: list[int] = []
        self.gauges: dict[str, float] = {}

    def triggered(self, trigger: Trigger) -> None:
        self.triggers[trigger.value] += 1

    def asked(self, *, dropped: bool) -> None:
        self.plans["asked"] += 1
        if dropped:
            self.plans["dropped_unsent"] += 1

    def judged(self, verdict: Verdict, *, waited_s: float, waited_steps: int) -> None:
        """Count a plan that came; its lateness if it was carried out."""
        self.plans[verdict.value] += 1
        if verdict is Verdict.APPLIED and len(self.lateness_s) < MAX_LATENESSES:
            self.lateness_s.append(waited_s)
            self.lateness_steps.append(waited_steps)

    def failed(self, kind: str) -> None:
        self.plans[f"failed_{kind.lower()}"] += 1

    def stepped(self, *, step_s: float, own_s: float) -> None:
        """Count one step and the loop's own part of it."""
        self.sums["num_steps"] += 1
        self.sums["step_s"] += step_s
        self.sums["controller_s"] += own_s

    def decoded(self, brought: Sequence[int]) -> None:
        """Count how many tokens a step brought to each request that decodes."""
        self.sums["num_decodes"] += len(brought)
        self.sums["num_decoded_tokens"] += sum(brought)

    def predicted(self, *, predicted_s: float, measured_s: float) -> None:
        """Count one decode step whose length was predicted for its very composition."""
        self.sums["num_predicted_steps"] += 1
        self.sums["predicted_step_s"] += predicted_s
        self.sums["measured_step_s"] += measured_s
        self.sums["abs_error_s"] += abs(predicted_s - measured_s)
        self.gauges["last_predicted_step_s"] = predicted_s
        self.gauges["last_measured_step_s"] = measured_s

    def predicted_prompts(self, *, predicted_s: float, measured_s: float) -> None:
        """Count one step with part of a prompt, without what it waited for copies."""
        self.sums["num_predicted_prompt_steps"] += 1
        self.sums["measured_prompt_step_s"] += measured_s
        self.sums["prompt_abs_error_s"] += abs(predicted_s - measured_s)

    def attained(self, token_s: Mapping[str, float], *, jain_index: float) -> None:
        """Count what fairness ids have held of the pool since the step before."""
        self.attained_kv_token_s.update(token_s)
        self.gauges["fairness_jain_frac"] = jain_index

    def shadowed(self, report: ShadowReport) -> None:
        self.gauges["shadow_gain_frac"] = report.gain_frac
        self.gauges["shadow_step_s"] = report.shadow_step_s
        self.gauges["acting_step_s"] = report.acting_step_s

    def take(self) -> Data:
        """Return what was counted, as plain values, and start anew."""
        data = {
            "sums": dict(self.sums),
            "triggers": dict(self.triggers),
            "plans": dict(self.plans),
            "reasons": dict(self.reasons),
            "attained_kv_token_s": dict(self.attained_kv_token_s),
            "lateness_s": self.lateness_s,
            "lateness_steps": self.lateness_steps,
            "gauges": self.gauges,
        }
        self._reset()
        return data
