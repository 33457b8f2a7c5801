"""The exactness model: untrained, and sensitive to every KV block.

`python -m lab.models` builds it; `exactness_model()` returns its directory.

A trained or plainly initialised model gives the same answer from half of all wrong KV blocks, so
that a test on its tokens proves little. Here every weight matrix is drawn so that

- attention is peaked: logits q.k / sqrt(head_dim) have a standard deviation near 3,
- what attention reads dominates what a layer adds to the residual stream,
- the newest token's own embedding stays visible, so that answers keep varying,

and a wrong block changes the greedy tokens that follow. The output rows of special tokens are
zero, so that greedy answers never end before `max_tokens`.

It is the same to the byte on every machine: SHAKE-256 draws it, and what follows are sums of
integers and operations that IEEE 754 rounds in one way only.
"""

import hashlib
import json
import math
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

import lab.chat_tokenizer
import lab.made_up_text
from demo.cached_build import MODELS_ROOT, build_once, recipe_fingerprint
from lab.chat_tokenizer import (
    BEGIN_ID,
    END_ID,
    SPECIAL_TOKENS,
    save_tokenizer,
    train_tokenizer,
)
from lab.made_up_text import paragraphs

NUM_LAYERS = 8
NUM_HEADS = 6
NUM_KV_HEADS = 2
HEAD_DIM = 32
HIDDEN_SIZE = NUM_HEADS * HEAD_DIM
INTERMEDIATE_SIZE = 512
VOCAB_SIZE = 2_048
MAX_MODEL_LEN = 8_192
SEED = "2026"

# Gain of a matrix: RMS of its output for an input of RMS 1, as the RMSNorm before it gives.
QUERY_KEY_GAIN = 1.75  # logits q.k / sqrt(head_dim) then have a deviation of 1.75^2 = 3.1
VALUE_GAIN = 1.0
OUTPUT_GAIN = 1.0
MLP_GAIN = 0.3  # silu(gate) * up of 0.3 each: small beside attention
EMBEDDING_RMS = 1.0  # as large as one layer's addition: smaller, and answers fall into loops

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "dtype": "float32",
    "hidden_act": "silu",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": HIDDEN_SIZE,
    "intermediate_size": INTERMEDIATE_SIZE,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": NUM_HEADS,
    "num_key_value_heads": NUM_KV_HEADS,
    "head_dim": HEAD_DIM,
    "max_position_embeddings": MAX_MODEL_LEN,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "bos_token_id": BEGIN_ID,
    "eos_token_id": END_ID,
    "tie_word_embeddings": False,
}

# Plain to read in a test, and with an effort.
CHAT_TEMPLATE = (
    "{{ bos_token }}{% if tools %}{{ '<|system|>' }}"
    "{% for tool in tools %}{{ 'Function ' + (tool.function | tojson) + '. ' }}{% endfor %}"
    "{{ eos_token }}{% endif %}"
    "{% for message in messages %}"
    "{% if message.role == 'tool' %}"
    "{{ '<|user|>Result of ' + message.tool_call_id + ': ' + message.content + eos_token }}"
    "{% else %}"
    "{{ '<|' + message.role.replace('developer', 'system') + '|>' + (message.content or '') }}"
    "{% for call in message.tool_calls or [] %}"
    "{{ ' Call ' + call.id + ': ' + call.function.name + (call.function.arguments | tojson) }}"
    "{% endfor %}{{ eos_token }}"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}"
    "{% if reasoning_effort %}{{ 'Effort: ' + reasoning_effort + '. ' }}{% endif %}{% endif %}"
)


def exactness_model() -> Path:
    """Return the model's directory, building it first if it is not there (seconds)."""
    return build_once(MODELS_ROOT / "exactness", exactness_fingerprint(), build_exactness_model)


def exactness_fingerprint() -> str:
    """Hash everything that the model is made of: this module and the two that write its tokens."""
    return recipe_fingerprint(sys.modules[__name__], lab.chat_tokenizer, lab.made_up_text)


def build_exactness_model(directory: Path) -> None:
    """Write the checkpoint into an empty directory."""
    write_tokenizer(directory)
    weights = {name: _weight(name, shape) for name, shape in tensor_shapes(CONFIG)}
    weights["lm_head.weight"][: len(SPECIAL_TOKENS)] = 0
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(CONFIG, indent=1))


def write_tokenizer(directory: Path) -> None:
    save_tokenizer(
        train_tokenizer(paragraphs(SEED), vocab_size=VOCAB_SIZE),
        directory,
        max_model_len=MAX_MODEL_LEN,
        chat_template=CHAT_TEMPLATE,
    )


def tensor_shapes(config: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the shape of every tensor of a Llama; matrices are `[outputs, inputs]`."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    kv_size = config["num_key_value_heads"] * config["head_dim"]
    yield "model.embed_tokens.weight", (config["vocab_size"], hidden)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield f"{prefix}.{norm}.weight", (hidden,)
        for part in ("q_proj", "o_proj"):
            yield f"{prefix}.self_attn.{part}.weight", (hidden, hidden)
        for part in ("k_proj", "v_proj"):
            yield f"{prefix}.self_attn.{part}.weight", (kv_size, hidden)
        for part in ("gate_proj", "up_proj"):
            yield f"{prefix}.mlp.{part}.weight", (inner, hidden)
        yield f"{prefix}.mlp.down_proj.weight", (hidden, inner)
    yield "model.norm.weight", (hidden,)
    yield "lm_head.weight", (config["vocab_size"], hidden)


def _weight(name: str, shape: tuple[int, ...]) -> NDArray[np.float32]:
    """Return one tensor: a norm of ones, or a matrix of sums of four uniform 16-bit integers."""
    if len(shape) == 1:
        return np.ones(shape, np.float32)
    size = math.prod(shape)
    drawn = hashlib.shake_256(f"{SEED} {name}".encode()).digest(8 * size)
    sums = np.frombuffer(drawn, "<u2").reshape(size, 4).sum(axis=1, dtype=np.int64)
    # A uniform integer of n values has the mean (n - 1) / 2 and the variance (n^2 - 1) / 12.
    centred = (sums - 4 * (2**16 - 1) // 2).astype(np.float64)
    scale = weight_std(name, shape[1]) / math.sqrt(4 * (2**32 - 1) / 12)
    return (centred * scale).astype(np.float32).reshape(shape)


def weight_std(name: str, num_inputs: int) -> float:
    """Return the deviation of one matrix's entries: gain / sqrt(number of inputs)."""
    if "embed_tokens" in name:
        return EMBEDDING_RMS
    if "q_proj" in name or "k_proj" in name:
        gain = QUERY_KEY_GAIN
    elif "v_proj" in name:
        gain = VALUE_GAIN
    elif "o_proj" in name:
        gain = OUTPUT_GAIN
    elif "mlp" in name:
        gain = MLP_GAIN
    else:
        gain = 1.0
    return gain / math.sqrt(num_inputs)


if __name__ == "__main__":
    print(f"exactness model: {exactness_model()}")
