"""Layer-wise KV on the executor's metrics endpoint, beside vLLM's own figures."""

from collections.abc import Sequence
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics
from vllm.v1.metrics.utils import create_metric_per_engine

from services.control.counters import TEXTS
from services.executor.stats.controller_metrics import ControllerPromMetrics
from services.executor.stats.kv_stats import KVStats

COUNTERS = {
    "h2d_bytes": "Bytes copied from host memory into the KV pool, over all ranks.",
    "d2h_bytes": "Bytes copied from the KV pool to host memory, over all ranks.",
    "h2d_busy_s": "Seconds in which the slowest rank's link into the pool carried something.",
    "d2h_busy_s": "Seconds in which the slowest rank's link to the host carried something.",
    "num_loads": "Layer groups loaded into staging, one per request, step and rank.",
    "num_checked_blocks": "Blocks that the integrity guard checked when they came back.",
    "num_failed_copies": "Copies that ended without moving every byte, over all ranks.",
    "num_hung_copies": "Copies that did not end in time, over all ranks.",
    "num_corrupt_copies": "Copies that brought back other bytes than had left, over all ranks.",
    **TEXTS,
}
GAUGES = {
    "num_resident_groups": "Layer groups of live requests whose KV is in the pool.",
    "num_offloaded_groups": "Layer groups of live requests whose KV is in host memory.",
    "num_restoring_groups": "Offloaded layer groups that are on their way back.",
    "num_staging_blocks": "Pool blocks that offloaded layer groups take turns in.",
    "num_host_blocks": "Host slots in use.",
    "num_lagging_blocks": "Full blocks of mirrored requests without a complete host copy.",
    "num_paused_requests": "Requests on pause.",
    "num_parked_requests": "Requests that are parked, or on their way there.",
    "num_free_blocks": "Pool blocks that nobody owns.",
    "num_quarantined_blocks": "Pool blocks that a hung copy may still write.",
    "num_quarantined_slots": "Host slots that a hung copy may still write.",
    "num_anchors": "Windows and states on the host that requests may begin with.",
    "num_cached_columns": "Blocks of all layers in the prefix cache, on the host.",
    "num_retained_columns": "Blocks of all layers that clients asked to keep, on the host or not.",
    "num_awaited_columns": "Blocks of all layers kept for turns that wait for their tools.",
    "num_left_blocks": "Free pool blocks whose KV is found if it is wanted before they are.",
    "num_duplicate_blocks": "Pool blocks that would be free if requests shared all that they can.",
    "num_trunks": "Parts of prompts that requests share in the pool.",
    "num_shared_blocks": "Pool blocks that requests would have more if they shared nothing.",
}
STALL_BUCKETS_S = (0.0, 1e-4, 1e-3, 2.5e-3, 5e-3, 1e-2, 2.5e-2, 5e-2, 0.1, 0.25, 0.5, 1.0)


class KVPromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """One set of metrics per engine, fed with each step's stats."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._counters = {
            name: self._make(self._counter_cls, name, text) for name, text in COUNTERS.items()
        }
        self._gauges = {
            name: self._make(self._gauge_cls, name, text) for name, text in GAUGES.items()
        }
        self._stall = self._make(
            self._histogram_cls,
            "step_stall_s",
            "Seconds per step in which the slowest rank's layers waited for a copy.",
            buckets=STALL_BUCKETS_S,
        )
        classes = (self._counter_cls, self._gauge_cls, self._histogram_cls)
        self._controller = ControllerPromMetrics(classes, self._make_controllers)

    def _make(self, kind: Any, name: str, documentation: str, **options: Any) -> dict[int, Any]:
        metric = kind(
            name=f"vllm:evenflow_kv_{name}",  # by the prefix, vLLM forgets an earlier engine's
            documentation=documentation,
            labelnames=self._labelnames,
            **options,
        )
        created: dict[int, Any] = create_metric_per_engine(metric, self.per_engine_labelvalues)
        return created

    def _make_controllers(
        self, kind: Any, name: str, text: str, labels: Sequence[str] = (), **options: Any
    ) -> Any:
        return kind(
            name=f"vllm:evenflow_controller_{name}",
            documentation=text,
            labelnames=[*self._labelnames, *labels],
            **options,
        )

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        reduced = KVStats(data=transfer_stats_data).reduce()
        for name, counters in self._counters.items():
            counters[engine_idx].inc(reduced.get(name, 0))
        for name, gauges in self._gauges.items():
            if name in reduced:
                gauges[engine_idx].set(reduced[name])
        if "stall_s" in reduced:
            self._stall[engine_idx].observe(reduced["stall_s"])
        counts = transfer_stats_data.get("controller", {})
        self._controller.observe(counts, self.per_engine_labelvalues[engine_idx])
