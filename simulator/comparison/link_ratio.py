"""lambda: how slow the link is beside the pool."""

from collections.abc import Sequence
from statistics import fmean

from services.placement.link_ratio import link_ratio
from services.placement.types import EngineShape
from simulator.device.costs import StepLoad
from simulator.engine.machine import Machine
from simulator.memory.room import pool_tokens
from simulator.workload import ArrivingRequest


def workload_link_ratio(
    shape: EngineShape, machine: Machine, requests: Sequence[ArrivingRequest]
) -> float:
    """Return the bytes that the link moves in a resident decode step / the bytes of the KV pool.

    The step is that of a pool full of requests of the workload's mean length.
    """
    mean = fmean(r.num_prompt_tokens + r.num_output_tokens / 2 for r in requests)
    num_held = int(pool_tokens(shape, request_tokens=max(1, int(mean))) / mean)
    num_requests = max(1, min(shape.max_num_seqs, num_held))
    load = StepLoad(num_decodes=num_requests, num_context_tokens=int(num_requests * mean))
    return link_ratio(
        link_bytes_per_s=machine.link_bytes_per_s,
        step_s=machine.resident_step_s(load, num_layers=shape.num_layers),
        pool_bytes=shape.num_blocks * shape.block_bytes,
    )
