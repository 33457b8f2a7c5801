"""What endpoint pickers and autoscalers read of executors, under the names that they know.

vLLM's names are those of the model server protocol of the Gateway API Inference Extension
(proposal 003). Their meaning is a newcomer's: what would be before a request that came now. In
vLLM's own gauges parked requests stand in the queue.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from services.gateway.executors.link import ExecutorLink
from services.gateway.executors.routing import expected_wait_s

LABELS = ["executor", "model_name", "engine"]
ENGINE = "0"  # vLLM's number of an engine in a process: an executor has one


@dataclass(frozen=True, slots=True)
class InHand:
    """A live request of this gateway."""

    address: str  # of its executor
    model: str  # an adapter's id, perhaps
    has_tokens: bool


class ExecutorGauges(Collector):
    """Tells of executors that take requests and have told their load; of no others."""

    def __init__(
        self,
        links: Mapping[str, ExecutorLink],
        requests: Callable[[], Iterable[InHand]],
        *,
        wall_clock: Callable[[], float],
    ) -> None:
        """`links`, by address, may come and go; `requests` is called from the scrape's thread."""
        self._links = links
        self._requests = requests
        self._wall_s = wall_clock

    def describe(self) -> Iterator[Metric]:
        """Claim no name, so that a process may have several gateways."""
        yield from ()

    def collect(self) -> Iterator[Metric]:
        """Yield the gauges, for a scrape, from whatever thread."""
        families = _families()
        waiting, running, kv_use, wait, reading, cache, lora = families
        in_hand = list(self._requests())
        for address, link in list(self._links.items()):
            served, candidate = link.info, link.candidate()
            if served is None or candidate is None or candidate.load is None:
                continue
            labels, load = [served.executor_id, served.model, ENGINE], candidate.load
            waiting.add_metric(labels, load.num_newcomers)
            running.add_metric(labels, load.num_running_reqs)
            kv_use.add_metric(labels, load.kv_unavailable_frac)
            wait.add_metric(labels, expected_wait_s(candidate))
            reading.add_metric(labels, load.reading_load_frac)
            size = [str(served.block_size), str(served.num_pool_blocks)]
            cache.add_metric([*labels, *size], 1)
            if served.adapters:
                ids = {adapter.model for adapter in served.adapters}
                here = [one for one in in_hand if one.address == address and one.model in ids]
                running_ids = {one.model for one in here if one.has_tokens}
                waiting_ids = {one.model for one in here} - running_ids
                names = [",".join(sorted(of)) for of in (running_ids, waiting_ids)]
                lora.add_metric([*labels, str(served.max_loras), *names], self._wall_s())
        yield from families


def _families() -> list[GaugeMetricFamily]:
    def gauge(name: str, says: str, *labels: str) -> GaugeMetricFamily:
        return GaugeMetricFamily(name, says, labels=[*LABELS, *labels])

    return [
        gauge("vllm:num_requests_waiting", "Requests without a token yet, of all gateways."),
        gauge("vllm:num_requests_running", "Requests that the engine is computing."),
        gauge("vllm:kv_cache_usage_perc", "Share of the KV pool that a newcomer cannot have."),
        gauge(
            "evenflow_executor_newcomer_wait_seconds",
            "How long a request that came now would wait for its prompt's turn.",
        ),
        gauge(
            "evenflow_executor_reading_load_frac",
            "What paced readers read, of what the engine makes; 1: all, or more.",
        ),
        gauge(
            "vllm:cache_config_info",
            "The KV pool, in blocks that hold a number of tokens of all layers.",
            "block_size",
            "num_gpu_blocks",
        ),
        gauge(
            "vllm:lora_requests_info",
            "Adapters of this gateway's requests: those with a token, and those that wait; when "
            "this was so.",
            "max_lora",
            "running_lora_adapters",
            "waiting_lora_adapters",
        ),
    ]
