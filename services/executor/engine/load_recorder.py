"""What vLLM says of its load after each step."""

import time
from typing import Any

from vllm.v1.metrics.loggers import StatLoggerBase

from services.executor import metrics
from services.kit.recent_rate import RecentRate

HALF_LIFE_S = 5.0  # of steps that follow each other


class LoadRecorder(StatLoggerBase):  # type: ignore[misc]
    """A vLLM stat logger that keeps only the last record, and counts them: one for each step."""

    def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
        self.num_steps = 0  # that the engine has ended
        self.num_running_reqs = 0
        self.kv_cache_usage_frac = 0.0
        self._tokens = RecentRate(HALF_LIFE_S)  # that steps make
        self._ended_s = 0.0  # the newest step

    @property
    def output_tps(self) -> float:
        """Return how many tokens per second steps have made of late; 0: not measured."""
        return self._tokens.per_s

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
            _count_returned(scheduler_stats)

    def _time(self, iteration_stats: Any) -> None:
        """Take in a step that has ended now. The first one after idle time has no length."""
        now_s = time.monotonic()
        step_s, self._ended_s = now_s - self._ended_s, now_s
        if self.num_running_reqs and iteration_stats is not None:
            self._tokens.passed(step_s)
            self._tokens.came(iteration_stats.num_generation_tokens)

    def log_engine_initialized(self) -> None:
        """Do nothing: there is nothing to announce."""


def _count_returned(scheduler_stats: Any) -> None:
    """Count what vLLM looked up in a step for requests that had run before, in the pool's cache, if
    that is on, and what this lacked at the connector, if there is one.
    """
    caches = (scheduler_stats.prefix_cache_stats, scheduler_stats.connector_prefix_cache_stats)
    asked = [cache for cache in caches if cache is not None and cache.preempted_queries]
    if not asked:
        return
    num_tokens = max(cache.preempted_queries for cache in asked)
    num_found = sum(cache.preempted_hits for cache in asked)
    metrics.RETURNED_TOKENS.labels("found").inc(num_found)
    metrics.RETURNED_TOKENS.labels("computed").inc(num_tokens - num_found)
