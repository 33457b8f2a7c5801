"""In how many bytes a checkpoint's weights lie."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from simulator.models.config import Config
from simulator.models.types import Weights


class Part(Enum):
    """What quantisation treats alike."""

    MIXER = "mixer"  # projections of attention, and of what stands in its place
    MLP = "mlp"
    EXPERTS = "experts"
    OTHER = "other"  # embedding, head and routers: never quantised here


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """How each part is stored."""

    words: str
    plain_bytes: float  # per parameter of what is not quantised
    quantised_bytes: float  # per parameter of what is, scales included
    parts: frozenset[Part] = frozenset()  # that are quantised
    computes_in_fp8: bool = False
    is_guessed: bool = False

    def weights(self, num: int, part: Part) -> Weights:
        """Return matrices of so many parameters."""
        each = self.quantised_bytes if part in self.parts else self.plain_bytes
        return Weights(num=num, num_bytes=round(num * each))


PRODUCTS = frozenset({Part.MIXER, Part.MLP, Part.EXPERTS})
MXFP4_BYTES = (4 + 8 / 32) / 8  # a scale of 8 bits for 32 weights
NVFP4_BYTES = (4 + 8 / 16) / 8


def precision_of(config: Config) -> Precision:
    """Return how a checkpoint's weights are stored."""
    plain = config.model_bytes
    given = config.get("quantization_config") or {}
    method = str(given.get("quant_method", "")).lower()
    quantised = _quantised_bytes(method, given)
    if not method or quantised is None:
        words = f"{8 * plain} bits"
        return Precision(
            words=f"{words}, its quantisation {method} is not known" if method else words,
            plain_bytes=plain,
            quantised_bytes=plain,
            is_guessed=bool(method),
        )
    return Precision(
        words=f"{method}, {8 * quantised:.3g} bits per weight",
        plain_bytes=plain,
        quantised_bytes=quantised,
        parts=_parts(method, given),
        computes_in_fp8=_is_fp8(method, given),
    )


def _quantised_bytes(method: str, given: Mapping[str, Any]) -> float | None:
    """Return the bytes per quantised weight; None: an unknown method."""
    match method:
        case "fp8" | "fbgemm_fp8":
            return 1.0
        case "mxfp4":
            return MXFP4_BYTES
        case "gptq" | "awq" | "auto-round":
            bits = int(given.get("bits") or given.get("w_bit") or 4)
            return _in_groups(bits, given.get("group_size") or given.get("q_group_size") or 128)
        case "bitsandbytes":
            return _in_groups(4, 64) if given.get("load_in_4bit") else 1.0
        case "compressed-tensors":
            stored = _stored(given)
            return None if stored is None else _in_groups(stored["num_bits"], _group_size(stored))
        case "modelopt":
            return NVFP4_BYTES if "FP4" in str(given.get("quant_algo")) else 1.0
    return None


def _in_groups(bits: int, group_size: int | None) -> float:
    """Return the bytes per weight; each group has a scale of 16 bits and a zero of `bits`."""
    per_group = (16 + bits) / group_size if bits <= 4 and group_size and group_size > 0 else 0.0
    return (bits + per_group) / 8


def _stored(given: Mapping[str, Any]) -> Mapping[str, Any] | None:
    groups: Iterable[Mapping[str, Any]] = (given.get("config_groups") or {}).values()
    return next((one["weights"] for one in groups if one.get("weights")), None)


def _group_size(stored: Mapping[str, Any]) -> int | None:
    size = stored.get("group_size")
    return int(size) if size else None


def _is_fp8(method: str, given: Mapping[str, Any]) -> bool:
    """Whether products have weights and activations in 8-bit floating point."""
    if method == "compressed-tensors":
        stored = _stored(given) or {}
        return stored.get("num_bits") == 8 and stored.get("type") == "float"
    return "fp8" in method or (method == "modelopt" and "FP8" in str(given.get("quant_algo")))


def _parts(method: str, given: Mapping[str, Any]) -> frozenset[Part]:
    if method == "mxfp4":
        return frozenset({Part.EXPERTS})
    names = given.get("modules_to_not_convert") or given.get("ignore") or ()
    left_out = {Part.MIXER} if any("attn" in str(name) for name in names) else set()
    return PRODUCTS - left_out
