"""Remembers the newest scheduler figures that vLLM publishes."""

from typing import Any

from vllm.v1.metrics.loggers import StatLoggerBase


class LoadRecorder(StatLoggerBase):  # type: ignore[misc]
    """A vLLM stat logger that keeps only the last record."""

    def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
        self.num_running_reqs = 0
        self.kv_cache_usage_frac = 0.0

    def record(
        self,
        scheduler_stats: Any,
        iteration_stats: Any,
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
    ) -> None:
        """Take one step's figures; called from vLLM's output loop."""
        if scheduler_stats is not None:
            self.num_running_reqs = scheduler_stats.num_running_reqs
            self.kv_cache_usage_frac = scheduler_stats.kv_cache_usage

    def log_engine_initialized(self) -> None:
        """Do nothing: there is nothing to announce."""
