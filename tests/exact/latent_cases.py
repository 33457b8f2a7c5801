"""Engines and workloads of MLA: compared with stock vLLM's on its own steps.

With vLLM's reference backend on a CPU answers depend on who else is in a step, and a prompt is
computed whole: what layer-wise KV does must leave the steps as they are. So blocks leave the pool
faster than elsewhere, and no request waits for them.
"""

from dataclasses import replace

from lab.engine.step_runner import Arrival, EngineCase, Model, make_prompt
from lab.engine.workloads import mixed, with_aborts
from lab.latent_model import NUM_LAYERS, latent_model
from tests.exact.cases import SLOW_LINK, make_case

POOL_FRACS = {"CPU_MLA": 0.5, "AMX_MLA": 0.45}  # of full residency; newcomers find room at once
QUICK_TO_LEAVE = replace(
    SLOW_LINK,
    d2h_bytes_per_s=5e9,
    copy_latency_s=0.0,
    prefix_caching=False,  # a hit skips steps
)
LATENT = Model(directory=latent_model, num_layers=NUM_LAYERS)


def latent_case(backend: str = "CPU_MLA", *, num_ranks: int = 1) -> EngineCase:
    """Return an engine with one of vLLM's two backends on a CPU."""
    is_reference = backend == "CPU_MLA"
    return make_case(
        share=POOL_FRACS[backend],
        options=QUICK_TO_LEAVE,
        model=LATENT,
        attention_backend=backend,
        block_size=16 if is_reference else 32,
        dtype="float32" if is_reference else "bfloat16",
        tensor_parallel_size=num_ranks,
    )


def alone() -> list[Arrival]:
    """Return one request that takes more than the pool."""
    return [Arrival(request_id="l", prompt=make_prompt(950, seed=3), num_output_tokens=60)]


def aborted() -> list[Arrival]:
    """Return `mixed`, some of it aborted: the steps of the others are then other ones."""
    return with_aborts(mixed(), seed=3)
