"""Engines of the exactness runs, sized by what their workloads would take without offloading."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from lab.engine.step_runner import Arrival, EngineCase
from lab.engine.workloads import long_prompt, mixed, peak_blocks
from services.executor.kv_options import GuardMode, KVOptions

SCARCE_FRAC = 0.4  # a pool of at most this share of full residency is scarce

# Copies take their time before any byte appears; what is not yet there, or freed, is NaN.
SLOW_LINK = KVOptions(
    host_bytes=256 << 20,
    copy_latency_s=0.5e-3,
    h2d_bytes_per_s=1e9,
    d2h_bytes_per_s=1e8,
    restore_when_free_frac=0.02,
    integrity_guard=GuardMode.ALL,
    poison=True,
)


def make_case(
    *,
    layers_per_group: int = 1,
    buffers: int = 2,
    share: float = SCARCE_FRAC,
    options: KVOptions = SLOW_LINK,
    **engine: Any,
) -> EngineCase:
    """Return an engine whose pool holds a share of full residency of `mixed` or `long_prompt`."""
    case = EngineCase(
        num_blocks=1,
        kv=replace(options, layers_per_group=layers_per_group, max_staging_buffers=buffers),
        **engine,
    )
    groups = num_groups(case)
    least = min(full_residency_blocks(case, workload(groups)) for workload in (mixed, long_prompt))
    return replace(case, num_blocks=int(share * least) + 1)  # vLLM keeps one as the null block


def num_groups(case: EngineCase) -> int:
    """Return the layer groups of a case; a block of one is spent on every pipeline stage."""
    num_layers = case.model.num_layers
    layers_per_group = case.kv.layers_per_group if case.kv is not None else num_layers
    return num_layers // (layers_per_group * case.pipeline_parallel_size)


def full_residency_blocks(case: EngineCase, workload: Sequence[Arrival]) -> int:
    """Return the blocks that a workload takes at its peak where everything fits the pool."""
    return peak_blocks(workload, block_size=case.block_size) * num_groups(case)


def pool_share(case: EngineCase, workload: Sequence[Arrival]) -> float:
    """Return the pool's usable blocks as a share of full residency."""
    return (case.num_blocks - 1) / full_residency_blocks(case, workload)


PINNED_LATE = replace(SLOW_LINK, pin_bytes_per_s=256e6)  # host memory is ready after a second
LAYERS = make_case()
HALVES = make_case(layers_per_group=4, options=PINNED_LATE, asynchronous=True)
# These cover every pair of options of the product (`product.py`).
STANDING = {
    "layers": LAYERS,
    "layers-asynchronous-in-small-chunks": make_case(asynchronous=True, max_num_batched_tokens=97),
    "pairs-asynchronous-in-small-chunks": make_case(
        layers_per_group=2, buffers=1, asynchronous=True, max_num_batched_tokens=97
    ),
    "halves-asynchronous": HALVES,
    "halves-in-small-chunks": make_case(layers_per_group=4, buffers=1, max_num_batched_tokens=97),
    "tensor-parallel": make_case(buffers=1, tensor_parallel_size=2),
    "tensor-parallel-pairs": make_case(layers_per_group=2, tensor_parallel_size=2),
    "pipeline-parallel": make_case(pipeline_parallel_size=2),
    "pipeline-parallel-pairs": make_case(layers_per_group=2, buffers=1, pipeline_parallel_size=2),
}
EVERY_COMMIT = frozenset({"layers", "halves-asynchronous"})
