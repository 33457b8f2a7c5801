"""Builders of planner requests on the wire."""

from typing import Any

from evenflow.planner.v1 import planner_pb2 as pb

NUM_LAYERS = 4


def make_request(**overrides: Any) -> pb.RequestState:
    values = {
        "request_id": "a",
        "phase": pb.REQUEST_PHASE_DECODING,
        "num_prompt_tokens": 100,
        "num_output_tokens": 5,
        "num_computed_tokens": 105,
        "num_host_blocks": [6] * NUM_LAYERS,
    }
    return pb.RequestState(**(values | overrides))


def make_prefix(**overrides: Any) -> pb.PrefixState:
    values = {"prefix_id": "t", "num_tokens": 96, "num_host_blocks": [6] * NUM_LAYERS}
    return pb.PrefixState(**(values | overrides))


def make_engine(**overrides: Any) -> pb.EngineShape:
    values = {
        "num_layers": NUM_LAYERS,
        "layers_per_group": 1,
        "block_size": 16,
        "num_blocks": 100,
        "block_bytes": 65_536,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 2_048,
    }
    return pb.EngineShape(**(values | overrides))


def make_link(**overrides: Any) -> pb.Link:
    return pb.Link(**({"bytes_per_s": 12e9, "chunk_bytes": 4 << 20} | overrides))


def make_profile(**overrides: Any) -> pb.Profile:
    return pb.Profile(**({"layer_base_s": 1e-3, "mean_tpot_s": 0.01} | overrides))


def make_plan_request(**overrides: Any) -> pb.PlanRequest:
    """Return a request that every policy can answer."""
    values = {
        "epoch": 3,
        "policy": "orbitflow",
        "engine": make_engine(),
        "requests": [make_request()],
        "num_free_blocks": 20,
        "h2d": make_link(),
        "d2h": make_link(),
        "profile": make_profile(),
    }
    return pb.PlanRequest(snapshot=pb.Snapshot(**(values | overrides)))
