"""What stands between a layer's input and its MLP: attention, latents, or a state."""

from dataclasses import dataclass

from services.placement.layer_kinds import Layer, LayerKind
from simulator.models.config import Config
from simulator.models.types import Attention


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixer:
    """One layer's, with its parameters."""

    num_parameters: int = 0
    attention: Attention | None = None
    state_bytes: int = 0


def mixer_of(config: Config, layer: Layer) -> Mixer:
    """Return what a layer has. Raises ValueError where a figure is missing, or the kind unknown."""
    match layer.kind:
        case LayerKind.FULL | LayerKind.WINDOW | LayerKind.CHUNK:
            return _attention(config, layer)
        case LayerKind.LATENT:
            return _latent_attention(config)
        case LayerKind.STATE:
            return _state(config)
        case LayerKind.NOTHING:
            return Mixer()
    raise ValueError(f"{layer.kind} is not simulated")


def _attention(config: Config, layer: Layer) -> Mixer:
    num_heads, key_size, value_size = config.num_heads, layer.head_size, layer.v_head_size
    has_gate = config.get("attn_output_gate")
    if has_gate is None:
        has_gate = config.model_type == "qwen3_next"
    queries = num_heads * (key_size + (value_size if has_gate else 0))
    kept = layer.num_kv_heads * (key_size + value_size)
    made = 0 if layer.reads_anothers else kept
    flops = 2 * num_heads * (key_size + value_size)
    return Mixer(
        num_parameters=config.hidden_size * (queries + made + num_heads * value_size),
        attention=Attention(
            bytes_per_token=kept * config.model_bytes,
            flops_per_pair=flops,
            prompt_flops_per_pair=flops,
            num_shards=layer.num_kv_heads,
            window=layer.window or 0,
        ),
    )


def _latent_attention(config: Config) -> Mixer:
    hidden, num_heads = config.hidden_size, config.num_heads
    latent, rope = config.number("kv_lora_rank"), config.number("qk_rope_head_dim")
    nope, value_dim = config.number("qk_nope_head_dim"), config.number("v_head_dim")
    query_rank = config.number_or(0, "q_lora_rank")
    queries = num_heads * (nope + rope)
    of_queries = query_rank * (hidden + queries) if query_rank else hidden * queries
    of_latents = hidden * (latent + rope) + latent * num_heads * (nope + value_dim)
    return Mixer(
        num_parameters=of_queries + of_latents + num_heads * value_dim * hidden,
        attention=Attention(
            bytes_per_token=(latent + rope) * config.model_bytes,
            flops_per_pair=2 * num_heads * (2 * latent + rope),
            prompt_flops_per_pair=2 * num_heads * (nope + rope + value_dim),
            num_shards=1,
        ),
    )


def _state(config: Config) -> Mixer:
    """Return a gated delta net or Mamba2."""
    if config.get("linear_num_value_heads"):
        return _delta_net(config)
    if config.get("mamba_n_heads", "mamba_num_heads"):
        return _mamba2(config)
    raise ValueError(f"the states of model type {config.model_type!r} are not known here")


def _delta_net(config: Config) -> Mixer:
    num_values = config.number("linear_num_value_heads")
    key_dim, value_dim = (
        config.number("linear_key_head_dim"),
        config.number("linear_value_head_dim"),
    )
    keys = config.number("linear_num_key_heads") * key_dim
    values = num_values * value_dim
    width, kernel = 2 * keys + values, config.number("linear_conv_kernel_dim")
    # Projections of queries, keys, values and the gate; two gates per head; the way out.
    projected = 2 * keys + 2 * values + 2 * num_values + values
    inner = num_values * key_dim * value_dim
    return Mixer(
        num_parameters=config.hidden_size * projected + width * kernel,
        state_bytes=width * (kernel - 1) * config.model_bytes
        + inner * config.element_bytes("mamba_ssm_dtype", "dtype", "torch_dtype"),
    )


def _mamba2(config: Config) -> Mixer:
    num_heads = config.number("mamba_n_heads", "mamba_num_heads")
    inner = config.number_or(2, "mamba_expand", "expand") * config.hidden_size
    head_dim = config.number_or(inner // num_heads, "mamba_d_head", "mamba_head_dim")
    inner = num_heads * head_dim
    state_size = config.number("mamba_d_state", "ssm_state_size")
    width = inner + 2 * config.number("mamba_n_groups", "n_groups") * state_size
    kernel = config.number("mamba_d_conv", "conv_kernel")
    ssm_bytes = config.element_bytes("mamba_ssm_cache_dtype", "dtype", "torch_dtype")
    return Mixer(
        # Projections of the gate, of what is convolved and of a step per head; the way out.
        num_parameters=config.hidden_size * (inner + width + num_heads + inner) + width * kernel,
        state_bytes=width * (kernel - 1) * config.model_bytes + inner * state_size * ssm_bytes,
    )
