"""The exactness model's recipe at the size of a GPU's kernels: written once per machine.

Drawn by numpy, not to the byte the same everywhere: what is compared ran on one machine.
"""

import json
import math
import sys
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from demo.cached_build import MODELS_ROOT, build_once, recipe_fingerprint
from lab import models
from lab.chat_tokenizer import SPECIAL_TOKENS, save_tokenizer, train_tokenizer
from lab.made_up_text import paragraphs

NUM_LAYERS, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 16, 16, 8, 128
HIDDEN_SIZE, INTERMEDIATE_SIZE = NUM_HEADS * HEAD_DIM, 4_096


def gpu_model() -> Path:
    """Return the model's directory, building it first if it is not there."""
    fingerprint = recipe_fingerprint(sys.modules[__name__], models)
    return build_once(MODELS_ROOT / "exactness-gpu", fingerprint, _build)


def _build(directory: Path) -> None:
    tokenizer = train_tokenizer(paragraphs(models.SEED), vocab_size=models.VOCAB_SIZE)
    save_tokenizer(
        tokenizer,
        directory,
        max_model_len=models.MAX_MODEL_LEN,
        chat_template=models.CHAT_TEMPLATE,
    )
    rng = np.random.default_rng(2026)
    weights = {name: _weight(rng, name, shape) for name, shape in _shapes().items()}
    weights["lm_head.weight"][: len(SPECIAL_TOKENS)] = 0
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(_config(), indent=1))


def _config() -> dict[str, object]:
    return {
        **models.CONFIG,
        "dtype": "bfloat16",
        "hidden_size": HIDDEN_SIZE,
        "intermediate_size": INTERMEDIATE_SIZE,
        "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": NUM_HEADS,
        "num_key_value_heads": NUM_KV_HEADS,
        "head_dim": HEAD_DIM,
    }


def _shapes() -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor; matrices are `[outputs, inputs]`."""
    kv_size = NUM_KV_HEADS * HEAD_DIM
    layer = {
        "input_layernorm": (HIDDEN_SIZE,),
        "post_attention_layernorm": (HIDDEN_SIZE,),
        "self_attn.q_proj": (HIDDEN_SIZE, HIDDEN_SIZE),
        "self_attn.k_proj": (kv_size, HIDDEN_SIZE),
        "self_attn.v_proj": (kv_size, HIDDEN_SIZE),
        "self_attn.o_proj": (HIDDEN_SIZE, HIDDEN_SIZE),
        "mlp.gate_proj": (INTERMEDIATE_SIZE, HIDDEN_SIZE),
        "mlp.up_proj": (INTERMEDIATE_SIZE, HIDDEN_SIZE),
        "mlp.down_proj": (HIDDEN_SIZE, INTERMEDIATE_SIZE),
    }
    return {
        "model.embed_tokens.weight": (models.VOCAB_SIZE, HIDDEN_SIZE),
        **{
            f"model.layers.{number}.{name}.weight": shape
            for number in range(NUM_LAYERS)
            for name, shape in layer.items()
        },
        "model.norm.weight": (HIDDEN_SIZE,),
        "lm_head.weight": (models.VOCAB_SIZE, HIDDEN_SIZE),
    }


def _weight(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> torch.Tensor:
    if len(shape) == 1:
        return torch.ones(shape, dtype=torch.bfloat16)
    drawn = rng.standard_normal(math.prod(shape), dtype=np.float32).reshape(shape)
    return torch.from_numpy(drawn).mul_(models._std(name, shape[1])).to(torch.bfloat16)
