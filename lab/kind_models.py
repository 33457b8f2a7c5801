"""Untrained checkpoints with layers that keep less than all KV, drawn as the exactness model is.

`kind_model("gpt_oss")` returns a directory. Attention is peaked and what it reads dominates what a
layer adds, so that wrong KV changes the greedy tokens that follow (`lab/models.py`).
"""

import hashlib
import math
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

import lab.models
from demo.cached_build import MODELS_ROOT, build_once, recipe_fingerprint
from lab.chat_tokenizer import BEGIN_ID, END_ID, SPECIAL_TOKENS
from lab.models import (
    HEAD_DIM,
    HIDDEN_SIZE,
    MAX_MODEL_LEN,
    MLP_GAIN,
    NUM_HEADS,
    NUM_KV_HEADS,
    QUERY_KEY_GAIN,
    SEED,
    VOCAB_SIZE,
    write_tokenizer,
)

WINDOW = 64  # tokens
NUM_LAYERS = 8  # all but Gemma 3's
COMMON = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": HIDDEN_SIZE,
    "intermediate_size": 256,
    "num_hidden_layers": NUM_LAYERS,
    "max_position_embeddings": MAX_MODEL_LEN,
    "bos_token_id": BEGIN_ID,
    "eos_token_id": END_ID,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
HEADS = {
    "num_attention_heads": NUM_HEADS,
    "num_key_value_heads": NUM_KV_HEADS,
    "head_dim": HEAD_DIM,
}
PEAKED = ("q_proj", "k_proj", "qkv_proj")
SMALL = ("mlp", "experts", "feed_forward")  # beside attention; not what chooses experts
UNSCALED_GAIN = 0.75  # where logits are q.k, not divided by sqrt(head_dim)
EXPERTS_IN_OUT = ("gpt_oss", "llama4")  # whose experts' matrices are [experts, inputs, outputs]


