"""What `evenflow size` says of a model's KV is what vLLM makes of the same config.

The specs are made as vLLM's attention layers make theirs, of transformers' reading of the config;
groups, blocks and tokens are by vLLM's own functions.
"""

from typing import Any

import pytest
import torch
from transformers import AutoConfig
from vllm.config import set_current_vllm_config
from vllm.v1.core.kv_cache_utils import get_kv_cache_capacity, get_kv_cache_configs
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

from lab.models import exactness_model
from services.executor.engine.config import make_config
from services.executor.plugin.spec import layer_group_specs
from services.executor.settings import ExecutorSettings
from services.placement.blocks import RESIDENT, num_request_blocks, side_blocks
from simulator.deployment import Deployment
from simulator.device.hardware import assumptions, device
from simulator.memory.room import stock_shape
from simulator.models.reading import read_model
from tests import model_configs

BLOCK_SIZE = 16
NEAR = 0.02
SIZED = [
    (model_configs.GPT_OSS_120B, "h100", 1),
    (model_configs.QWEN3_30B_A3B, "h100", 1),
    (model_configs.DEEPSEEK_V3, "h200", 8),
    (model_configs.GEMMA_3_27B, "h100", 1),
    (model_configs.GPT_OSS_20B, "rtx-4090", 2),
]
NAMES = ["gpt-oss-120b", "Qwen3-30B-A3B", "DeepSeek-V3", "Gemma 3 27B", "gpt-oss-20b on two"]


class Config:
    """vLLM's configuration, which cannot be printed."""

    def __init__(self, config: Any) -> None:
        self.vllm = config


@pytest.fixture(scope="module")
def config() -> Config:
    settings = ExecutorSettings(model=str(exactness_model()), block_size=BLOCK_SIZE)
    return Config(make_config(settings))


def specs_of(described: dict[str, Any], num_devices: int) -> tuple[dict[str, KVCacheSpec], int]:
    """Return the specs of one rank's layers, and the longest request in tokens."""
    given = {name: value for name, value in described.items() if name != "quantization_config"}
    text = AutoConfig.for_model(**given).get_text_config()
    kinds = getattr(text, "layer_types", None) or ["full_attention"] * text.num_hidden_layers
    specs: dict[str, KVCacheSpec] = {}
    for number, kind in enumerate(kinds):
        if getattr(text, "kv_lora_rank", None):
            spec: KVCacheSpec = MLAAttentionSpec(
                block_size=BLOCK_SIZE,
                num_kv_heads=1,
                head_size=text.kv_lora_rank + text.qk_rope_head_dim,
                dtype=torch.bfloat16,
            )
        else:
            heads = {
                "block_size": BLOCK_SIZE,
                "num_kv_heads": max(1, text.num_key_value_heads // num_devices),
                "head_size": text.head_dim,
                "dtype": torch.bfloat16,
            }
            is_window = kind == "sliding_attention"
            window = {"sliding_window": text.sliding_window} if is_window else {}
            spec = (SlidingWindowSpec if is_window else FullAttentionSpec)(**heads, **window)
        specs[f"layers.{number}.attn"] = spec
    return specs, text.max_position_embeddings


def pool_of(
    config: Config, specs: dict[str, KVCacheSpec], max_model_len: int, num_bytes: float
) -> tuple[KVCacheConfig, int]:
    """Return vLLM's pool, and the tokens that it has room for at a length."""
    vllm = config.vllm
    vllm.model_config.max_model_len = vllm.model_config.original_max_model_len = max_model_len
    vllm.scheduler_config.async_scheduling = True
    vllm.cache_config.kv_cache_layout = "LBNHC"
    with set_current_vllm_config(vllm):
        (made,) = get_kv_cache_configs(vllm, [dict(specs)], [int(num_bytes)])
        return made, get_kv_cache_capacity(vllm, made)[0]


@pytest.mark.parametrize(("described", "gpu", "num_devices"), SIZED, ids=NAMES)
def test_bytes_per_token_and_pool_are_vllms(config, described, gpu, num_devices) -> None:
    specs, max_model_len = specs_of(described, num_devices)
    deployment = Deployment(
        model=read_model(described, name="read", source=""),
        device=device(gpu),
        assumptions=assumptions(),
        num_devices=num_devices,
        block_size=BLOCK_SIZE,
        max_num_batched_tokens=config.vllm.scheduler_config.max_num_batched_tokens,
        max_model_len=max_model_len,
    )
    shape, kv_bytes = deployment.shape(), deployment.kv_bytes / num_devices
    full = [one for one in specs.values() if not isinstance(one, SlidingWindowSpec)]
    token_bytes = sum(one.page_size_bytes for one in full) / BLOCK_SIZE

    assert shape.num_layers == len(full)
    assert shape.num_groups * shape.block_bytes / BLOCK_SIZE / num_devices == token_bytes
    # With layer-wise KV all groups have one layer: blocks are the simulator's, to a few.
    length = max_model_len
    grouped, _ = pool_of(
        config, layer_group_specs(specs, 1, max_model_len=length), length, kv_bytes
    )
    assert grouped.num_blocks == pytest.approx(shape.num_blocks, abs=shape.num_groups)

    pool, num_tokens = pool_of(config, specs, length, kv_bytes)
    stock = stock_shape(shape)
    assert stock is not None
    assert num_grouped(pool) == len(stock.side_windows) + stock.num_groups
    each = num_request_blocks(stock.geometry, RESIDENT, num_tokens=length)
    each += side_blocks(stock.geometry, num_tokens=length, num_new_tokens=length)
    assert stock.num_blocks / each * length == pytest.approx(num_tokens, rel=NEAR)


def num_grouped(pool: KVCacheConfig) -> int:
    """Return the layers of all groups, with those that some lack."""
    sizes = [len(group.layer_names) for group in pool.kv_cache_groups]
    return len(sizes) * max(sizes)
