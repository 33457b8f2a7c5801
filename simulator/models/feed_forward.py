"""A layer's MLP, or its experts."""

from collections.abc import Sequence

from simulator.models.config import Config
from simulator.models.precision import Part, Precision
from simulator.models.types import Experts, Weights

EXPERT_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts")
UNGATED = ("nemotron", "nemotron_h", "phi", "gpt2", "starcoder2", "opt")  # two matrices for three


def feed_forward(
    config: Config, precision: Precision, number: int
) -> tuple[Weights, Experts | None]:
    """Return what every token is multiplied with in a layer, and its experts if it has any.

    Raises ValueError for want of a figure.
    """
    if not _has_experts(config, number):
        size = config.number_or(0, "intermediate_size_mlp") or _dense_size(config)
        return precision.weights(_matrices(config, size), Part.MLP), None
    num_experts, hidden = config.number(*EXPERT_COUNTS), config.hidden_size
    size = config.number("moe_intermediate_size", "intermediate_size")
    experts = Experts(
        num=num_experts,
        num_active=config.number("num_experts_per_tok", "experts_per_token", "moe_topk"),
        weights=precision.weights(_matrices(config, size), Part.EXPERTS),
    )
    router = precision.weights(hidden * num_experts, Part.OTHER)
    shared = precision.weights(_matrices(config, _shared_size(config, size)), Part.MLP)
    return router + shared, experts


def _matrices(config: Config, size: int) -> int:
    return (2 if config.model_type in UNGATED else 3) * config.hidden_size * size


def _dense_size(config: Config) -> int:
    if config.model_type == "granitemoehybrid":  # without experts the shared MLP is all
        return config.number("shared_intermediate_size")
    return config.number("intermediate_size", "n_inner", "ffn_dim")


def _shared_size(config: Config, size: int) -> int:
    """Return the size of what experts have beside them for all tokens, 0 where there is none."""
    stated = config.get(
        "shared_expert_intermediate_size",
        "shared_intermediate_size",
        "moe_shared_expert_intermediate_size",
    )
    if isinstance(stated, int):
        return stated
    if config.model_type == "llama4_text":
        return size
    return config.number_or(0, "n_shared_experts", "num_shared_experts") * size


def _has_experts(config: Config, number: int) -> bool:
    if config.number_or(0, *EXPERT_COUNTS) < 2:
        return False
    kinds: Sequence[str] | None = config.get("mlp_layer_types")
    if kinds:
        return kinds[number] == "sparse"
    listed: Sequence[int] | None = config.get("moe_layers")
    if listed:
        return number in listed
    if number in (config.get("mlp_only_layers") or ()):
        return False
    if number < config.number_or(0, "first_k_dense_replace"):
        return False
    every = config.get("moe_layer_freq")
    if isinstance(every, list):
        return bool(every[number])
    step = config.number_or(1, "decoder_sparse_step", "interleave_moe_layer_step")
    return (number + 1) % step == 0 and number % (every or 1) == 0
