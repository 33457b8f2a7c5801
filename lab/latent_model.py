"""An untrained DeepSeek-V2 with dense layers: one latent vector per token and layer (MLA).

`latent_model()` returns its directory. It is drawn as the exactness model is (`lab/models.py`), so
that a wrong block changes the greedy tokens that follow. The latent has the size that kernels take.
"""

import hashlib
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

import lab.chat_tokenizer
import lab.made_up_text
import lab.models
from demo.cached_build import MODELS_ROOT, build_once, recipe_fingerprint
from lab.chat_tokenizer import BEGIN_ID, END_ID, SPECIAL_TOKENS
from lab.models import (
    EMBEDDING_RMS,
    HIDDEN_SIZE,
    MAX_MODEL_LEN,
    MLP_GAIN,
    QUERY_KEY_GAIN,
    SEED,
    VOCAB_SIZE,
    write_tokenizer,
)

NUM_LAYERS = 4
NUM_HEADS = 4
LATENT_SIZE, ROPE_SIZE = 512, 64
NOPE_SIZE, VALUE_SIZE = 32, 32  # of a head
INTERMEDIATE_SIZE = 256
# Keys come from a latent and rotary values that have an RMS of 1: queries have all of the gain.
QUERY_GAIN = QUERY_KEY_GAIN**2

CONFIG = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "dtype": "float32",
    "hidden_act": "silu",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": HIDDEN_SIZE,
    "intermediate_size": INTERMEDIATE_SIZE,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": NUM_HEADS,
    "num_key_value_heads": NUM_HEADS,
    "q_lora_rank": None,
    "kv_lora_rank": LATENT_SIZE,
    "qk_rope_head_dim": ROPE_SIZE,
    "qk_nope_head_dim": NOPE_SIZE,
    "v_head_dim": VALUE_SIZE,
    "first_k_dense_replace": NUM_LAYERS,  # no layer has experts
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 64,
    "max_position_embeddings": MAX_MODEL_LEN,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "bos_token_id": BEGIN_ID,
    "eos_token_id": END_ID,
    "tie_word_embeddings": False,
}


def latent_model() -> Path:
    """Return the model's directory, building it first if it is not there (seconds)."""
    return build_once(MODELS_ROOT / "latent", latent_fingerprint(), build_latent_model)


def latent_fingerprint() -> str:
    """Hash everything that the model is made of."""
    return recipe_fingerprint(
        sys.modules[__name__], lab.models, lab.chat_tokenizer, lab.made_up_text
    )


def build_latent_model(directory: Path) -> None:
    """Write the checkpoint into an empty directory."""
    write_tokenizer(directory)
    weights = {name: _weight(name, shape) for name, shape in tensor_shapes()}
    weights["lm_head.weight"][: len(SPECIAL_TOKENS)] = 0
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(CONFIG, indent=1))


def tensor_shapes() -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the shape of every tensor; matrices are `[outputs, inputs]`."""
    yield "model.embed_tokens.weight", (VOCAB_SIZE, HIDDEN_SIZE)
    for layer in range(NUM_LAYERS):
        prefix = f"model.layers.{layer}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield f"{prefix}.{norm}.weight", (HIDDEN_SIZE,)
        attention = f"{prefix}.self_attn"
        yield f"{attention}.q_proj.weight", (NUM_HEADS * (NOPE_SIZE + ROPE_SIZE), HIDDEN_SIZE)
        yield f"{attention}.kv_a_proj_with_mqa.weight", (LATENT_SIZE + ROPE_SIZE, HIDDEN_SIZE)
        yield f"{attention}.kv_a_layernorm.weight", (LATENT_SIZE,)
        yield f"{attention}.kv_b_proj.weight", (NUM_HEADS * (NOPE_SIZE + VALUE_SIZE), LATENT_SIZE)
        yield f"{attention}.o_proj.weight", (HIDDEN_SIZE, NUM_HEADS * VALUE_SIZE)
        for part in ("gate_proj", "up_proj"):
            yield f"{prefix}.mlp.{part}.weight", (INTERMEDIATE_SIZE, HIDDEN_SIZE)
        yield f"{prefix}.mlp.down_proj.weight", (HIDDEN_SIZE, INTERMEDIATE_SIZE)
    yield "model.norm.weight", (HIDDEN_SIZE,)
    yield "lm_head.weight", (VOCAB_SIZE, HIDDEN_SIZE)


def _weight(name: str, shape: tuple[int, ...]) -> NDArray[np.float32]:
    """Return one tensor: a norm of ones, or a matrix of uniform 16-bit integers, scaled."""
    if len(shape) == 1:
        return np.ones(shape, np.float32)
    drawn = hashlib.shake_256(f"{SEED} {name}".encode()).digest(2 * math.prod(shape))
    # A uniform integer of n values has the mean (n - 1) / 2 and the variance (n^2 - 1) / 12.
    centred = np.frombuffer(drawn, "<u2").astype(np.float64) - (2**16 - 1) / 2
    scale = _std(name, shape[1]) / math.sqrt((2**32 - 1) / 12)
    return (centred * scale).astype(np.float32).reshape(shape)


def _std(name: str, num_inputs: int) -> float:
    if "embed_tokens" in name:
        return EMBEDDING_RMS
    gain = QUERY_GAIN if "q_proj" in name else MLP_GAIN if "mlp" in name else 1.0
    return gain / math.sqrt(num_inputs)