def _gpt_oss() -> Any:
    """Windows and full attention in turns, experts, sinks."""
    return transformers.GptOssConfig(
        **COMMON,
        **HEADS,
        sliding_window=WINDOW,
        num_local_experts=4,
        num_experts_per_tok=2,
        rope_parameters={
            "rope_type": "yarn",
            "factor": 2.0,
            "original_max_position_embeddings": 4_096,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "rope_theta": 1.5e5,
        },
        layer_types=["sliding_attention", "full_attention"] * (NUM_LAYERS // 2),
    )


def _gemma3() -> Any:
    """Five windows, then full attention; norms of queries and keys."""
    kinds = [*["sliding_attention"] * 5, "full_attention"] * 2
    return transformers.Gemma3TextConfig(
        **{**COMMON, "tie_word_embeddings": True, "num_hidden_layers": len(kinds)},
        **HEADS,
        sliding_window=WINDOW,
        query_pre_attn_scalar=HEAD_DIM,
        layer_types=kinds,
    )


def _gemma4() -> Any:
    """Five windows, then full attention, whose heads are fewer and larger; K that is V, too."""
    kinds = [*["sliding_attention"] * 5, "full_attention"] * 2
    return transformers.Gemma4TextConfig(
        **{**COMMON, "tie_word_embeddings": True, "num_hidden_layers": len(kinds)},
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=HEAD_DIM,
        global_head_dim=2 * HEAD_DIM,
        num_global_key_value_heads=1,
        sliding_window=WINDOW,
        attention_k_eq_v=True,
        hidden_size_per_layer_input=0,
        layer_types=kinds,
    )


def _granite4() -> Any:
    """Mamba2's states and full attention in turns."""
    return transformers.GraniteMoeHybridConfig(
        **COMMON,
        num_attention_heads=NUM_HEADS,
        num_key_value_heads=NUM_KV_HEADS,
        num_local_experts=0,
        num_experts_per_tok=0,
        shared_intermediate_size=128,
        mamba_n_heads=8,
        mamba_d_head=48,
        mamba_d_state=16,
        mamba_n_groups=1,
        mamba_expand=2,
        position_embedding_type="rope",
        layer_types=["mamba", "attention"] * (NUM_LAYERS // 2),
    )


def _llama4() -> Any:
    """Three layers of chunks, then full attention without positions; experts in every other."""
    return transformers.Llama4TextConfig(
        **{**COMMON, "intermediate_size": 64},
        **HEADS,
        intermediate_size_mlp=256,
        use_qk_norm=False,  # which would leave attention flat
        attention_chunk_size=WINDOW,
        num_local_experts=4,
        num_experts_per_tok=1,
        interleave_moe_layer_step=2,
        no_rope_layer_interval=4,
    )


def _qwen3_next() -> Any:
    """Three gated delta nets, then full attention; its kernels take bf16 only."""
    return transformers.Qwen3NextConfig(
        **COMMON,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=256,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
        linear_num_key_heads=2,
        linear_num_value_heads=2,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        layer_types=[*["linear_attention"] * 3, "full_attention"] * (NUM_LAYERS // 4),
    )


CONFIGS: Mapping[str, Callable[[], Any]] = {
    "gpt_oss": _gpt_oss,
    "gemma3": _gemma3,
    "gemma4": _gemma4,
    "granite4": _granite4,
    "llama4": _llama4,
    "qwen3_next": _qwen3_next,
}


def kind_model(name: str) -> Path:
    """Return a checkpoint's directory, building it first if it is not there (seconds)."""
    return build_once(MODELS_ROOT / name, kind_fingerprint(name), lambda to: _build(name, to))


def kind_fingerprint(name: str) -> str:
    """Hash what a checkpoint is made of."""
    return recipe_fingerprint(
        name, transformers.__version__, sys.modules[__name__], lab.models, lab.chat_tokenizer
    )


@torch.no_grad()
def _build(name: str, directory: Path) -> None:
    config = CONFIGS[name]()
    config.dtype = torch.float32
    model = transformers.AutoModelForCausalLM.from_config(config).float()
    for parameter, weight in model.named_parameters():
        _draw(name, parameter, weight)
    if not config.tie_word_embeddings:
        model.lm_head.weight[: len(SPECIAL_TOKENS)] = 0
    write_tokenizer(directory)
    model.save_pretrained(directory)


def _draw(name: str, parameter: str, weight: torch.Tensor) -> None:
    """Draw what is a matrix, or drawn where it is made; others stay as they are made."""
    if weight.dim() >= 2:
        num_inputs = weight.shape[-2 if weight.dim() == 3 and name in EXPERTS_IN_OUT else -1]
        weight.copy_(_uniform(parameter, weight.shape, _std(name, parameter, num_inputs)))
    elif "sinks" in parameter or "router.bias" in parameter:
        weight.copy_(_uniform(parameter, weight.shape, 1.0))
    elif "A_log" in parameter:
        weight.copy_(torch.arange(1, len(weight) + 1).log())
    elif "q_norm" in parameter or "k_norm" in parameter:
        # Some norms multiply by one more than their weight.
        adds_one = name in ("gemma3", "qwen3_next")
        gain = UNSCALED_GAIN if name == "gemma4" else QUERY_KEY_GAIN
        weight.fill_(gain - 1.0 if adds_one else gain)


def _std(name: str, parameter: str, num_inputs: int) -> float:
    """Return the deviation of a matrix's entries: gain / sqrt(number of inputs)."""
    if "embed_tokens" in parameter:  # Gemma multiplies what it looks up by sqrt(hidden size)
        return 1 / math.sqrt(HIDDEN_SIZE) if name.startswith("gemma") else 1.0
    gain = 1.0
    if any(part in parameter for part in PEAKED):
        gain = QUERY_KEY_GAIN
    elif any(part in parameter for part in SMALL) and not (
        "gate.weight" in parameter or "router" in parameter
    ):
        gain = MLP_GAIN
    return gain / math.sqrt(num_inputs)


def _uniform(parameter: str, shape: torch.Size, std: float) -> torch.Tensor:
    """Return uniform entries of this deviation, the same on every machine."""
    drawn = hashlib.shake_256(f"{SEED} {parameter}".encode()).digest(2 * math.prod(shape))
    whole = np.frombuffer(drawn, "<u2").astype(np.float64)
    entries = (whole - (2**16 - 1) / 2) * (std / math.sqrt((2**32 - 1) / 12))
    return torch.from_numpy(entries.astype(np.float32).reshape(tuple(shape)))
