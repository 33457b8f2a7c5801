"""Builders of snapshots: an A5000-like engine with an 8-billion-parameter model, unless told."""

import dataclasses
from typing import Any

from services.placement.types import (
    EngineShape,
    Link,
    PolicyParameters,
    PrefixId,
    PrefixState,
    Profile,
    RequestId,
    RequestPhase,
    RequestState,
    Snapshot,
)

BLOCK_SIZE = 16
BLOCK_BYTES = 65_536  # 16 tokens of one layer: 8 KV heads * 128 * K and V * 2 bytes


def make_engine(**overrides: Any) -> EngineShape:
    values = {
        "num_layers": 8,
        "layers_per_group": 1,
        "block_size": BLOCK_SIZE,
        "num_blocks": 10_000,
        "block_bytes": BLOCK_BYTES,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 2_048,
        "num_host_blocks": 1_000_000,
        "max_model_len": 131_072,
    }
    return EngineShape(**(values | overrides))


def make_request(name: str, num_tokens: int = 1_600, **overrides: Any) -> RequestState:
    """Return a decoding request of `num_tokens` tokens, 64 of them generated, fully mirrored."""
    groups = overrides.pop("num_groups", 8)
    num_output = min(64, num_tokens - 1)
    values = {
        "request_id": RequestId(name),
        "phase": RequestPhase.DECODING,
        "num_prompt_tokens": num_tokens - num_output,
        "num_output_tokens": num_output,
        "num_computed_tokens": num_tokens,
        "num_deposited_tokens": 0,
        "num_host_blocks": (num_tokens // BLOCK_SIZE,) * groups,
    }
    return RequestState(**(values | overrides))


def make_prefill(name: str, num_tokens: int, num_computed: int, **overrides: Any) -> RequestState:
    """Return a request whose prompt of `num_tokens` is computed, and mirrored, in part."""
    values = {
        "phase": RequestPhase.PREFILL,
        "num_prompt_tokens": num_tokens,
        "num_output_tokens": 0,
        "num_computed_tokens": num_computed,
        "num_host_blocks": (num_computed // BLOCK_SIZE,) * 8,
    }
    return make_request(name, num_tokens, **(values | overrides))


def make_prefix(name: str, num_tokens: int = 1_600, **overrides: Any) -> PrefixState:
    """Return a prefix of `num_tokens` tokens, fully mirrored."""
    groups = overrides.pop("num_groups", 8)
    values = {
        "prefix_id": PrefixId(name),
        "num_tokens": num_tokens,
        "num_host_blocks": (num_tokens // BLOCK_SIZE,) * groups,
    }
    return PrefixState(**(values | overrides))


def make_snapshot(
    *requests: RequestState, num_free_blocks: int = 10_000, **overrides: Any
) -> Snapshot:
    """Return a snapshot for policy `orbitflow`; parameters may be given as keywords."""
    names = {field.name for field in dataclasses.fields(PolicyParameters)}
    chosen = {name: overrides.pop(name) for name in list(overrides) if name in names}
    values = {
        "epoch": 1,
        "policy": "orbitflow",
        "seed": 0,
        "engine": make_engine(),
        "requests": requests,
        "num_free_blocks": num_free_blocks,
        "h2d": Link(bytes_per_s=12e9),
        "d2h": Link(bytes_per_s=12e9),
        "profile": Profile(
            outside_layers_s=2e-3,
            layer_base_s=1e-3,
            layer_s_per_context_token=7e-9,
            prefill_s_per_token=2e-4,
            mean_tpot_s=0.012,
        ),
        "parameters": PolicyParameters(**chosen),
    }
    return Snapshot(**(values | overrides))
