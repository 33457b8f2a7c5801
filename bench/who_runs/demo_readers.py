"""The demo's four readers, that ask at once, on the machine that `make demo` was measured on."""

import random

from bench.who_runs.cases import Case
from demo.readers import READERS
from demo.stacks import BLOCK_SIZE, HOST_BYTES, POOL_TOKENS
from services.pacing.types import ServiceLevel
from services.placement.types import EngineShape, RequestId
from simulator.device.costs import LinearCosts
from simulator.engine.machine import Machine
from simulator.workload import ArrivingRequest

# `make demo` on two cores of an AMD EPYC: SmolLM2-135M in float32, one thread.
DEMO_LAYERS, DEMO_TOKEN_BYTES = 30, 1_536  # of one layer
DEMO_COSTS = LinearCosts(
    layer_base_s=1.0e-3, per_token_s=0.12e-3, per_context_token_s=0.4e-6, outside_step_s=12e-3
)
DEMO_LINK_BYTES_PER_S = 2.5e9


def demo(seed: int) -> Case:
    """Return the demo's four readers, that ask at once; again and again, each time anew."""
    rng, block_bytes = random.Random(f"demo {seed}"), BLOCK_SIZE * DEMO_TOKEN_BYTES
    requests = [
        ArrivingRequest(
            request_id=RequestId(f"{show}-{number}"),
            arrival_s=60.0 * show + 0.01 * rng.random(),
            num_prompt_tokens=rng.randint(270, 300),
            num_output_tokens=64,
            level=ServiceLevel(consumption_rate_tps=reader.rate_tps),
        )
        for show in range(8)
        for number, reader in enumerate(READERS)
    ]
    return Case(
        shape=EngineShape(
            num_layers=DEMO_LAYERS,
            layers_per_group=1,
            block_size=BLOCK_SIZE,
            num_blocks=POOL_TOKENS // BLOCK_SIZE * DEMO_LAYERS,
            block_bytes=block_bytes,
            max_num_seqs=64,
            max_num_batched_tokens=2_048,
            num_host_blocks=HOST_BYTES // block_bytes,
            max_model_len=4_096,
        ),
        machine=Machine(costs=DEMO_COSTS, link_bytes_per_s=DEMO_LINK_BYTES_PER_S),
        requests=sorted(requests, key=lambda one: one.arrival_s),
    )
