"""A llama of two layers as a GGUF file, written as llama.cpp's converter writes one."""

import json
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, TokenType
from gguf.quants import quantize
from numpy.typing import NDArray
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

NUM_LAYERS, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, INNER = 2, 4, 2, 16, 96
HIDDEN = NUM_HEADS * HEAD_DIM
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
Matrix = NDArray[np.float32]


def make_vocabulary() -> tuple[list[str], list[str]]:
    """Return a byte-level vocabulary in the order of its ids, and its merges."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=290,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the rain in 1234 1234 1234, the train in the drain"], trainer)
    model = json.loads(tokenizer.to_str())["model"]
    return sorted(model["vocab"], key=model["vocab"].get), [" ".join(m) for m in model["merges"]]


TOKENS, MERGES = make_vocabulary()


def make_weights(*, tied: bool = True) -> dict[str, Matrix]:
    """Return a checkpoint's tensors by their names, random."""
    draw = np.random.default_rng(3)
    kv_rows = NUM_KV_HEADS * HEAD_DIM
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (len(TOKENS), HIDDEN),
        "model.norm.weight": (HIDDEN,),
    }
    if not tied:
        shapes["lm_head.weight"] = (len(TOKENS), HIDDEN)
    for layer in range(NUM_LAYERS):
        for name, shape in {
            "input_layernorm": (HIDDEN,),
            "self_attn.q_proj": (HIDDEN, HIDDEN),
            "self_attn.k_proj": (kv_rows, HIDDEN),
            "self_attn.v_proj": (kv_rows, HIDDEN),
            "self_attn.o_proj": (HIDDEN, HIDDEN),
            "post_attention_layernorm": (HIDDEN,),
            "mlp.gate_proj": (INNER, HIDDEN),
            "mlp.up_proj": (INNER, HIDDEN),
            "mlp.down_proj": (HIDDEN, INNER),
        }.items():
            shapes[f"model.layers.{layer}.{name}.weight"] = shape
    return {name: draw.standard_normal(shape, np.float32) for name, shape in shapes.items()}


def quantisation(name: str) -> GGMLQuantizationType:
    if "norm" in name:
        return GGMLQuantizationType.F32
    if "embed_tokens" in name or "lm_head" in name:
        return GGMLQuantizationType.Q8_0
    return GGMLQuantizationType.Q4_1


def gguf_name(name: str) -> str:
    """Return llama.cpp's name of a checkpoint's tensor."""
    parts = {
        "model.embed_tokens": "token_embd",
        "model.norm": "output_norm",
        "lm_head": "output",
        "model.layers.": "blk.",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    }
    for ours, theirs in parts.items():
        name = name.replace(ours, theirs)
    return name


def permuted(name: str, values: Matrix) -> Matrix:
    """Put query and key rows into GGUF's order, as llama.cpp's converter does."""
    num_heads = {"q_proj": NUM_HEADS, "k_proj": NUM_KV_HEADS}.get(name.split(".")[-2])
    if num_heads is None:
        return values
    halves = values.reshape(num_heads, 2, HEAD_DIM // 2, HIDDEN)
    return halves.swapaxes(1, 2).reshape(values.shape)


def write_gguf(
    path: Path,
    weights: dict[str, Matrix],
    *,
    architecture: str = "llama",
    tokens: str = "gpt2",
    says_pad_token: bool = True,
) -> Path:
    writer = GGUFWriter(path, architecture)
    writer.add_block_count(NUM_LAYERS)
    writer.add_context_length(256)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(NUM_HEADS)
    writer.add_head_count_kv(NUM_KV_HEADS)
    writer.add_vocab_size(len(TOKENS))
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(100_000.0)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_tokenizer_model(tokens)
    writer.add_token_list(TOKENS)
    writer.add_token_merges(MERGES)
    writer.add_token_types(
        [TokenType.CONTROL if t in SPECIAL_TOKENS else TokenType.NORMAL for t in TOKENS]
    )
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    if says_pad_token:
        writer.add_pad_token_id(2)
    writer.add_chat_template("{{ messages }}")
    for name, values in weights.items():
        kind = quantisation(name)
        writer.add_tensor(gguf_name(name), quantize(permuted(name, values), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
