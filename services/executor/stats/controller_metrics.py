"""The closed loop on the executor's metrics endpoint."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from services.kit.capped_labels import CappedLabels

COUNTERS = {
    "num_steps": "Steps that the controller has seen end.",
    "step_s": "Seconds of those steps.",
    "controller_s": "Seconds of them that the controller itself took, on the engine's thread.",
    "num_decodes": "Requests that decoded, over all steps.",
    "num_decoded_tokens": "Tokens that they got: more than one each where drafts are accepted.",
    "num_predicted_steps": "Decode steps whose length was predicted for their very composition.",
    "predicted_step_s": "Predicted seconds of those steps.",
    "measured_step_s": "Measured seconds of those steps.",
    "abs_error_s": "Differences between the two, summed without their signs.",
    "num_predicted_prompt_steps": "Steps with part of a prompt that run policies could predict.",
    "measured_prompt_step_s": "Measured seconds of those steps, without their waits for copies.",
    "prompt_abs_error_s": "Differences from the prediction, summed without their signs.",
}
GAUGES = {
    "last_predicted_step_s": "Predicted seconds of the newest step that was predicted.",
    "last_measured_step_s": "Measured seconds of that step.",
    "shadow_gain_frac": "Tokens per second that the shadow policy would gain, as a fraction.",
    "shadow_step_s": "Predicted seconds of a step under the shadow policy's newest plan.",
    "acting_step_s": "Predicted seconds of a step under the plan that acts, for the same batch.",
    "fairness_jain_frac": "Jain's index over what fairness ids with requests have attained.",
}
LABELLED = {
    "triggers": ("kind", "Reasons to plan anew."),
    "plans": ("result", "Plans asked for, and what became of them."),
    "reasons": ("reason", "Times that a request's reason to run, wait or leave was a new one."),
}
ATTAINED = "attained_kv_token_s"
ATTAINED_TEXT = "Token-seconds of KV in the pool that requests of a fairness id have held."
MAX_FAIRNESS_IDS = 1_000  # that have labels of their own
HISTOGRAMS: Mapping[str, tuple[str, Sequence[float]]] = {
    "lateness_s": (
        "Seconds from a snapshot to the plan's application.",
        (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0),
    ),
    "lateness_steps": (
        "Steps that ended between a snapshot and the plan's application, beyond the first.",
        (0, 1, 2, 4, 8, 16, 32, 64),
    ),
}

# Makes a metric: class, name, documentation, further label names, further options.
Make = Callable[..., Any]


class ControllerPromMetrics:
    """One set of metrics per engine, fed with what `ControllerCounts.take` returned."""

    def __init__(self, classes: tuple[Any, Any, Any], make: Make) -> None:
        """`classes`: of counters, gauges and histograms."""
        counter, gauge, histogram = classes
        self._counters = {name: make(counter, name, text) for name, text in COUNTERS.items()}
        self._gauges = {name: make(gauge, name, text) for name, text in GAUGES.items()}
        self._labelled = {
            name: make(counter, name, text, labels=(label,))
            for name, (label, text) in LABELLED.items()
        }
        self._attained = make(counter, ATTAINED, ATTAINED_TEXT, labels=("fairness_id",))
        self._fairness_ids = CappedLabels(MAX_FAIRNESS_IDS)
        self._histograms = {
            name: make(histogram, name, text, buckets=buckets)
            for name, (text, buckets) in HISTOGRAMS.items()
        }

    def observe(self, data: Mapping[str, Any], labels: Sequence[Any]) -> None:
        """Take in counts. `labels`: of the engine that they come from."""
        if not data:
            return
        for name, counter in self._counters.items():
            counter.labels(*labels).inc(data["sums"].get(name, 0))
        for name, gauge in self._gauges.items():
            if name in data["gauges"]:
                gauge.labels(*labels).set(data["gauges"][name])
        for name, counter in self._labelled.items():
            for kind, number in data[name].items():
                counter.labels(*labels, kind).inc(number)
        for name, token_s in data[ATTAINED].items():
            self._attained.labels(*labels, self._fairness_ids.label(name)).inc(token_s)
        for name, histogram in self._histograms.items():
            for value in data[name]:
                histogram.labels(*labels).observe(value)
