"""What vLLM says of its load after each step."""

import time
from typing import Any

from vllm.v1.metrics.loggers import StatLoggerBase

HALF_LIFE_S = 5.0  # of steps: what was measured then counts half


class LoadRecorder(StatLoggerBase):  # type: ignore[misc]
    """A vLLM stat logger that keeps only the last record, and counts them: one for each step."""

    def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
        self.num_steps = 0  # that the engine has ended
        self.num_running_reqs = 0
        self.kv_cache_usage_frac = 0.0
        self._steps_s = 0.0  # of steps that followed each other; old ones count less
        self._tokens = 0.0  # that they made
        self._ended_s = 0.0  # the newest step

    @property
    def output_tps(self) -> float:
        """Return how many tokens per second steps have made of late; 0: not measured."""
        return self._tokens / self._steps_s if self._steps_s else 0.0

    def record(
        self,
        scheduler_stats: Any,
        iteration_stats: Any,
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
    ) -> None:
        """Take one step's figures; called from vLLM's output loop."""
        if scheduler_stats is not None:
            self._time(iteration_stats)
            self.num_steps += 1
            self.num_running_reqs = scheduler_stats.num_running_reqs
            self.kv_cache_usage_frac = scheduler_stats.kv_cache_usage

    def _time(self, iteration_stats: Any) -> None:
        """Take in a step that has ended now. The first one after idle time has no length."""
        now_s = time.monotonic()
        step_s, self._ended_s = now_s - self._ended_s, now_s
        if self.num_running_reqs and iteration_stats is not None:
            kept = 0.5 ** (step_s / HALF_LIFE_S)
            self._steps_s = kept * self._steps_s + step_s
            self._tokens = kept * self._tokens + iteration_stats.num_generation_tokens

    def log_engine_initialized(self) -> None:
        """Do nothing: there is nothing to announce."""
