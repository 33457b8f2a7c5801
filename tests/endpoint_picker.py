"""An endpoint picker's view of a pod, from the model server protocol that it is written to.

The Gateway API Inference Extension, proposal 003: gauges of these names on the serving port's
`/metrics`; of several samples of one name the newest counts, which for adapters the value tells.
"""

from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

WAITING = "vllm:num_requests_waiting"
RUNNING = "vllm:num_requests_running"
KV_USE = "vllm:kv_cache_usage_perc"
CACHE = "vllm:cache_config_info"
ADAPTERS = "vllm:lora_requests_info"


@dataclass(frozen=True, kw_only=True)
class Pod:
    """What a picker knows of a pod."""

    num_waiting: int
    num_running: int
    kv_use_frac: float  # in [0, 1]
    block_size: int  # tokens
    num_blocks: int
    max_adapters: int  # 0: it serves none
    running_adapters: frozenset[str]
    waiting_adapters: frozenset[str]


def read_pod(page: str) -> Pod:
    """Return what a page of metrics says. Raises ValueError or LookupError for what it must say."""
    cache = _gauge(page, CACHE)[-1].labels
    use = _gauge(page, KV_USE)[-1].value
    if not 0 <= use <= 1:
        raise ValueError(f"{KV_USE} is {use}")
    adapters = max(_gauge(page, ADAPTERS, may_lack=True), key=lambda one: one.value, default=None)
    labels = adapters.labels if adapters else {}
    return Pod(
        num_waiting=_count(_gauge(page, WAITING)[-1]),
        num_running=_count(_gauge(page, RUNNING)[-1]),
        kv_use_frac=use,
        block_size=int(cache["block_size"]),
        num_blocks=int(cache["num_gpu_blocks"]),
        max_adapters=int(labels.get("max_lora", 0)),
        running_adapters=_names(labels.get("running_lora_adapters", "")),
        waiting_adapters=_names(labels.get("waiting_lora_adapters", "")),
    )


def _gauge(page: str, name: str, *, may_lack: bool = False) -> list[Sample]:
    families = [one for one in text_string_to_metric_families(page) if one.name == name]
    if len(families) != 1 or families[0].type != "gauge":
        raise LookupError(f"{name} is not one gauge")
    samples = [sample for sample in families[0].samples if sample.name == name]
    if not samples and not may_lack:
        raise LookupError(f"{name} has no value")
    return samples


def _count(sample: Sample) -> int:
    if sample.value < 0 or sample.value != int(sample.value):
        raise ValueError(f"{sample.name} is {sample.value}")
    return int(sample.value)


def _names(listed: str) -> frozenset[str]:
    return frozenset(name.strip() for name in listed.split(",") if name.strip())
