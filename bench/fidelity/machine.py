"""The emulated device of `bench.e2e` as a machine of the simulator.

What the device is told to take is known. What the engine takes beside it is measured in calibration
runs: outside the layers and for prompts in those in which everything is resident, for copies in
`copying.py`.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from bench.e2e.figures import quantile
from bench.e2e.records import RunRecord
from bench.e2e.systems import (
    BLOCK_BYTES,
    BLOCK_SIZE,
    MAX_MODEL_LEN,
    NUM_LAYERS,
    Device,
)
from bench.fidelity.steps import DecodeStep, decode_steps, mixed_steps
from services.placement.types import EngineShape
from simulator.device.costs import LinearCosts, StepLoad, resident_step_s
from simulator.device.step import NO_COSTS, CopyCosts
from simulator.engine.machine import Machine

CHUNK_BYTES = 4 << 20  # of one copy
NUM_NULL_BLOCKS = 1  # of the pool, which vLLM gives to no request
MAX_NUM_BATCHED_TOKENS = 512  # tokens in one step
FULL_CHUNK_SPAN = (0.85, 1.7)  # of a full chunk's predicted step: shorter ones are not full
SPREAD = (0.05, 0.95)  # quantiles between which a normal distribution has 3.29 deviations
SPREAD_DEVIATIONS = 3.29


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """What calibration runs say about the machine, beside what its device is told to take."""

    outside_s: float  # of a step, outside the layers
    noise_frac: float  # standard deviation of a decode step / its mean
    num_steps: int
    prompt_token_s: float = 0.0  # of a step, per prompt token, beyond what its layers take
    copies: CopyCosts = NO_COSTS


def shape_of(device: Device, *, offloads: bool) -> EngineShape:
    """Return the engine that `Device.settings` starts."""
    settings = device.settings()
    host_bytes = settings["KV_HOST_MEMORY_BYTES"]
    assert isinstance(host_bytes, int)
    assert settings["MAX_NUM_BATCHED_TOKENS"] == MAX_NUM_BATCHED_TOKENS
    return EngineShape(
        num_layers=NUM_LAYERS,
        layers_per_group=1,
        block_size=BLOCK_SIZE,
        num_blocks=device.pool_tokens // BLOCK_SIZE * NUM_LAYERS - NUM_NULL_BLOCKS,
        block_bytes=BLOCK_BYTES,
        max_num_seqs=device.max_num_seqs,
        max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS,
        num_host_blocks=host_bytes // BLOCK_BYTES if offloads else 0,
        max_model_len=MAX_MODEL_LEN,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class EmulatedCosts:
    """What layers are told to take, and what the engine takes beside them."""

    layers: LinearCosts
    prompt_token_s: float

    def layer_s(self, load: StepLoad) -> float:
        return self.layers.layer_s(load)

    def outside_s(self, load: StepLoad) -> float:
        return self.layers.outside_s(load) + self.prompt_token_s * load.num_prefill_tokens

    def reduce_bytes(self, load: StepLoad) -> int:
        return 0


def costs_of(device: Device, outside_s: float) -> LinearCosts:
    return LinearCosts(
        layer_base_s=device.layer_s,
        per_token_s=device.per_token_s,
        per_context_token_s=device.per_context_token_s,
        outside_step_s=outside_s,
    )


def calibrated(device: Device, runs: Sequence[RunRecord]) -> Calibration:
    """Return what steps of resident runs take beside their layers.

    The median step counts: few have a prompt among them. Raises ValueError without any decode step.
    """
    costs = costs_of(device, 0.0)
    decodes = [step for run in runs for step in decode_steps(run)]
    if not decodes:
        raise ValueError("no decode steps to calibrate with")
    steps = [*decodes, *(step for run in runs for step in mixed_steps(run))]
    outside_s = max(0.0, statistics.median(_rest_s(step, costs) for step in steps))
    rests_s = [_rest_s(step, costs) for step in decodes]
    low_s, high_s = (quantile(rests_s, frac) for frac in SPREAD)
    mean_s = statistics.fmean(step.seconds for step in decodes)
    return Calibration(
        outside_s=outside_s,
        prompt_token_s=_prompt_token_s(device, outside_s, runs),
        noise_frac=(high_s - low_s) / SPREAD_DEVIATIONS / mean_s,
        num_steps=len(steps),
    )


def _rest_s(step: DecodeStep, costs: LinearCosts) -> float:
    load = StepLoad(num_decodes=step.num_requests, num_context_tokens=step.num_context_tokens)
    return step.seconds - NUM_LAYERS * costs.layer_s(load)


def machine_of(device: Device, calibration: Calibration) -> Machine:
    return Machine(
        costs=EmulatedCosts(
            layers=costs_of(device, calibration.outside_s),
            prompt_token_s=calibration.prompt_token_s,
        ),
        link_bytes_per_s=device.link_bytes_per_s,
        chunk_bytes=CHUNK_BYTES,
        copies=calibration.copies,
        compute_noise_frac=calibration.noise_frac,
    )


def _prompt_token_s(device: Device, outside_s: float, runs: Sequence[RunRecord]) -> float:
    """Return what a prompt token takes beside the layers, from steps with a full chunk.

    A step about as long as one with a full chunk counts as one; 0 without any.
    """
    costs, rests_s = costs_of(device, outside_s), list[float]()
    for run in runs:
        for step in mixed_steps(run):
            chunk = MAX_NUM_BATCHED_TOKENS - step.num_requests
            load = StepLoad(
                num_decodes=step.num_requests,
                num_context_tokens=step.num_context_tokens,
                chunks=[(chunk, 0)],
            )
            full_s = resident_step_s(costs, load, num_layers=NUM_LAYERS)
            low, high = FULL_CHUNK_SPAN
            if low * full_s < step.seconds < high * full_s:
                rests_s.append((step.seconds - full_s) / chunk)
    return max(0.0, statistics.median(rests_s)) if rests_s else 0.0
