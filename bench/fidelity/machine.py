"""The emulated device of `bench.e2e` as a machine of the simulator.

What the device is told to take is known. What the engine and the stream take beside it is measured
in calibration runs, in which everything is resident; runs that are compared are none of them.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from bench.e2e.records import RunRecord
from bench.e2e.systems import BLOCK_BYTES, BLOCK_SIZE, MAX_NUM_SEQS, NUM_LAYERS, Device
from bench.fidelity.steps import decode_steps
from services.placement.types import EngineShape
from simulator.costs import LinearCosts, StepLoad
from simulator.engine import Machine

CHUNK_BYTES = 4 << 20
MAX_PROMPT_TOKEN_S = 4e-4
NUM_BISECTIONS = 7
MIDDLE_FRAC = 0.8  # of the calibration's steps, from which their noise is taken


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """What calibration runs say about the machine, beside what its device is told to take."""

    outside_s: float  # of a decode step, outside the layers
    noise_frac: float  # standard deviation of a decode step / its mean
    num_steps: int
    prompt_token_s: float = (
        0.0  # of a step, for each prompt token beyond what the layers should take
    )


def shape_of(device: Device, *, offloads: bool) -> EngineShape:
    """Return the engine that `Device.settings` starts."""
    settings = device.settings()
    host_bytes, batched = settings["KV_HOST_MEMORY_BYTES"], settings["MAX_NUM_BATCHED_TOKENS"]
    max_model_len = settings["MAX_MODEL_LEN"]
    assert isinstance(host_bytes, int)
    assert isinstance(batched, int)
    assert isinstance(max_model_len, int)
    return EngineShape(
        num_layers=NUM_LAYERS,
        layers_per_group=1,
        block_size=BLOCK_SIZE,
        num_blocks=device.pool_tokens // BLOCK_SIZE * NUM_LAYERS,
        block_bytes=BLOCK_BYTES,
        max_num_seqs=MAX_NUM_SEQS,
        max_num_batched_tokens=batched,
        num_host_blocks=host_bytes // BLOCK_BYTES if offloads else 0,
        max_model_len=max_model_len,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class EmulatedCosts:
    """What layers are told to take, and what the engine takes beside them."""

    layers: LinearCosts
    prompt_token_s: float = 0.0

    def layer_s(self, load: StepLoad) -> float:
        return self.layers.layer_s(load)

    def outside_s(self, load: StepLoad) -> float:
        return self.layers.outside_s(load) + self.prompt_token_s * load.num_prefill_tokens


def costs_of(device: Device, outside_s: float) -> LinearCosts:
    return LinearCosts(
        layer_base_s=device.layer_s,
        per_token_s=device.per_token_s,
        per_context_token_s=device.per_context_token_s,
        outside_step_s=outside_s,
    )


def calibrated(device: Device, runs: Sequence[RunRecord]) -> Calibration:
    """Return what decode steps of resident runs take beside their layers.

    Raises ValueError without any such step.
    """
    costs = costs_of(device, 0.0)
    lengths_s, rests_s = [], []
    for run in runs:
        for step in decode_steps(run):
            load = StepLoad(
                num_decodes=step.num_requests, num_context_tokens=step.num_context_tokens
            )
            lengths_s.append(step.seconds)
            rests_s.append(step.seconds - NUM_LAYERS * costs.layer_s(load))
    if not rests_s:
        raise ValueError("no decode steps to calibrate with")
    rests_s.sort()
    cut = int(len(rests_s) * (1.0 - MIDDLE_FRAC) / 2.0)
    middle = rests_s[cut : len(rests_s) - cut]
    return Calibration(
        outside_s=max(0.0, statistics.median(rests_s)),
        noise_frac=statistics.pstdev(middle) / statistics.fmean(lengths_s),
        num_steps=len(rests_s),
    )


def machine_of(device: Device, calibration: Calibration) -> Machine:
    return Machine(
        costs=EmulatedCosts(
            layers=costs_of(device, calibration.outside_s),
            prompt_token_s=calibration.prompt_token_s,
        ),
        link_bytes_per_s=device.link_bytes_per_s,
        chunk_bytes=CHUNK_BYTES,
        compute_noise_frac=calibration.noise_frac,
    )


def with_prompt_time(
    calibration: Calibration, mean_gap_error: Callable[[Calibration], float]
) -> Calibration:
    """Return the calibration whose simulated mean gap is the real one, by bisection.

    `mean_gap_error`: (simulated - real) / real over the calibration runs. Prompts of others are
    what a mean gap holds beside decode steps, which the calibration knows already.
    """
    low, high = 0.0, MAX_PROMPT_TOKEN_S
    for _ in range(NUM_BISECTIONS):
        middle = (low + high) / 2.0
        if mean_gap_error(replace(calibration, prompt_token_s=middle)) < 0.0:
            low = middle
        else:
            high = middle
    return replace(calibration, prompt_token_s=low)
