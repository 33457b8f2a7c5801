"""A model from its config.json: layers by kind, weights, KV."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from services.placement.layer_kinds import Layer, LayerKind, layers_of
from simulator.models.config import Config
from simulator.models.feed_forward import feed_forward
from simulator.models.mixers import mixer_of
from simulator.models.precision import Part, Precision, precision_of
from simulator.models.types import Layers, ReadModel


def read_model(whole: Mapping[str, Any], *, name: str, source: str) -> ReadModel:
    """Return the language model that a config.json describes.

    Norms and biases are not counted: below a thousandth. Raises ValueError for a figure that is not
    stated, for states that are not known here, and where no layer keeps the KV of all tokens.
    """
    config = Config(whole)
    precision = precision_of(config)
    layers = _layers(whole, config, precision)
    _check(name, layers)
    table = precision.weights(config.hidden_size * config.number("vocab_size"), Part.OTHER)
    return ReadModel(
        name=name,
        source=source,
        hidden_size=config.hidden_size,
        layers=layers,
        embedding=table,
        head=table,
        is_tied=bool(config.get("tie_word_embeddings")),
        computes_in_fp8=precision.computes_in_fp8,
        max_model_len=config.number_or(0, "max_position_embeddings", "n_positions"),
        precision=precision.words,
        guesses=_guesses(config, precision, layers),
    )


def _layers(whole: Mapping[str, Any], config: Config, precision: Precision) -> tuple[Layers, ...]:
    """Return the layers by kind, those that may leave first."""
    counts: Counter[Layers] = Counter()
    for number, layer in enumerate(layers_of(whole)):
        if layer.reads_anothers:
            raise ValueError("layers that read another layer's KV are not simulated")
        mixer = mixer_of(config, layer)
        weights, experts = precision.weights(mixer.num_parameters, Part.MIXER), None
        if _has_feed_forward(config, layer):
            weights_of_all, experts = feed_forward(config, precision, number)
            weights += weights_of_all
        one = Layers(
            num=1,
            weights=weights,
            experts=experts,
            attention=mixer.attention,
            state_bytes=mixer.state_bytes,
        )
        counts[one] += 1
    alike = [replace(one, num=number) for one, number in counts.items()]
    return tuple(sorted(alike, key=lambda one: not one.may_leave))


def _has_feed_forward(config: Config, layer: Layer) -> bool:
    """Whether a layer has an MLP: a layer of Nemotron-H has this or something else."""
    return config.model_type != "nemotron_h" or layer.kind is LayerKind.NOTHING


def _check(name: str, layers: Sequence[Layers]) -> None:
    kept = [
        {one.attention.bytes_per_token for one in layers if one.attention and one.may_leave is kind}
        for kind in (True, False)
    ]
    longest = max((size for sizes in kept for size in sizes), default=0)
    if not any(one.may_leave for one in layers):
        raise ValueError(f"no layer of {name} attends to all tokens: none of its KV may leave")
    if any(len(sizes) > 1 or longest % min(sizes, default=1) for sizes in kept):
        raise ValueError(f"KV heads of unlike sizes ({name}) are not simulated")


def _guesses(config: Config, precision: Precision, layers: Sequence[Layers]) -> tuple[str, ...]:
    said = ["parameters are counted from config.json, without norms and biases"]
    if config.has_other_parts:
        said.append("of a model that sees or hears the language part alone is counted")
    if precision.is_guessed:
        said.append(f"weights in {precision.words}: taken as not quantised")
    if any(one.experts for one in layers):
        said.append("each token's experts are drawn evenly")
    return tuple(said)
