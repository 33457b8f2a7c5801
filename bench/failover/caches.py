"""How much of what executors take they find in their prefix caches."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import httpx

from lab.stack.executor_process import ExecutorProcess
from lab.stack.metrics import sums_by_label, sums_by_name

TIMEOUT_S = 60.0
RETURNED = "evenflow_executor_returned_tokens_total"  # of requests that go on
# Of those that begin. Hits are in the pool, and what of the rest a connector has elsewhere.
BEGUN = "vllm:prefix_cache_queries_total"
BEGUN_FOUND = ("vllm:prefix_cache_hits_total", "vllm:external_prefix_cache_hits_total")


@dataclass(frozen=True, slots=True)
class LookedUp:
    """Tokens of requests that an engine has begun with, of prompts and of answers so far."""

    num_tokens: int = 0
    num_found: int = 0  # of these, in a cache


def read(exposition: str) -> LookedUp:
    """Return what an executor's metrics say, in Prometheus' text format."""
    sums, returned = sums_by_name(exposition), sums_by_label(exposition, RETURNED, "result")
    num_found = sum(sums.get(name, 0) for name in BEGUN_FOUND) + returned.get("found", 0)
    return LookedUp(int(sums.get(BEGUN, 0) + sum(returned.values())), int(num_found))


def looked_up(executors: Iterable[ExecutorProcess]) -> dict[int, LookedUp]:
    """Return what was looked up so far, by the executors' process ids. All must be serving."""
    urls = {
        executor.process.pid: f"http://127.0.0.1:{executor.metrics_port}/metrics"
        for executor in executors
    }
    return {pid: read(httpx.get(url, timeout=TIMEOUT_S).text) for pid, url in urls.items()}


def between(before: Mapping[int, LookedUp], after: Mapping[int, LookedUp]) -> LookedUp:
    """Return what was looked up meanwhile; a process that is new began with nothing."""
    grown = [(now, before.get(pid, LookedUp())) for pid, now in after.items()]
    return LookedUp(
        sum(now.num_tokens - then.num_tokens for now, then in grown),
        sum(now.num_found - then.num_found for now, then in grown),
    )
