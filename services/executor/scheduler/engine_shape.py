"""The engine's fixed sizes, in the planner's terms, from vLLM's configuration."""

from typing import TYPE_CHECKING, Any

from services.placement.types import EngineShape, ModelShape

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
        max_num_seqs=scheduler.max_num_seqs,
        max_num_batched_tokens=scheduler.max_num_batched_tokens,
        num_host_blocks=num_host_blocks,
        max_model_len=model.max_model_len,
        max_prefill_chunk_tokens=scheduler.long_prefill_token_threshold
        or scheduler.max_num_batched_tokens,
        model=_model_shape(config),
    )


def _model_shape(config: "VllmConfig") -> ModelShape:
    model, parallel = config.model_config, config.parallel_config
    text: Any = model.hf_text_config
    num_parameters = dense_parameters(text)
    return ModelShape(
        num_parameters=num_parameters,
        hidden_size=model.get_hidden_size(),
        num_kv_heads=model.get_total_num_kv_heads(),
        head_size=model.get_head_size(),
        tensor_parallel_size=parallel.tensor_parallel_size,
        pipeline_parallel_size=parallel.pipeline_parallel_size,
        vocab_size=model.get_vocab_size(),
        num_weight_bytes=num_parameters * model.dtype.itemsize if not model.quantization else 0,
    )


def dense_parameters(text: Any) -> int:
    """Return the weights of a dense decoder with gated MLPs, norms left out.

    `text`: a Hugging Face text configuration. 0 for shapes that this formula does not know.
    """
    hidden = getattr(text, "hidden_size", 0)
    inner = getattr(text, "intermediate_size", None)
    heads = getattr(text, "num_attention_heads", 0)
    experts = getattr(text, "num_experts", None) or getattr(text, "num_local_experts", None)
    if not (isinstance(inner, int) and hidden and heads) or experts:
        return 0
    head_size = getattr(text, "head_dim", None) or hidden // heads
    num_kv_heads = getattr(text, "num_key_value_heads", None) or heads
    attention = hidden * head_size * (2 * heads + 2 * num_kv_heads)
    embeddings = (1 if getattr(text, "tie_word_embeddings", False) else 2) * text.vocab_size
    layers: int = text.num_hidden_layers * (attention + 3 * hidden * inner)
    return layers + int(embeddings * hidden)
