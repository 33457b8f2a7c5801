"""Adapters of the exactness model."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from lab.models import HEAD_DIM, HIDDEN_SIZE, MLP_GAIN, NUM_KV_HEADS, NUM_LAYERS

RANK = 8
OUTPUTS = {"q_proj": HIDDEN_SIZE, "v_proj": NUM_KV_HEADS * HEAD_DIM}


def save_adapter(directory: Path) -> None:
    """Save a LoRA adapter that moves queries and values of every layer."""
    generator = torch.Generator().manual_seed(7)
    weights = {}
    for layer in range(NUM_LAYERS):
        for name, num_outputs in OUTPUTS.items():
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            for part, shape in (("A", (RANK, HIDDEN_SIZE)), ("B", (num_outputs, RANK))):
                drawn = torch.randn(shape, generator=generator) * MLP_GAIN / shape[1] ** 0.5
                weights[f"{prefix}.lora_{part}.weight"] = drawn
    save_file(weights, directory / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": 4 * RANK}
    config |= {"target_modules": list(OUTPUTS), "bias": "none", "base_model_name_or_path": ""}
    (directory / "adapter_config.json").write_text(json.dumps(config))
