"""Engines of the GPU benchmark, and runs on them."""

import hashlib
import json
import statistics
import time
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from bench.gpu.model import gpu_model
from bench.layerwise._common import all_decode, batch
from lab.engine.step_runner import ENVIRONMENT, EngineCase, Hook, Outcome, StepRunner
from lab.engine.workloads import churn, every, fixed, mixed
from lab.models import exactness_model
from services.executor.copies.copy_engine import Direction
from services.executor.copies.device.stream_copy_engine import StreamCopyEngine
from services.executor.engine.config import (
    ASYNC_LAYERWISE_SCHEDULER,
    SYNC_LAYERWISE_SCHEDULER,
)
from services.executor.kv_options import KVOptions

BLOCK_SIZE = 32
GRAPHS = {"full": "FULL_AND_PIECEWISE", "piecewise": "PIECEWISE", "none": "NONE"}
CAPTURED_SIZES = [1, 2, 4, 8, 16, 32]  # of what is run; vLLM's own are some fifty
HOST_BYTES = 16 << 30
NUM_WARM_UP_STEPS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCell:
    """One engine and what is run on it, one placement after the other."""

    device: str
    kind: str  # "tokens" or "decode"
    model: str = ""  # empty: the made-up one of the device's size
    graphs: str = "full"  # of GRAPHS
    pool_tokens: int = 65_536  # what the pool holds of all layers
    max_model_len: int = 8_192
    kv: dict[str, Any] | None = None  # KVOptions; None: stock vLLM
    placements: list[str] = field(default_factory=lambda: ["none"])  # or every:N, churn:SEED
    num_staging: int = 2
    batches: list[int] = field(default_factory=lambda: [1])
    num_prompt_tokens: int = 1_000
    num_output_tokens: int = 128
    kv_cache_dtype: str = "auto"
    broken: str = ""  # what is left out: "waits" or the order of "slots"

    @property
    def options(self) -> KVOptions | None:
        """Blocks are poisoned in runs whose tokens count; a guard would mend what is broken."""
        if self.kv is None:
            return None
        host_bytes = HOST_BYTES if self.device == "cuda" else 64 << 20
        tokens = {"poison": True, "integrity_guard": "off"} if self.kind == "tokens" else {}
        return KVOptions(**{"host_bytes": host_bytes, **tokens, **self.kv})


def run(cell: EngineCell) -> dict[str, Any]:
    break_it(cell.broken)
    runner = BenchRunner(cell)
    try:
        rows = tokens(cell, runner) if cell.kind == "tokens" else decode(cell, runner)
        return {"device": device_name(cell), "rows": rows}
    finally:
        runner.close()


def device_name(cell: EngineCell) -> str:
    return torch.cuda.get_device_name() if cell.device == "cuda" else "CPU"


def break_it(how: str) -> None:
    """Leave something out in this process: waits for copies, or which slot is whose."""
    engine: Any = StreamCopyEngine
    if how == "waits":
        engine.wait = lambda self, ticket, timeout_s=0.0: 0.0
    elif how == "slots":
        engine.submit = _with_slots_swapped(engine.submit)


def _with_slots_swapped(submit: Any) -> Any:
    def swapped(self: Any, copy: Any) -> Any:
        if copy.direction is Direction.H2D:
            copy = replace(copy, slots=list(copy.slots)[::-1])
        return submit(self, copy)

    return swapped


class BenchRunner(StepRunner):
    """Drives an engine that is configured as in production: graphs, asynchronous scheduling."""

    def __init__(self, cell: EngineCell) -> None:
        self._environment = pytest.MonkeyPatch()
        names = ["VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_DISABLE_REQUEST_ID_RANDOMIZATION"]
        for name in names if cell.device == "cuda" else ENVIRONMENT:
            self._environment.setenv(name, ENVIRONMENT[name])
        self.engine = make_engine(cell)
        self.core = self.engine.engine_core.engine_core
        self.scheduler = self.core.scheduler
        num_blocks = self.scheduler.kv_cache_config.num_blocks
        self.case = EngineCase(num_blocks=num_blocks, kv=cell.options)


