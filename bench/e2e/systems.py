"""What is compared: the executor's settings by system, on the same device."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from lab.policies.presets import full_name
from lab.slow_device.emulated_device import LayerTime
from services.placement.presets import PRESETS, preset_of

BLOCK_SIZE = 32
NUM_LAYERS = 8
BLOCK_BYTES = 2 * BLOCK_SIZE * 2 * 32 * 4  # K and V, tokens, heads, head_dim, float32
MAX_MODEL_LEN = 2_048
MAX_NUM_SEQS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """The emulated device and its link."""

    layer_s: float = 2.5e-3
    per_token_s: float = 1e-5
    per_context_token_s: float = 2e-7
    link_bytes_per_s: float = 300e6
    pool_tokens: int = 2_176  # of all layers; the longest request fits alone
    max_num_seqs: int = MAX_NUM_SEQS

    @property
    def layer_time(self) -> LayerTime:
        return LayerTime(
            base_s=self.layer_s,
            per_token_s=self.per_token_s,
            per_context_token_s=self.per_context_token_s,
        )

    @property
    def pool_bytes(self) -> int:
        return self.pool_tokens // BLOCK_SIZE * NUM_LAYERS * BLOCK_BYTES

    def settings(self) -> dict[str, object]:
        """Return the executor's settings, without their prefix."""
        return {
            "LAYERWISE_KV": "true",
            "ENABLE_PREFIX_CACHING": "false",  # the same traces are replayed on one engine
            "BLOCK_SIZE": BLOCK_SIZE,
            "MAX_MODEL_LEN": MAX_MODEL_LEN,
            "MAX_NUM_SEQS": self.max_num_seqs,
            "MAX_NUM_BATCHED_TOKENS": 512,
            "KV_CACHE_MEMORY_BYTES": self.pool_bytes,
            "KV_HOST_MEMORY_BYTES": 256 << 20,
            "KV_LINK_BYTES_PER_S": self.link_bytes_per_s,
        }


# Everything resident, preemption by recompute, on the emulated device: the layer-wise engine
# without host memory never offloads.
RESIDENT: Mapping[str, object] = MappingProxyType(
    {
        "POLICY": full_name("dynamic-heuristic"),
        "PLANNER_ADDRESS": "",
        "KV_HOST_MEMORY_BYTES": 0,
    }
)
# The same with room left free when a request comes in, as a share of the pool: `vllm@0.02`.
WATERMARKS: Mapping[str, Mapping[str, object]] = MappingProxyType(
    {
        f"vllm@{frac}": {**RESIDENT, "ENGINE_ARGS": json.dumps(["--watermark", str(frac)])}
        for frac in (0.02, 0.05)
    }
)
# OrbitFlow by its components (Fig. 14a), the last one whole, and the violations that it plans for.
ORBITFLOW = ("batch-uniform", "request-wise", "request-wise-pause", "orbitflow")
ORBITFLOW_ALPHA = 1.0
BASELINES = ("deepspeed", "flexgen", "flexgen-plus", "slo-aware", "dynamic-heuristic")
OTHERS = ("andes", "layerkv-park", "sglang", "vllm-recompute", "vllm-swap", "joint")
SYSTEMS: Mapping[str, Mapping[str, object]] = MappingProxyType(
    {
        "vllm": RESIDENT,
        **WATERMARKS,
        **{
            name: {"POLICY": full_name(name)}
            for name in (*PRESETS, *BASELINES, *OTHERS)
            if name != "vllm"
        },
        # As in the paper, one request of a batch may miss in each step; by default none may.
        **{name: {"POLICY": full_name(name), "PLAN_ALPHA": ORBITFLOW_ALPHA} for name in ORBITFLOW},
        "orbitflow-strict": {"POLICY": "orbitflow"},
    }
)
DEFAULT_SYSTEMS = (
    "vllm",
    *BASELINES,
    "layerkv",
    "orbitflow",
)


def is_resident(system: str) -> bool:
    """Return whether a system keeps everything in the pool, and so uses no link."""
    return SYSTEMS[system].get("KV_HOST_MEMORY_BYTES") == 0


def is_slo_blind(system: str) -> bool:
    """Return whether a system does the same whatever was promised."""
    return preset_of(str(SYSTEMS[system]["POLICY"])).is_slo_blind
