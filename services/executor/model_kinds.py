"""Which models layer-wise KV takes, and what to do with one that it does not.

Read from `config.json`, before anything of the model is loaded.
"""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from services.placement.layer_kinds import Layer, LayerKind, as_used, layers_of, text_config

# Kinds of layers that engines have; what an engine does not know is left to vLLM's word of it.
MAY_LEAVE = frozenset({LayerKind.FULL, LayerKind.LATENT})
# What is beside full attention, always in the pool.
SIDES = frozenset({LayerKind.WINDOW, LayerKind.CHUNK, LayerKind.STATE})
SERVED = MAY_LEAVE | SIDES | {LayerKind.NOTHING, LayerKind.UNKNOWN}
GROWING = frozenset(LayerKind) - {
    LayerKind.WINDOW,
    LayerKind.CHUNK,
    LayerKind.STATE,
    LayerKind.NOTHING,
}
WITHOUT = (
    "serve it without --layerwise-kv (EVENFLOW_EXECUTOR_LAYERWISE_KV): answers are paced as they "
    "are read, {policy}and no KV goes to the host"
)
WITH_POLICY = "--policy evenflow decides who runs, "


def refusal_of_files(
    model: str, revision: str | None, *, max_model_len: int | None, engine_args: Sequence[str] = ()
) -> str | None:
    """Return why a model cannot have layer-wise KV, in a sentence that says what works.

    None if it can, or its `config.json` does not tell. `max_model_len`: tokens; None: the model's.
    """
    if any(option.startswith("--hf") for option in engine_args):
        return None  # `--hf-overrides`, `--hf-config-path`: the file is not what the engine reads
    config = read_config(model, revision)
    if config is None:
        return None
    what = refused_kind(config, max_model_len=max_model_len or longest_context(config))
    return None if what is None else f"layer-wise KV does not work with {what}"


def refused_kind(config: Mapping[str, Any], *, max_model_len: int | None) -> str | None:
    """Return of what kind a model is that layer-wise KV does not take, and what works with it.

    `max_model_len`: tokens; a window that is as long is none. None: any number.
    """
    layers = _layers(config, max_model_len)
    reason = next(_reasons(layers), None) if layers else None
    if reason is None:
        return None
    policy = WITH_POLICY if any(layer.kind in GROWING for layer in layers) else ""
    return f"{reason}; {WITHOUT.format(policy=policy)}"


def has_kv_that_grows(config: Mapping[str, Any], *, max_model_len: int) -> bool:
    """Return whether some layers of a model keep the more, the longer a request is.

    Without them run policies have nothing to decide by. True where `config.json` does not tell.
    """
    layers = _layers(config, max_model_len)
    return not layers or any(layer.kind in GROWING for layer in layers)


def keeps_less(config: Mapping[str, Any], *, max_model_len: int | None) -> bool:
    """Return whether some layers keep a window of their KV, or a state; arguments as above."""
    return any(layer.kind in SIDES for layer in _layers(config, max_model_len))


def _layers(config: Mapping[str, Any], max_model_len: int | None) -> Sequence[Layer]:
    """Return a model's layers as they are used; none where its `config.json` does not tell."""
    try:
        return as_used(layers_of(config), max_model_len=max_model_len)
    except ValueError:
        return ()


def _reasons(layers: Sequence[Layer]) -> Iterator[str]:
    kinds = {layer.kind for layer in layers}
    if LayerKind.SPARSE in kinds:
        yield "sparse attention (DSA, CSA): a step reads few tokens of a layer, all would be moved"
    if any(layer.reads_anothers for layer in layers):
        yield "layers that share KV"
    if not kinds & {*MAY_LEAVE, LayerKind.UNKNOWN}:
        yield f"{_named(kinds)} only: no layer keeps KV of all tokens, which could leave"
    if _has_unlike_pages(layers):
        yield "KV heads of unlike sizes or numbers"
    if LayerKind.LATENT in kinds and kinds & SIDES:
        yield f"{_named(kinds & SIDES)} beside {LayerKind.LATENT}"
    if not kinds <= SERVED:
        yield f"{_named(kinds - SERVED)} beside {_named(kinds & MAY_LEAVE)}"


def _has_unlike_pages(layers: Sequence[Layer]) -> bool:
    """Return whether blocks of all layers cannot have as many bytes, by more or fewer tokens.

    Those that may leave must be alike, and those with windows.
    """
    kept = [layer for layer in layers if layer.token_values]
    sides = {(one.head_size, one.token_values) for one in kept if one.kind in SIDES}
    others = {(one.head_size, one.token_values) for one in kept if one.kind not in SIDES}
    values = {values for _, values in (*sides, *others)}
    return max(len(sides), len(others)) > 1 or any(max(values) % one for one in values)


def layers_in_words(config: Mapping[str, Any], *, max_model_len: int, may_leave: bool) -> str:
    """Return how many layers of each kind a model has, and how many may leave; "" if unknown."""
    layers = _layers(config, max_model_len)
    if not layers:
        return ""
    counts = Counter(layer.kind for layer in layers)
    words = ", ".join(f"{number} of {kind}" for kind, number in counts.items())
    if not may_leave:
        return words
    num_leaving = sum(counts[kind] for kind in MAY_LEAVE)
    return f"{words}: {'all' if num_leaving == len(layers) else num_leaving} may leave the pool"


def _named(kinds: Iterable[LayerKind]) -> str:
    return " and ".join(sorted(kinds))


# Scalings of positions that `max_position_embeddings` has in it already, as vLLM reads it.
IN_LONGEST = frozenset(
    {
        None,
        "deepseek_llama_scaling",
        "deepseek_yarn",
        "default",
        "llama3",
        "longrope",
        "mrope",
        "su",
        "yarn",
    }
)


def longest_context(config: Mapping[str, Any]) -> int | None:
    """Return the most tokens that a model takes by itself; None if its file does not say."""
    text = text_config(config)
    longest = text.get("max_position_embeddings")
    if not isinstance(longest, int):
        return None
    scaling = text.get("rope_scaling") or text.get("rope_parameters") or {}
    kind = scaling.get("rope_type", scaling.get("type"))
    return longest if kind in IN_LONGEST else int(longest * (scaling.get("factor") or 1))


def read_config(model: str, revision: str | None = None) -> dict[str, Any] | None:
    """Return a model's `config.json`, from its directory or the hub; None if there is none."""
    path = Path(model) / "config.json"
    if not Path(model).is_dir():
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError

        try:
            path = Path(hf_hub_download(model, "config.json", revision=revision))
        except (HfHubHTTPError, HFValidationError, OSError):
            return None
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return config if isinstance(config, dict) else None