def make_engine(cell: EngineCell) -> Any:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    options, num_blocks = cell.options, cell.pool_tokens // BLOCK_SIZE
    made_up = gpu_model if cell.device == "cuda" else exactness_model
    arguments: dict[str, Any] = {
        "model": cell.model or str(made_up()),
        "max_model_len": cell.max_model_len,
        "block_size": BLOCK_SIZE,
        "max_num_seqs": 32,
        "enable_prefix_caching": False,
        "kv_cache_dtype": cell.kv_cache_dtype,
    }
    if cell.device == "cuda":
        arguments["compilation_config"] = {
            "cudagraph_mode": GRAPHS[cell.graphs],
            "cudagraph_capture_sizes": CAPTURED_SIZES,
        }
    else:
        arguments |= {"enforce_eager": True, "kv_cache_memory_bytes": 1 << 28}
    if options is not None:
        model = EngineArgs(**arguments).create_model_config()
        num_blocks *= model.get_total_num_hidden_layers() // options.layers_per_group
        arguments.update(options.engine_args())
    config = EngineArgs(**arguments, num_gpu_blocks_override=num_blocks).create_engine_config()
    if options is not None:
        config.scheduler_config.scheduler_cls = (
            ASYNC_LAYERWISE_SCHEDULER
            if config.scheduler_config.async_scheduling
            else SYNC_LAYERWISE_SCHEDULER
        )
    return LLMEngine.from_vllm_config(config)


def hook_of(
    cell: EngineCell, placement: str, runner: StepRunner, request_ids: list[str]
) -> Hook | None:
    kind, _, number = placement.partition(":")
    if kind == "none":
        return None
    if kind == "churn":
        return churn(int(number))
    groups = every(int(number), runner.scheduler.block_owner.geometry.num_groups)
    return fixed(dict.fromkeys(request_ids, groups), cell.num_staging)


def tokens(cell: EngineCell, runner: StepRunner) -> list[dict[str, Any]]:
    """Return a digest of the greedy tokens of a staggered batch, by placement."""
    wait_for_host_memory(runner)
    rows = []
    for placement in cell.placements:
        workload = mixed()
        names = [arrival.request_id for arrival in workload]
        hook = hook_of(cell, placement, runner, names)
        outcome = runner.run(workload, hook=hook, check=not cell.broken)
        digest = hashlib.sha256(json.dumps(outcome.tokens, sort_keys=True).encode()).hexdigest()
        rows.append(
            {"placement": placement, "broken": cell.broken, "tokens": digest, **movement(outcome)}
        )
    return rows


def movement(outcome: Outcome) -> dict[str, Any]:
    return {
        "num_steps": outcome.num_steps,
        "num_preemptions": outcome.num_preemptions,
        "num_offloads": outcome.num_offloads,
        "num_restores": outcome.num_restores,
        **{name: outcome.sums.get(name, 0) for name in ("h2d_bytes", "d2h_bytes", "num_loads")},
        **{name: outcome.sums.get(name, 0.0) for name in ("stall_s", "h2d_busy_s", "d2h_busy_s")},
    }


def decode(cell: EngineCell, runner: StepRunner) -> list[dict[str, Any]]:
    """Return the time of a decode step by placement and batch size."""
    wait_for_host_memory(runner)
    rows = []
    for placement in cell.placements:
        for size in cell.batches:
            workload = batch(
                size,
                num_prompt_tokens=cell.num_prompt_tokens,
                num_output_tokens=cell.num_output_tokens,
            )
            names = [arrival.request_id for arrival in workload]
            steps = _StepClock(runner, size)
            hook = steps.after(hook_of(cell, placement, runner, names))
            outcome = runner.run(workload, hook=hook, check=False)
            row = {"placement": placement, "batch": size, "step_s": steps.median_s()}
            rows.append({**row, **movement(outcome)})
    return rows


class _StepClock:
    """Times the steps in which a whole batch decodes, from one call of the hook to the next."""

    def __init__(self, runner: StepRunner, size: int) -> None:
        self._runner = runner
        self._size = size
        self._last_s: float | None = None
        self._steps_s: list[float] = []

    def after(self, hook: Hook | None) -> Hook:
        def timed(scheduler: Any, step: int) -> None:
            now_s = time.perf_counter()
            if self._last_s is not None:
                self._steps_s.append(now_s - self._last_s)
            self._last_s = now_s if all_decode(self._runner, self._size) else None
            if hook is not None:
                hook(scheduler, step)

        return timed

    def median_s(self) -> float:
        return statistics.median(self._steps_s[NUM_WARM_UP_STEPS:])


def wait_for_host_memory(runner: StepRunner) -> None:
    """Let everything be pinned, so that no run differs by how far that has come."""
    if runner.case.kv is None:
        return
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    connector: Any = get_kv_transfer_group()
    connector._backend.host.wait_until_pinned()
    runner._step_without_tokens()  # tells the scheduler
