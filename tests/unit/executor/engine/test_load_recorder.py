"""What is kept of vLLM's figures of a step."""

import pytest
from prometheus_client import REGISTRY
from vllm.v1.metrics.stats import PrefixCacheStats, SchedulerStats

from services.executor.engine.load_recorder import LoadRecorder

NONE = PrefixCacheStats()


def looked_up(num_tokens: int, num_found: int, *, preempted: bool = True) -> PrefixCacheStats:
    stats = PrefixCacheStats()
    stats.record(num_tokens=num_tokens, num_hits=num_found, preempted=preempted)
    return stats


@pytest.mark.parametrize(
    ("in_pool", "at_connector", "num_found", "num_computed"),
    [
        (looked_up(100, 64), None, 64, 36),
        (looked_up(100, 64), looked_up(36, 32), 96, 4),
        (looked_up(100, 0), looked_up(100, 0), 0, 100),
        (NONE, looked_up(100, 96), 96, 4),  # the pool's cache is off, as with layer-wise KV
        (looked_up(100, 64, preempted=False), looked_up(36, 32, preempted=False), 0, 0),
        (NONE, None, 0, 0),
    ],
)
def test_tokens_of_requests_that_return_are_counted_once_wherever_they_are_looked_up(
    in_pool: PrefixCacheStats,
    at_connector: PrefixCacheStats | None,
    num_found: int,
    num_computed: int,
) -> None:
    before = [counted("found"), counted("computed")]

    LoadRecorder(None).record(
        SchedulerStats(prefix_cache_stats=in_pool, connector_prefix_cache_stats=at_connector), None
    )

    after = [counted("found"), counted("computed")]
    assert [now - then for now, then in zip(after, before, strict=True)] == [
        num_found,
        num_computed,
    ]


def counted(result: str) -> float:
    name = "evenflow_executor_returned_tokens_total"
    return REGISTRY.get_sample_value(name, {"result": result}) or 0.0
