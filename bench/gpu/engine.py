"""Engines of the GPU benchmark, and runs on them."""

import statistics
import time
from dataclasses import asdict, dataclass, field
from typing import Any

import pytest

from bench.layerwise._common import all_decode, batch
from lab.step_runner import ENVIRONMENT, EngineCase, Hook, Outcome, StepRunner
from lab.workloads import churn, every, fixed, mixed
from services.executor.engine.config import (
    ASYNC_LAYERWISE_SCHEDULER,
    SYNC_LAYERWISE_SCHEDULER,
)
from services.executor.kv_options import KVOptions

BLOCK_SIZE = 32
GRAPHS = {"full": "FULL_AND_PIECEWISE", "piecewise": "PIECEWISE", "none": "NONE"}
NUM_WARM_UP_STEPS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One engine and what is run on it. Travels as JSON to a process of its own."""

    kind: str  # "tokens" or "decode"
    model: str
    load_format: str = "auto"
    graphs: str = "piecewise"  # of GRAPHS
    pool_tokens: int = 65_536  # what the pool holds of all layers
    max_model_len: int = 8_192
    kv: dict[str, Any] | None = None  # KVOptions; None: stock vLLM
    placement: str = "none"  # "none", "every:DISTANCE" or "churn:SEED"
    num_staging: int = 2
    batches: list[int] = field(default_factory=lambda: [1])
    num_prompt_tokens: int = 1_000
    num_output_tokens: int = 128


def run(cell: Cell) -> dict[str, Any]:
    runner = GpuRunner(cell)
    try:
        return tokens(cell, runner) if cell.kind == "tokens" else decode(cell, runner)
    finally:
        runner.close()


class GpuRunner(StepRunner):
    """Drives an engine that is configured as in production: graphs, asynchronous scheduling."""

    def __init__(self, cell: Cell) -> None:
        self._environment = pytest.MonkeyPatch()
        for name in ("VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_DISABLE_REQUEST_ID_RANDOMIZATION"):
            self._environment.setenv(name, ENVIRONMENT[name])
        self.engine, kv = make_engine(cell)
        self.core = self.engine.engine_core.engine_core
        self.scheduler = self.core.scheduler
        self.case = EngineCase(num_blocks=self.scheduler.kv_cache_config.num_blocks, kv=kv)


def make_engine(cell: Cell) -> tuple[Any, KVOptions | None]:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    kv = None if cell.kv is None else KVOptions(**cell.kv)
    num_blocks = cell.pool_tokens // BLOCK_SIZE
    arguments: dict[str, Any] = {
        "model": cell.model,
        "load_format": cell.load_format,
        "max_model_len": cell.max_model_len,
        "block_size": BLOCK_SIZE,
        "max_num_seqs": 64,
        "enable_prefix_caching": False,
        "compilation_config": {"cudagraph_mode": GRAPHS[cell.graphs]},
    }
    if kv is not None:
        model = EngineArgs(**arguments).create_model_config()
        num_blocks *= model.get_total_num_hidden_layers() // kv.layers_per_group
        arguments.update(kv.engine_args())
    config = EngineArgs(**arguments, num_gpu_blocks_override=num_blocks).create_engine_config()
    if kv is not None:
        config.scheduler_config.scheduler_cls = (
            ASYNC_LAYERWISE_SCHEDULER
            if config.scheduler_config.async_scheduling
            else SYNC_LAYERWISE_SCHEDULER
        )
    return LLMEngine.from_vllm_config(config), kv


def placement(cell: Cell, runner: StepRunner, request_ids: list[str]) -> Hook | None:
    kind, _, number = cell.placement.partition(":")
    if kind == "none":
        return None
    if kind == "churn":
        return churn(int(number))
    groups = every(int(number), runner.scheduler.block_owner.geometry.num_groups)
    return fixed(dict.fromkeys(request_ids, groups), cell.num_staging)


def tokens(cell: Cell, runner: StepRunner) -> dict[str, Any]:
    """Return the greedy tokens of a staggered batch."""
    workload = mixed()
    wait_for_host_memory(runner)
    hook = placement(cell, runner, [arrival.request_id for arrival in workload])
    outcome = runner.run(workload, hook=hook)
    return {"tokens": outcome.tokens, **movement(outcome)}


def movement(outcome: Outcome) -> dict[str, Any]:
    return {
        "num_steps": outcome.num_steps,
        "num_preemptions": outcome.num_preemptions,
        "num_offloads": outcome.num_offloads,
        "num_restores": outcome.num_restores,
        **{name: outcome.sums.get(name, 0) for name in ("h2d_bytes", "d2h_bytes", "num_loads")},
        **{name: outcome.sums.get(name, 0.0) for name in ("stall_s", "h2d_busy_s", "d2h_busy_s")},
    }


def decode(cell: Cell, runner: StepRunner) -> dict[str, Any]:
    """Return the time of a decode step by batch size."""
    wait_for_host_memory(runner)
    rows = []
    for size in cell.batches:
        workload = batch(
            size,
            num_prompt_tokens=cell.num_prompt_tokens,
            num_output_tokens=cell.num_output_tokens,
        )
        hook = placement(cell, runner, [arrival.request_id for arrival in workload])
        steps = _StepClock(runner, size)
        outcome = runner.run(workload, hook=steps.after(hook), check=False)
        rows.append({"batch": size, "step_s": steps.median_s(), **movement(outcome)})
    return {"rows": rows}


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


def as_json(cell: Cell) -> dict[str, Any]:
    return asdict(cell)
