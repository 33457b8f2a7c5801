"""A config.json, read by the names that models give the same figure."""

from collections.abc import Mapping
from typing import Any

from services.placement.layer_kinds import text_config

# What config.json of these leaves out, where it is not what most models have.
LEFT_OUT: Mapping[str, Mapping[str, Any]] = {
    "gemma2": {"tie_word_embeddings": True},
    "gemma3_text": {
        "num_attention_heads": 8,
        "vocab_size": 262_208,
        "max_position_embeddings": 131_072,
        "tie_word_embeddings": True,
    },
    "cohere": {"tie_word_embeddings": True},
    "cohere2": {"tie_word_embeddings": True},
    "nemotron_h": {"mamba_ssm_cache_dtype": "float32"},
}
ELEMENT_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


class Config:
    """The part of a config.json that describes the language model."""

    def __init__(self, whole: Mapping[str, Any]) -> None:
        text = text_config(whole)
        self.model_type = str(text.get("model_type") or whole.get("model_type") or "")
        self.has_other_parts = any(name in whole for name in ("vision_config", "audio_config"))
        of_the_whole = ("dtype", "torch_dtype", "quantization_config", "tie_word_embeddings")
        shared = {name: whole[name] for name in of_the_whole if name in whole}
        self.text: Mapping[str, Any] = {**LEFT_OUT.get(self.model_type, {}), **shared, **text}

    def get(self, *names: str) -> Any:
        """Return what stands under the first of these names that has anything; None: nothing."""
        return next((self.text[one] for one in names if self.text.get(one) is not None), None)

    def number(self, *names: str) -> int:
        """Return a count. Raises ValueError where none of the names has one."""
        found = self.get(*names)
        if not isinstance(found, int):
            raise ValueError(f"config.json does not state {' or '.join(names)}")
        return found

    def number_or(self, default: int, *names: str) -> int:
        """Return a count, `default` where it is not stated."""
        found = self.get(*names)
        return found if isinstance(found, int) else default

    def element_bytes(self, *names: str) -> int:
        """Return the size of an element of a stated type; of none, of 16 bits."""
        return ELEMENT_BYTES.get(str(self.get(*names)).removeprefix("torch."), 2)

    @property
    def hidden_size(self) -> int:
        return self.number("hidden_size", "n_embd", "d_model")

    @property
    def num_layers(self) -> int:
        return self.number("num_hidden_layers", "n_layer", "num_layers")

    @property
    def num_heads(self) -> int:
        return self.number("num_attention_heads", "n_head")

    @property
    def model_bytes(self) -> int:
        """Return the size of an element of what is not quantised, and of KV."""
        return self.element_bytes("dtype", "torch_dtype")
