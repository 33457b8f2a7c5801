"""What each layer of a model keeps of the tokens it has seen, read from a `config.json`.

The same models name it in many ways: a list with a word per layer, a pattern that repeats, a
period, the last layer that is unlike. What a file leaves out is what its family has by itself.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

Config = Mapping[str, Any]


class LayerKind(StrEnum):
    """What a layer keeps, in words for people."""

    FULL = "full attention"  # K and V of every token
    LATENT = "MLA"  # one latent vector of every token, whatever the heads
    WINDOW = "sliding windows"  # K and V of the last tokens
    CHUNK = "chunked local attention"  # K and V of the tokens since the last multiple of a length
    STATE = "states"  # as much for any number of tokens: Mamba, delta nets, convolutions
    FULL_AND_STATE = "attention and a state in one layer"
    SPARSE = "sparse attention"  # every token's, of which a step reads a few: DSA, CSA
    NOTHING = "no KV"  # a feed-forward network alone
    UNKNOWN = "layers of a kind that is not known"


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """What one layer keeps."""

    kind: LayerKind
    num_kv_heads: int = 0  # over all tensor-parallel ranks; 1 of a latent, which each rank has
    head_size: int = 0  # values of K per head and token; of a latent vector as a whole
    v_head_size: int = 0  # values of V; 0 of a latent, which is both
    window: int | None = None  # tokens, of `WINDOW` and `CHUNK`
    reads_anothers: bool = False  # KV, and keeps none

    @property
    def token_values(self) -> int:
        """Return how many values a token that is kept takes, over all tensor-parallel ranks."""
        if self.reads_anothers:
            return 0
        return self.num_kv_heads * (self.head_size + self.v_head_size)


# Words of `layer_types` and its like.
KINDS = {
    "full_attention": LayerKind.FULL,
    "attention": LayerKind.FULL,
    "sliding_attention": LayerKind.WINDOW,
    "chunked_attention": LayerKind.CHUNK,
    "linear_attention": LayerKind.STATE,
    "mamba": LayerKind.STATE,
    "conv": LayerKind.STATE,
    "recurrent": LayerKind.STATE,
    "hybrid": LayerKind.FULL_AND_STATE,
    "hybrid_sliding": LayerKind.FULL_AND_STATE,
    "indexed_attention": LayerKind.SPARSE,
    "deepseek_sparse_attention": LayerKind.SPARSE,
    "qwen_sparse_attention": LayerKind.SPARSE,
    "compressed_sparse_attention": LayerKind.SPARSE,
    "heavily_compressed_attention": LayerKind.SPARSE,
    "minimax_m3_sparse": LayerKind.SPARSE,
    "moe": LayerKind.NOTHING,
    "mlp": LayerKind.NOTHING,
}
LETTERS = {  # of a `hybrid_override_pattern`, and of a `sliding_window_pattern`
    "M": LayerKind.STATE,
    "*": LayerKind.FULL,
    "-": LayerKind.NOTHING,
    "E": LayerKind.NOTHING,
    "L": LayerKind.WINDOW,
    "G": LayerKind.FULL,
}
# Every n-th layer has full attention, the others what is named, where the file has no list.
PERIODS = {
    "gemma2": (2, LayerKind.WINDOW),
    "gpt_oss": (2, LayerKind.WINDOW),
    "cohere2": (4, LayerKind.WINDOW),
    "exaone4": (4, LayerKind.WINDOW),
    "olmo3": (4, LayerKind.WINDOW),
    "gemma3n_text": (5, LayerKind.WINDOW),
    "gemma3_text": (6, LayerKind.WINDOW),
    "gemma4_text": (6, LayerKind.WINDOW),
    "gemma4_unified_text": (6, LayerKind.WINDOW),
    "llama4_text": (4, LayerKind.CHUNK),
    "qwen3_next": (4, LayerKind.STATE),
    "qwen3_5_text": (4, LayerKind.STATE),
    "qwen3_5_moe_text": (4, LayerKind.STATE),
}
# What a family has where the file has nothing.
DEFAULTS: dict[str, dict[str, Any]] = {
    "gemma2": {"sliding_window": 4096},
    "gpt_oss": {"sliding_window": 128},
    "cohere2": {"sliding_window": 4096},
    "olmo3": {"sliding_window": 4096},
    "gemma3_text": {
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "sliding_window": 4096,
    },
    "gemma3n_text": {"num_kv_shared_layers": 15, "sliding_window": 512, "head_dim": 256},
    "gemma4_text": {"sliding_window": 512, "head_dim": 256, "global_head_dim": 512},
    "gemma4_unified_text": {"sliding_window": 512, "head_dim": 256, "global_head_dim": 512},
    "llama4_text": {"attention_chunk_size": 8192},
    "jamba": {"attn_layer_period": 8, "attn_layer_offset": 4},
    "falcon_h1": {"layers_block_type": "hybrid"},
    "mamba": {"layers_block_type": "mamba"},
    "mamba2": {"layers_block_type": "mamba"},
    "falcon_mamba": {"layers_block_type": "mamba"},
}
KEEPS_HEADS = {"minicpm3"}  # has a `kv_lora_rank` for its weights, and K and V in its cache
NUM_LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
HIDDEN_SIZE = ("hidden_size", "n_embd", "d_model")
NUM_HEADS = ("num_attention_heads", "n_head", "n_heads")
NUM_KV_HEADS = (
    "num_key_value_heads",
    "num_kv_heads",
    "n_head_kv",
    "multi_query_group_num",
    "num_attention_groups",
)
HEAD_SIZE = ("head_dim", "hidden_size_per_head", "attention_head_dim", "kv_channels")


def text_config(config: Config) -> Config:
    """Return the part of a `config.json` that is of the language model."""
    for name in ("text_config", "llm_config", "language_config", "thinker_config"):
        if isinstance(part := config.get(name), Mapping):
            return text_config(part)
    return config


def layers_of(config: Config) -> tuple[Layer, ...]:
    """Return a model's layers in their order. Raises ValueError where the file says too little."""
    text = text_config(config)
    defaults = DEFAULTS.get(str(text.get("model_type")), {})
    stated = {name: value for name, value in text.items() if value is not None}
    try:
        return _layers({**defaults, **stated})
    except (AttributeError, IndexError, KeyError, TypeError) as error:
        raise ValueError(f"config.json is not understood: {error!r}") from error


