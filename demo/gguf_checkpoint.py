"""A llama-type GGUF file as a checkpoint that transformers and vLLM load."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader, TokenType
from gguf.quants import dequantize
from numpy.typing import NDArray
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

# GGUF's name of a tensor -> the checkpoint's; of a layer's, the part after "blk.N.".
OUTER_TENSORS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class CheckpointError(Exception):
    """The file is not what this can convert; the message says what it is."""


class GGUFCheckpoint:
    """One GGUF file, opened."""

    def __init__(self, path: Path) -> None:
        self._reader = GGUFReader(path)
        architecture = self._value("general.architecture")
        tokens = self._value("tokenizer.ggml.model")
        if (architecture, tokens) != ("llama", "gpt2"):
            raise CheckpointError(f"{path.name}: {architecture} with {tokens} tokens")
        self.tokens: list[str] = self._value("tokenizer.ggml.tokens")

    def config(self) -> dict[str, Any]:
        """Return config.json's content."""
        shape = {
            name: self._value(f"llama.{key}")
            for name, key in {
                "num_hidden_layers": "block_count",
                "max_position_embeddings": "context_length",
                "hidden_size": "embedding_length",
                "intermediate_size": "feed_forward_length",
                "num_attention_heads": "attention.head_count",
                "num_key_value_heads": "attention.head_count_kv",
                "vocab_size": "vocab_size",
            }.items()
        }
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "dtype": "bfloat16",
            "hidden_act": "silu",
            # A 32-bit number: digits beyond its precision are not part of it.
            "rms_norm_eps": float(f"{self._value('llama.attention.layer_norm_rms_epsilon'):.6g}"),
            "rope_theta": self._value("llama.rope.freq_base"),
            "head_dim": self._value("llama.rope.dimension_count"),
            "tie_word_embeddings": "output.weight" not in {t.name for t in self._reader.tensors},
            "bos_token_id": self._value("tokenizer.ggml.bos_token_id"),
            "eos_token_id": self._value("tokenizer.ggml.eos_token_id"),
            "pad_token_id": self._value("tokenizer.ggml.padding_token_id"),
            **shape,
        }

    def weights(self, report: Callable[[int, int], None]) -> dict[str, NDArray[np.float32]]:
        """Return every tensor by its name in the checkpoint; `report` gets how many are done."""
        weights, tensors = {}, self._reader.tensors
        for done, tensor in enumerate(tensors, start=1):
            values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
            if ".attn_q." in tensor.name:
                values = _halves(values, self._value("llama.attention.head_count"))
            elif ".attn_k." in tensor.name:
                values = _halves(values, self._value("llama.attention.head_count_kv"))
            weights[_checkpoint_name(tensor.name)] = values
            report(done, len(tensors))
        return weights

    def tokenizer(self) -> Tokenizer:
        """Return the byte-level BPE tokenizer; digits stand alone."""
        merges = [tuple(merge.split(" ")) for merge in self._value("tokenizer.ggml.merges")]
        vocabulary = {token: id_ for id_, token in enumerate(self.tokens)}
        tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False),
            ]
        )
        tokenizer.decoder = decoders.ByteLevel()
        types = self._value("tokenizer.ggml.token_type")
        tokenizer.add_special_tokens(
            [
                AddedToken(token, special=True, normalized=False)
                for token, type_ in zip(self.tokens, types, strict=True)
                if type_ == TokenType.CONTROL
            ]
        )
        return tokenizer

    def save_tokenizer(self, directory: Path, *, chat_template: str) -> None:
        """Write the files from which transformers and vLLM load tokenizer and template."""
        self.tokenizer().save(str(directory / "tokenizer.json"))
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": self.tokens[self._value("tokenizer.ggml.bos_token_id")],
            "eos_token": self.tokens[self._value("tokenizer.ggml.eos_token_id")],
            "pad_token": self.tokens[self._value("tokenizer.ggml.padding_token_id")],
            "model_max_length": self._value("llama.context_length"),
            "clean_up_tokenization_spaces": False,
            "chat_template": chat_template,
        }
        (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=1))

    @property
    def chat_template(self) -> str:
        return str(self._value("tokenizer.chat_template"))

    def _value(self, key: str) -> Any:
        field = self._reader.fields.get(key)
        if field is None:
            raise CheckpointError(f"the file says no {key}")
        return field.contents()


def _checkpoint_name(name: str) -> str:
    if name in OUTER_TENSORS:
        return OUTER_TENSORS[name]
    _, layer, part, kind = name.split(".")
    return f"model.layers.{layer}.{LAYER_TENSORS[part]}.{kind}"


def _halves(weights: NDArray[np.float32], num_heads: int) -> NDArray[np.float32]:
    """Return rows `[num_heads * head_dim, hidden]` as a checkpoint orders them.

    GGUF puts the two rows that rotary embedding turns together next to each other; a checkpoint
    puts the first of every pair into a head's first half, the second into its second.
    """
    rows, columns = weights.shape
    pairs = weights.reshape(num_heads, rows // num_heads // 2, 2, columns)
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(rows, columns))
