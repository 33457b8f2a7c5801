"""How an engine keeps KV, in words and numbers for people."""

from collections.abc import Mapping
from typing import Any

from services.control.options import CONFIG_KEY as POLICY_KEY
from services.control.options import ControllerOptions
from services.executor.kv_options import (
    CONFIG_KEY,
    computes_prompts_whole,
    has_side_groups,
    layers_per_group,
)
from services.executor.model_kinds import has_kv_that_grows, layers_in_words
from services.executor.types import KVFacts
from services.placement.link_ratio import link_ratio
from services.placement.presets import ALL_RESIDENT, OPTIMISER, preset_of
from services.placement.run import evenflow
from services.placement.run.reader_capacity import ReaderCapacity, ReadersAlike, reader_capacity
from services.placement.run.types import StepCosts
from services.placement.types import EngineShape

STOCK = "vllm"  # what acts where no policy is named
# What readers ask, as far as an engine that has served none can tell, cut to its context.
CONVERSATION_TOKENS, ANSWER_TOKENS = 4_096, 512
PLACINGS = {ALL_RESIDENT: "all-resident", OPTIMISER: "optimiser"}


def kv_facts(vllm_config: Any, told: Mapping[str, Any]) -> KVFacts:
    """Return what is known of an engine's KV; `told`: what its process says of layer-wise KV."""
    further = vllm_config.additional_config or {}
    is_layerwise = CONFIG_KEY in further
    options = ControllerOptions.of(vllm_config)
    model = vllm_config.model_config
    acts = has_kv_that_grows(model.hf_config.to_dict(), max_model_len=model.max_model_len)
    policy = options.policy if acts and POLICY_KEY in further else STOCK
    preset = preset_of(policy)
    deposit = options.parameters.deposit if is_layerwise else None
    num_pool_tokens = _num_pool_tokens(vllm_config, told)
    return KVFacts(
        num_pool_tokens=num_pool_tokens,
        num_host_tokens=int(told.get("num_host_tokens", 0)),
        token_bytes=int(told.get("token_bytes", 0)),
        link_bytes_per_s=told.get("link_bytes_per_s", 0.0),
        step_s=told.get("step_s", 0.0),
        link_ratio=link_ratio(
            link_bytes_per_s=told["link_bytes_per_s"],
            step_s=told["step_s"],
            pool_bytes=num_pool_tokens * told["token_bytes"],
        )
        if told
        else 0.0,
        is_layerwise=is_layerwise,
        policy=policy,
        run_policy=policy if preset.run else "fcfs",
        placement_policy=PLACINGS.get(preset.placing, policy),
        plans_with_deposit=preset.deposit if deposit is None else deposit,
        readers=_readers(vllm_config.model_config.max_model_len, told)
        if preset.run is evenflow.decide and told.get("link_bytes_per_s")
        else None,
        layers=_layers(vllm_config, is_layerwise),
    )


def _layers(vllm_config: Any, is_layerwise: bool) -> str:
    model = vllm_config.model_config
    words = layers_in_words(
        model.hf_config.to_dict(), max_model_len=model.max_model_len, may_leave=is_layerwise
    )
    if is_layerwise and computes_prompts_whole(vllm_config):
        words += "; a request that gave up all its KV is computed again"
    elif is_layerwise and has_side_groups(vllm_config):
        words += "; a request that is preempted, not parked, is computed again"
    return words


def _readers(max_model_len: int, told: Mapping[str, Any]) -> ReaderCapacity:
    """Return how many readers there is room for, by steps that read weights and KV alike fast.

    What prompts take is not known: of as many as are read at once, few are computed.
    """
    num_tokens = min(max_model_len, CONVERSATION_TOKENS)
    num_output_tokens = min(ANSWER_TOKENS, num_tokens // 2)
    token_s = told["step_s"] * told["token_bytes"] / told["weight_bytes"]
    return reader_capacity(
        EngineShape(**told["shape"]),
        StepCosts(
            outside_s=0.0,
            base_s=told["step_s"],
            token_s=0.0,
            context_s=token_s,
            chunk_base_s=0.0,
            chunk_token_s=0.0,
        ),
        ReadersAlike(
            num_prompt_tokens=num_tokens - num_output_tokens, num_output_tokens=num_output_tokens
        ),
        link_bytes_per_s=told["link_bytes_per_s"],
    )


def _num_pool_tokens(vllm_config: Any, told: Mapping[str, Any]) -> int:
    """Return the pool's tokens, those of layers that never leave not counted: they are few."""
    cache, model = vllm_config.cache_config, vllm_config.model_config
    num_layers = model.get_total_num_hidden_layers()
    num_stages = vllm_config.parallel_config.pipeline_parallel_size
    groups_per_stage = -(-num_layers // (num_stages * layers_per_group(vllm_config)))
    block_size = cache.block_size
    if told:
        shape = EngineShape(**told["shape"])
        groups_per_stage, block_size = shape.num_groups, shape.block_size
    return int(cache.num_gpu_blocks // groups_per_stage * block_size)
