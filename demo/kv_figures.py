"""Layer-wise KV at one moment, from an executor's metrics."""

from dataclasses import dataclass

import httpx
from prometheus_client.parser import text_string_to_metric_families

from cli.local.settings import StackSettings

SCRAPE_TIMEOUT_S = 10.0
PREFIX = "vllm:evenflow_kv_"


@dataclass(frozen=True, slots=True, kw_only=True)
class KVFigures:
    """What the executor says. Sums are since its start."""

    pool_blocks: int  # of one layer group each
    block_size: int  # tokens
    h2d_bytes: float
    h2d_busy_s: float  # copies under way
    d2h_bytes: float
    stall_s: float  # layers waited for copies


def read_figures(settings: StackSettings) -> KVFigures:
    """Read the executor's metrics endpoint."""
    port = settings.ports["EVENFLOW_EXECUTOR_METRICS_PORT"]
    text = httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=SCRAPE_TIMEOUT_S).text
    values: dict[str, float] = {}
    shape: dict[str, str] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name.startswith(PREFIX):
                values[sample.name.removeprefix(PREFIX)] = sample.value
            if sample.name == "vllm:cache_config_info":
                shape = sample.labels
    return KVFigures(
        pool_blocks=int(shape["num_gpu_blocks"]),
        block_size=int(shape["block_size"]),
        h2d_bytes=values["h2d_bytes_total"],
        h2d_busy_s=values["h2d_busy_s_total"],
        d2h_bytes=values["d2h_bytes_total"],
        stall_s=values["step_stall_s_sum"],
    )