def as_used(layers: Sequence[Layer], *, max_model_len: int | None) -> tuple[Layer, ...]:
    """Return layers as contexts of that length use them: a window that holds all is none."""
    return tuple(
        replace(layer, kind=LayerKind.FULL, window=None)
        if layer.window and max_model_len and max_model_len <= layer.window
        else layer
        for layer in layers
    )


def _layers(text: Config) -> tuple[Layer, ...]:
    kinds = _kinds(text)
    num_sharing = int(text.get("num_kv_shared_layers", 0))
    return tuple(
        replace(_layer(text, kind, number), reads_anothers=number >= len(kinds) - num_sharing)
        for number, kind in enumerate(kinds)
    )


def _kinds(text: Config) -> list[LayerKind]:
    named = text.get("layers_block_type") or text.get("hybrid_override_pattern") or ()
    num_layers = int(_first(text, NUM_LAYERS, len(named) or None))
    kinds = next(kinds for rule in RULES if (kinds := rule(text, num_layers)))[:num_layers]
    if len(kinds) < num_layers:
        raise ValueError(f"config.json names {len(kinds)} of {num_layers} layers")
    return [_as_it_is(text, kind) for kind in kinds]


def _as_it_is(text: Config, kind: LayerKind) -> LayerKind:
    """Return a kind after what the rest of the file says of it."""
    if kind is LayerKind.WINDOW and not _window(text):
        kind = LayerKind.FULL
    if kind is LayerKind.CHUNK and not text.get("attention_chunk_size"):
        kind = LayerKind.FULL
    if kind is LayerKind.FULL and "index_topk" in text:
        return LayerKind.SPARSE
    if kind is LayerKind.FULL and _has_latents(text):
        return LayerKind.LATENT
    return kind


def _has_latents(text: Config) -> bool:
    return "kv_lora_rank" in text and text.get("model_type") not in KEEPS_HEADS


def _window(text: Config) -> int:
    if text.get("use_sliding_window", True) is False:
        return 0
    return int(_first(text, ("sliding_window", "attention_window_size"), 0))


def _by_words(text: Config, num_layers: int) -> list[LayerKind]:
    words = text.get("layer_types") or text.get("layers_block_type") or text.get("block_types", [])
    if isinstance(words, str):
        words = [words]
    if words and len(words) < num_layers and "layer_types" not in text:
        words = [words[number % len(words)] for number in range(num_layers)]
    return [KINDS.get(word, LayerKind.UNKNOWN) for word in words]


def _by_letters(text: Config, num_layers: int) -> list[LayerKind]:
    letters = text.get("hybrid_override_pattern", "")
    if not letters and isinstance(pattern := text.get("sliding_window_pattern"), str):
        letters = (pattern * num_layers)[: num_layers - 1] + "G"  # whatever the pattern, the last
    return [LETTERS.get(letter, LayerKind.UNKNOWN) for letter in letters]


def _by_numbers(text: Config, num_layers: int) -> list[LayerKind]:
    """A number per layer says what it has, or a list has the numbers of some layers."""
    if flags := text.get("hybrid_layer_pattern"):
        return [LayerKind.WINDOW if flag else LayerKind.FULL for flag in flags]
    if flags := text.get("attn_type_list"):
        return [LayerKind.FULL if flag else LayerKind.STATE for flag in flags]
    if flags := text.get("sparse_attention_config", {}).get("sparse_attention_freq"):
        return [LayerKind.SPARSE if flag else LayerKind.FULL for flag in flags]
    if flags := text.get("no_rope_layers"):  # as Llama 4 names it: 1 has rotary positions
        return [LayerKind.CHUNK if flag else LayerKind.FULL for flag in flags]
    if "compress_ratios" in text:
        return [LayerKind.SPARSE] * num_layers
    full = text.get("attn_layer_indices") or text.get("full_attn_idxs")
    if from_one := text.get("linear_attn_config", {}).get("full_attn_layers"):
        full = [number - 1 for number in from_one]
    if full is None:
        return []
    return [LayerKind.FULL if n in full else LayerKind.STATE for n in range(num_layers)]


