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
from lab.chat_tokenizer import SPECIAL_TOKENS

NUM_HEADS, HEAD_DIM = 16, 128
CONFIG = {
    **models.CONFIG,
    "dtype": "bfloat16",
    "hidden_size": NUM_HEADS * HEAD_DIM,
    "intermediate_size": 4_096,
    "num_hidden_layers": 16,
    "num_attention_heads": NUM_HEADS,
    "num_key_value_heads": 8,
    "head_dim": HEAD_DIM,
}


def gpu_model() -> Path:
    """Return the model's directory, building it first if it is not there."""
    fingerprint = recipe_fingerprint(sys.modules[__name__], models)
    return build_once(MODELS_ROOT / "exactness-gpu", fingerprint, _build)


def _build(directory: Path) -> None:
    models.write_tokenizer(directory)
    rng = np.random.default_rng(2026)
    weights = {name: _weight(rng, name, shape) for name, shape in models.tensor_shapes(CONFIG)}
    weights["lm_head.weight"][: len(SPECIAL_TOKENS)] = 0
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(CONFIG, indent=1))


def _weight(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> torch.Tensor:
    if len(shape) == 1:
        return torch.ones(shape, dtype=torch.bfloat16)
    drawn = rng.standard_normal(math.prod(shape), dtype=np.float32).reshape(shape)
    return torch.from_numpy(drawn).mul_(models.weight_std(name, shape[1])).to(torch.bfloat16)
