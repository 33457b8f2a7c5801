"""Drafts for the exactness model, made of its own first layers: they guess right now and then."""

import json
import shutil
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from lab.models import CONFIG, HIDDEN_SIZE, exactness_model

Weights = dict[str, NDArray[np.float32]]


def save_draft_model(directory: Path, *, num_layers: int) -> None:
    """Save the model's first layers as a model of their own."""
    weights = load_file(exactness_model() / "model.safetensors")
    _save(directory, {k: v for k, v in weights.items() if _layer(k) < num_layers}, num_layers)


def save_eagle_head(directory: Path) -> None:
    """Save the model's first layer as an EAGLE head, which goes on from the model's last states."""
    passed_on = np.zeros((HIDDEN_SIZE, 2 * HIDDEN_SIZE), np.float32)  # of embedding and state
    passed_on[:, :HIDDEN_SIZE] = np.eye(HIDDEN_SIZE)
    weights: Weights = {"fc.weight": passed_on}
    for name, weight in load_file(exactness_model() / "model.safetensors").items():
        if name.startswith("model.layers.0.") and "input_layernorm" not in name:
            weights[name.removeprefix("model.")] = weight
    _save(directory, weights, 1)


def _layer(name: str) -> int:
    """Return a weight's layer; what is in no layer is needed from the first one on."""
    parts = name.split(".")
    return int(parts[2]) if parts[1] == "layers" else -1


def _save(directory: Path, weights: Weights, num_layers: int) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(exactness_model() / name, directory / name)
    config = {**CONFIG, "num_hidden_layers": num_layers}
    (directory / "config.json").write_text(json.dumps(config))
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
