"""Devices, models and assumptions, as the data files state them."""

import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from simulator.models.types import Attention, Layers, Weights

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
    fp8_flops_per_s: float | None = None  # dense; None: it has no FP8


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

    @property
    def layers(self) -> tuple[Layers, ...]:
        return _dense_layers(self)

    @property
    def head(self) -> Weights:
        return _in_16_bits(self.num_head_parameters)

    @property
    def weight_bytes(self) -> int:
        return self.num_parameters * BYTES_PER_ELEMENT

    @property
    def computes_in_fp8(self) -> bool:
        return False

    @property
    def guesses(self) -> tuple[str, ...]:
        return ()


def _in_16_bits(num_parameters: int) -> Weights:
    return Weights(num=num_parameters, num_bytes=num_parameters * BYTES_PER_ELEMENT)


@cache
def _dense_layers(model: Model) -> tuple[Layers, ...]:
    flops = 4 * model.num_attention_heads * model.head_dim
    attention = Attention(
        bytes_per_token=model.kv_bytes_per_token,
        flops_per_pair=flops,
        prompt_flops_per_pair=flops,
        num_shards=model.num_key_value_heads,
    )
    weights = _in_16_bits(model.num_layer_parameters)
    return (Layers(num=model.num_hidden_layers, weights=weights, attention=attention),)


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
    draft_frac: float
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
    """Return a device by its name, however it is spaced. Raises KeyError for an unknown name."""
    data = data_file("devices.toml")["devices"]
    known = {_bare(one): one for one in data}
    return _device(data[known[_bare(name)]])


def device_from(path: Path) -> Device:
    """Return the device that a TOML or JSON file describes, by the fields of `devices.toml`.

    Raises ValueError where it does not, in a sentence.
    """
    try:
        text = path.read_text()
        stated = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
        return _device({"title": path.stem, "source": str(path), **stated})
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{path} describes no device: {error}") from error


def _bare(name: str) -> str:
    return "".join(letter for letter in name.lower() if letter.isalnum())


def _device(stated: Mapping[str, Any]) -> Device:
    """Raises KeyError for an unknown link, ValueError for what is no figure of a device."""
    given = dict(stated)
    link = given.pop("link", None)
    if link is not None:
        given["link_bytes_per_s"] = link_rates()[link]
    given.setdefault("peer_bytes_per_s", given.get("link_bytes_per_s"))
    if unknown := given.keys() - {field.name for field in fields(Device)}:
        raise ValueError(f"unknown fields {', '.join(sorted(unknown))}")
    for name, value in given.items():
        if name in ("title", "source"):
            is_right = isinstance(value, str)
        else:
            is_right = isinstance(value, int | float) and value > 0
        if not is_right:
            raise ValueError(f"{name} is {value!r}")
    return Device(**given)


def model(name: str) -> Model:
    """Return a model. Raises KeyError for an unknown name."""
    return Model(name=name, **data_file("models.toml")["models"][name])


def assumptions() -> Assumptions:
    return Assumptions(**data_file("costs.toml")["assumptions"])
