"""Devices, models and assumptions, as the data files state them."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

BYTES_PER_ELEMENT = 2  # weights and KV in 16 bits


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One kind of GPU: its maker's figures."""

    title: str
    memory_bytes: int
    memory_bytes_per_s: float
    flops_per_s: float  # FP16, dense
    link_bytes_per_s: float  # to the host, one direction
    peer_bytes_per_s: float  # to the other GPUs of its group, one direction
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """The shape of one model, under the names of its config.json."""

    name: str
    num_hidden_layers: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    source: str

    @property
    def num_layer_parameters(self) -> int:
        """Weights of one layer: attention projections and the gated MLP's three matrices."""
        heads = 2 * self.num_attention_heads + 2 * self.num_key_value_heads
        return self.hidden_size * (heads * self.head_dim + 3 * self.intermediate_size)

    @property
    def num_head_parameters(self) -> int:
        return self.hidden_size * self.vocab_size

    @property
    def num_parameters(self) -> int:
        """All weights: layers, embedding, head."""
        return self.num_hidden_layers * self.num_layer_parameters + 2 * self.num_head_parameters

    @property
    def kv_bytes_per_token(self) -> int:
        """K and V of one token in one layer."""
        return 2 * self.num_key_value_heads * self.head_dim * BYTES_PER_ELEMENT


@dataclass(frozen=True, slots=True, kw_only=True)
class Assumptions:
    """What a program reaches of a device: see `data/costs.toml`. Fractions are in [0, 1]."""

    flops_efficiency: float
    memory_efficiency: float
    link_efficiency: float
    copy_overhead_s: float
    layer_overhead_s: float
    outside_s: float
    all_reduce_latency_s: float
    copy_slowdown_frac: float
    reserved_memory_frac: float
    compute_noise_frac: float
    link_noise_frac: float


@cache
def data_file(name: str) -> Mapping[str, Any]:
    """Return one of the data files, parsed."""
    return tomllib.loads((files("simulator") / "data" / name).read_text())


def device_names() -> list[str]:
    return list(data_file("devices.toml")["devices"])


def model_names() -> list[str]:
    return list(data_file("models.toml")["models"])


def link_rates() -> Mapping[str, float]:
    """Return bytes/s of one direction between host and GPU, by kind of link."""
    rates: Mapping[str, float] = data_file("devices.toml")["links"]
    return rates


def device(name: str) -> Device:
    """Return a device. Raises KeyError for an unknown name."""
    data = data_file("devices.toml")
    fields = dict(data["devices"][name])
    link_bytes_per_s = data["links"][fields.pop("link")]
    fields.setdefault("peer_bytes_per_s", link_bytes_per_s)
    return Device(link_bytes_per_s=link_bytes_per_s, **fields)


def model(name: str) -> Model:
    """Return a model. Raises KeyError for an unknown name."""
    return Model(name=name, **data_file("models.toml")["models"][name])


def assumptions() -> Assumptions:
    return Assumptions(**data_file("costs.toml")["assumptions"])