def _by_period(text: Config, num_layers: int) -> list[LayerKind]:
    """Every n-th layer is unlike the others: the last of each n, unless an offset is told."""
    period, others = PERIODS.get(str(text.get("model_type")), (0, LayerKind.WINDOW))
    if isinstance(stated := text.get("sliding_window_pattern"), int):
        period = stated
    if stated := text.get("full_attention_interval") or text.get("layer_group_size"):
        period, others = int(stated), LayerKind.STATE
    offset = period - 1
    if stated := text.get("attn_layer_period"):
        period, others, offset = int(stated), LayerKind.STATE, int(text["attn_layer_offset"])
    if not period:
        return []
    return [others if n % period != offset else LayerKind.FULL for n in range(num_layers)]


def _above_a_layer(text: Config, num_layers: int) -> list[LayerKind]:
    """The first layers have full attention, the others a window where the model has one."""
    num_full = int(text.get("max_window_layers", 0))
    return [LayerKind.FULL if n < num_full else LayerKind.WINDOW for n in range(num_layers)]


def _by_blocks(text: Config, num_layers: int) -> list[LayerKind]:
    """Each layer has a description of its own, and some have no attention (Nemotron NAS)."""
    attention = [block.get("attention") or {} for block in text.get("block_configs", [])]
    return [
        LayerKind.NOTHING
        if block.get("no_op") or block.get("replace_with_linear")
        else LayerKind.FULL
        for block in attention
    ]


RULES: Sequence[Callable[[Config, int], list[LayerKind]]] = (
    _by_words,
    _by_letters,
    _by_numbers,
    _by_blocks,
    _by_period,
    _above_a_layer,
)


def _layer(text: Config, kind: LayerKind, number: int) -> Layer:
    if kind in (LayerKind.STATE, LayerKind.NOTHING):
        return Layer(kind=kind)
    window = {LayerKind.WINDOW: _window, LayerKind.CHUNK: _chunk}.get(kind)
    if _has_latents(text):
        size = int(text["kv_lora_rank"]) + int(text.get("qk_rope_head_dim", 64))
        return Layer(kind=kind, num_kv_heads=1, head_size=size, window=window and window(text))
    head_size = _head_size(text, kind, number)
    return Layer(
        kind=kind,
        num_kv_heads=_num_kv_heads(text, kind, number),
        head_size=head_size,
        v_head_size=int(_of_kind(text, kind, "v_head_dim", number) or head_size),
        window=window and window(text),
    )


def _chunk(text: Config) -> int:
    return int(text["attention_chunk_size"])


def _num_kv_heads(text: Config, kind: LayerKind, number: int) -> int:
    num_heads = _first(text, NUM_HEADS)
    if blocks := text.get("block_configs"):
        attention = blocks[number].get("attention") or {}
        if "n_heads_in_group" in attention:
            return int(num_heads) // int(attention["n_heads_in_group"])
    stated = _of_kind(text, kind, "num_key_value_heads", number)
    if text.get("multi_query") and not text.get("new_decoder_architecture"):
        stated = 1  # Falcon
    stated = stated or _first(text, NUM_KV_HEADS, num_heads)
    return int(stated[number] if isinstance(stated, Sequence) else stated)


def _head_size(text: Config, kind: LayerKind, number: int) -> int:
    if size := _of_kind(text, kind, "head_dim", number):
        return int(size)
    return int(_first(text, HEAD_SIZE, 0)) or int(_first(text, HIDDEN_SIZE)) // int(
        _first(text, NUM_HEADS)
    )


def _of_kind(text: Config, kind: LayerKind, name: str, number: int) -> Any:
    """Return what a layer has, where those with windows and the others are unlike."""
    each = {int(layer): own for layer, own in (text.get("per_layer_config") or {}).items()}
    if size := each.get(number, {}).get(name):
        return size
    if name == "num_key_value_heads" and not text.get("attention_k_eq_v", True):
        return text.get(name)  # Gemma 4 has others for all tokens only where K and V are one
    if kind is LayerKind.WINDOW and (size := text.get(f"swa_{name}")):
        return size
    if kind is LayerKind.FULL and (
        size := text.get(f"global_{name}") or text.get(name.replace("num_", "num_global_"))
    ):
        return size
    return text.get(name)


def _first(text: Config, names: Sequence[str], default: Any = None) -> Any:
    found = next((text[name] for name in names if name in text), default)
    if found is None:
        raise ValueError(f"config.json has none of {', '.join(names)}")
    return found
