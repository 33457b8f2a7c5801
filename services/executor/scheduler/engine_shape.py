"""The engine's fixed sizes, in the planner's terms, from vLLM's configuration."""

from typing import TYPE_CHECKING

from services.executor.kv_options import max_num_active_seqs
from services.placement.types import EngineShape

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig


def engine_shape(
    config: "VllmConfig", cache: "KVCacheConfig", *, num_blocks: int, num_host_blocks: int
) -> EngineShape:
    """Return what does not change while the engine runs. `num_blocks`: that requests can use."""
    parallel, scheduler, model = (
        config.parallel_config,
        config.scheduler_config,
        config.model_config,
    )
    num_layers: int = model.get_total_num_hidden_layers()
    spec = cache.kv_cache_groups[0].kv_cache_spec
    layers_per_group = -(-num_layers // len(cache.kv_cache_groups))
    return EngineShape(
        num_layers=num_layers,
        layers_per_group=layers_per_group,
        block_size=spec.block_size,
        num_blocks=num_blocks,
        block_bytes=spec.page_size_bytes * layers_per_group * parallel.tensor_parallel_size,
        max_num_seqs=max_num_active_seqs(config),
        max_num_batched_tokens=scheduler.max_num_batched_tokens,
        num_host_blocks=num_host_blocks,
        max_model_len=model.max_model_len,
        max_prefill_chunk_tokens=scheduler.long_prefill_token_threshold
        or scheduler.max_num_batched_tokens,
    )
