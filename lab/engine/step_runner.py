"""Runs one workload through engines in this process, step by step, and compares their tokens.

The scheduler is in this process whatever the parallelism, so that a run can change placements
before any step, and check the ownership of every block after it.
"""

import gc
import hashlib
import multiprocessing
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from lab.engine.block_count import FormulaCheck
from lab.models import NUM_LAYERS, exactness_model
from lab.slow_device.emulated_device import LayerTime, emulate
from services.control.options import ControllerOptions
from services.executor.engine.config import (
    ASYNC_SCHEDULER,
    CPU_EXECUTOR,
    CPU_WORKER,
    SYNC_SCHEDULER,
    use_layerwise_scheduler,
)
from services.executor.kv_options import KVOptions

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the scheduler runs in this process
    "VLLM_DISABLE_REQUEST_ID_RANDOMIZATION": "1",  # requests keep the names of the workload
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_USE_AOT_COMPILE": "0",  # it makes a key of all settings before every step
}

VOCABULARY = range(10, 2_000)
MAX_STEPS = 20_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """One request of a workload."""

    request_id: str
    prompt: Sequence[int]
    num_output_tokens: int
    step: int = 0  # arrives before this step
    abort_at: int | None = None  # aborted before this step
    sampling: dict[str, Any] = field(default_factory=dict)  # over greedy, no end of sequence
    adapter: Path | None = None  # LoRA, of an engine that takes adapters
    cache_salt: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A checkpoint that engines load."""

    # Makes it first if it is not there. In no fingerprint: its address is another one every time.
    directory: Callable[[], Path] = field(repr=False)
    num_layers: int


EXACTNESS = Model(directory=exactness_model, num_layers=NUM_LAYERS)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCase:
    """How an engine is started. `kv` None: stock vLLM; with a `controller` a run policy on it."""

    num_blocks: int  # of the pool; stock vLLM's blocks hold all layers
    model: Model = EXACTNESS
    kv: KVOptions | None = None
    controller: ControllerOptions | None = None
    layer_time: LayerTime | None = None  # of an emulated device; needs `kv`
    block_size: int = 32
    max_model_len: int = 1024
    max_num_batched_tokens: int = 2048
    max_num_seqs: int = 16
    dtype: str = "float32"
    kv_cache_dtype: str = "auto"
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    asynchronous: bool = False
    takes_adapters: bool = False  # LoRA
    prefix_caching: bool = False  # vLLM's own, in the pool
    speculative: Mapping[str, Any] | None = None  # vLLM's `speculative_config`
    num_layers: int | None = None  # another depth than the model's; its weights are then random
    attention_backend: str | None = None  # of vLLM's names; None: its choice

    @property
    def num_ranks(self) -> int:
        return self.tensor_parallel_size * self.pipeline_parallel_size


@dataclass(kw_only=True)
class Outcome:
    """What a run gave."""

    tokens: dict[str, list[int]]
    logprobs: dict[str, list[float]]
    texts: dict[str, str]
    finish_reasons: dict[str, str] = field(default_factory=dict)
    num_steps: int = 0
    batches: str = ""  # digest of which requests' tokens were computed together, by step
    num_preemptions: int = 0
    peak_blocks: int = 0
    num_offloads: int = 0  # layer groups of a request that left the pool
    num_restores: int = 0  # ... that came back
    num_reused_evictions: int = 0  # blocks given back by an offload and taken again
    sums: dict[str, float] = field(default_factory=dict)  # KVStats.reduce of the whole run
    formula: FormulaCheck = field(default_factory=FormulaCheck)  # made after every step


Hook = Callable[[Any, int], None]  # scheduler, step: called before each step


def make_prompt(num_tokens: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.choice(VOCABULARY) for _ in range(num_tokens)]


def make_engine(case: EngineCase) -> Any:
    """Start an engine in this process."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    arguments: dict[str, Any] = {
        "model": str(case.model.directory()),
        "dtype": case.dtype,
        "kv_cache_dtype": case.kv_cache_dtype,
        "max_model_len": case.max_model_len,
        "block_size": case.block_size,
        "max_num_seqs": case.max_num_seqs,
        "max_num_batched_tokens": case.max_num_batched_tokens,
        "num_gpu_blocks_override": case.num_blocks,
        "kv_cache_memory_bytes": 1 << 28,
        "enable_prefix_caching": case.prefix_caching,
        "enforce_eager": True,
        "tensor_parallel_size": case.tensor_parallel_size,
        "pipeline_parallel_size": case.pipeline_parallel_size,
        "attention_backend": case.attention_backend,
    }
    if case.takes_adapters:
        # One slot stays empty: on a CPU, a request without adapter gets the last's (config.py).
        arguments.update(enable_lora=True, max_loras=2, max_lora_rank=8)
    if case.num_layers is not None:
        arguments["hf_overrides"] = {"num_hidden_layers": case.num_layers}
        arguments["load_format"] = "dummy"
    if case.num_ranks > 1:
        arguments["distributed_executor_backend"] = "mp"
    if case.pipeline_parallel_size > 1:
        # vLLM's eager mode does not warm up the later stages on CPU.
        del arguments["enforce_eager"]
        arguments["compilation_config"] = {"mode": 2, "backend": "eager"}
    if case.speculative is not None:
        arguments["speculative_config"] = dict(case.speculative)
    if case.kv is not None:
        arguments.update(case.kv.engine_args())
    elif case.controller is not None:
        arguments["worker_cls"] = CPU_WORKER
    config = EngineArgs(**arguments).create_engine_config()
    config.scheduler_config.async_scheduling = case.asynchronous  # CPU platforms switch it off
    if case.num_ranks > 1:
        config.parallel_config.distributed_executor_backend = CPU_EXECUTOR
        _fork_workers()
    _use_our_scheduler(config, case)
    return LLMEngine.from_vllm_config(config)


def _use_our_scheduler(config: Any, case: EngineCase) -> None:
    """Have requests scheduled as a case says; stock vLLM's scheduler where it says nothing."""
    if case.controller is not None:
        config.additional_config |= case.controller.engine_args()
        config.scheduler_config.scheduler_cls = (
            ASYNC_SCHEDULER if case.asynchronous else SYNC_SCHEDULER
        )
    if case.kv is not None:
        use_layerwise_scheduler(config)
        if case.layer_time is not None:
            emulate(config, case.layer_time)


def _fork_workers() -> None:
    """Have workers forked from one process that has imported what they need, once for all engines.

    Importing vLLM takes ten seconds of the processor, and vLLM would do it in every worker.
    """
    from vllm.v1.executor import multiproc_executor

    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["services.executor.plugin.cpu_worker"])
    multiproc_executor.get_mp_context = lambda: context


class StepRunner:
    """Drives one engine; several workloads may follow each other."""

    def __init__(self, case: EngineCase) -> None:
        self.case = case
        self._environment = pytest.MonkeyPatch()
        for name, value in ENVIRONMENT.items():
            self._environment.setenv(name, value)
        if case.kv is not None:
            # vLLM would go on with that one's worker half, and its options.
            from vllm.distributed.kv_transfer import has_kv_transfer_group

            assert not has_kv_transfer_group(), "another layer-wise engine is open in this process"
        self.engine = make_engine(case)
        self.core = self.engine.engine_core.engine_core
        self.scheduler = self.core.scheduler

    def run(
        self, workload: Sequence[Arrival], *, hook: Hook | None = None, check: bool = True
    ) -> Outcome:
        """Run a workload that finds nothing of earlier ones in the prefix cache."""
        if self.case.kv is not None:
            self.scheduler.reset_prefix_cache()
        outcome = Outcome(tokens={}, logprobs={}, texts={})
        pending = sorted(workload, key=lambda arrival: arrival.step)
        counters = _Counters(self, moves=check and self.case.kv is not None)
        while pending or self.engine.has_unfinished_requests():
            while pending and pending[0].step <= outcome.num_steps:
                self.add(pending.pop(0))
            self._abort(workload, outcome)
            if hook is not None:
                hook(self.scheduler, outcome.num_steps)
            for output in self.engine.step():
                _record(outcome, output)
            outcome.num_steps += 1
            counters.after_step(outcome)
            if check and (self.case.kv or self.case.controller):
                self.scheduler.check_integrity()
            if check and self.case.kv is not None:
                outcome.formula.after_step(self.scheduler)
            assert outcome.num_steps < MAX_STEPS, "the engine makes no progress"
        self._drain()
        counters.finish(outcome)
        return outcome

    def add(self, arrival: Arrival) -> None:
        """Let a request arrive now."""
        from vllm import SamplingParams
        from vllm.lora.request import LoRARequest

        adapter = arrival.adapter and LoRARequest(arrival.adapter.name, 1, str(arrival.adapter))
        options = {"temperature": 0, "ignore_eos": True, **arrival.sampling}
        salt = {"cache_salt": arrival.cache_salt} if arrival.cache_salt else {}
        self.engine.add_request(
            arrival.request_id,
            {"prompt_token_ids": list(arrival.prompt), **salt},
            SamplingParams(max_tokens=arrival.num_output_tokens, **options),
            lora_request=adapter,
        )

    def _abort(self, workload: Sequence[Arrival], outcome: Outcome) -> None:
        due = [a.request_id for a in workload if a.abort_at == outcome.num_steps]
        if due:
            self.engine.abort_request(due)

    def _drain(self) -> None:
        """Let steps in flight and copies of ended requests end, so that the pool is whole."""
        while self.core.batch_queue:
            self.engine.step()
        for _ in range(10_000):
            if self.case.kv is None or not self._waits_for_copies():
                return
            self._step_without_tokens()
        raise AssertionError("copies of ended requests never end")

    def _waits_for_copies(self) -> bool:
        owner = self.scheduler.block_owner
        quarantine = owner.quarantine
        if self.scheduler.transfers.needs_steps:
            return True
        return bool(owner.restores.orphans or quarantine.num_blocks or quarantine.num_slots)

    def _step_without_tokens(self) -> None:
        output = self.scheduler.schedule()
        result = self.core.model_executor.execute_model(output, non_block=False)
        self.scheduler.update_from_output(output, result)

    def close(self) -> None:
        """Stop the engine for good: its finalisers take down what the next one sets up."""
        self.core.shutdown()
        del self.engine, self.core, self.scheduler
        gc.collect()
        self._environment.undo()


class _Counters:
    """Counts what happens in one run, by listening at the scheduler's methods.

    Every move of a block is heard only if `moves`: it takes time.
    """

    def __init__(self, runner: StepRunner, *, moves: bool) -> None:
        self._moves = moves
        self._runner = runner
        self._pool = runner.scheduler.kv_cache_manager.block_pool
        self._stats: Any = None
        self._patched: list[tuple[Any, str]] = []
        self._evicted: set[int] = set()
        self._offloading = False
        self._counted = Outcome(tokens={}, logprobs={}, texts={})
        self._batches = hashlib.sha256()
        self._listen(runner.scheduler, "schedule", self._on_schedule)
        self._listen(runner.scheduler, "update_from_output", self._on_update)
        self._listen(runner.scheduler, "_preempt_request", self._on_preempt)
        if moves:
            self._owner = runner.scheduler.block_owner
            self._num_restored_before = self._owner.counters.num_restored_groups
            self._listen(self._owner, "offload", self._on_offload)
            self._listen(self._owner, "seal", self._on_seal)
            self._listen(self._pool, "free_blocks", self._on_free)
            self._listen(self._pool, "get_new_blocks", self._on_take)

    def _listen(self, target: Any, name: str, listener: Any) -> None:
        original = getattr(target, name)
        setattr(target, name, lambda *args, **kwargs: listener(original, *args, **kwargs))
        self._patched.append((target, name))

    def _on_schedule(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        output = original(*args, **kwargs)
        if output.num_scheduled_tokens:
            self._batches.update(repr(sorted(output.num_scheduled_tokens.items())).encode())
        return output

    def _on_update(self, original: Any, scheduler_output: Any, result: Any) -> Any:
        output = result.kv_connector_output
        if output is not None and output.kv_connector_stats is not None:
            stats = output.kv_connector_stats
            self._stats = stats if self._stats is None else self._stats.aggregate(stats)
        return original(scheduler_output, result)

    def _on_preempt(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        self._counted.num_preemptions += 1
        return original(*args, **kwargs)

    def _on_offload(self, original: Any, request: Any, groups: Any) -> None:
        self._counted.num_offloads += sum(not request.groups[g].offloaded for g in groups)
        original(request, groups)

    def _on_seal(self, original: Any, request: Any) -> None:
        self._offloading = True
        original(request)
        self._offloading = False

    def _on_free(self, original: Any, blocks: Any) -> None:
        blocks = list(blocks)
        if self._offloading:
            self._evicted.update(block.block_id for block in blocks)
        original(blocks)

    def _on_take(self, original: Any, num_blocks: int) -> Any:
        blocks = original(num_blocks)
        reused = self._evicted.intersection(block.block_id for block in blocks)
        self._counted.num_reused_evictions += len(reused)
        self._evicted -= reused
        return blocks

    def after_step(self, outcome: Outcome) -> None:
        num_used = self._pool.num_gpu_blocks - 1 - self._pool.get_num_free_blocks()
        outcome.peak_blocks = max(outcome.peak_blocks, num_used)

    def finish(self, outcome: Outcome) -> None:
        for target, name in self._patched:
            delattr(target, name)  # the class's own method shows again
        outcome.batches = self._batches.hexdigest()
        outcome.num_preemptions = self._counted.num_preemptions
        outcome.num_offloads = self._counted.num_offloads
        outcome.num_reused_evictions = self._counted.num_reused_evictions
        if self._moves:
            outcome.num_restores = (
                self._owner.counters.num_restored_groups - self._num_restored_before
            )
        if self._stats is not None:
            outcome.sums = self._stats.reduce()


def _record(outcome: Outcome, output: Any) -> None:
    """Take in a request's answers; of several the first has its name, the others a number, too."""
    for completion in output.outputs:
        index = f"/{completion.index}" if completion.index else ""
        name = f"{output.request_id}{index}"
        outcome.tokens[name] = list(completion.token_ids)
        outcome.texts[name] = completion.text
        if completion.finish_reason is not None:
            outcome.finish_reasons[name] = str(completion.finish_reason)
        if completion.logprobs is not None:
            outcome.logprobs[name] = [
                entry[token].logprob
                for entry, token in zip(completion.logprobs, completion.token_ids, strict=True)
            ]


def run_case(case: EngineCase, workload: Sequence[Arrival], *, hook: Hook | None = None) -> Outcome:
    """Run one workload on an engine of its own."""
    runner = StepRunner(case)
    try:
        return runner.run(workload, hook=hook)
    finally:
        runner.close()


def stock(case: EngineCase) -> EngineCase:
    """Return the case without layer-wise KV, with a pool that holds everything."""
    return replace(case, kv=None, controller=None, num_blocks=4_096, asynchronous=False)


def first_difference(expected: Outcome, actual: Outcome) -> dict[str, int]:
    """Return, per request whose tokens differ, the index of the first different one."""
    differing = {}
    for request_id, tokens in expected.tokens.items():
        got = actual.tokens.get(request_id, [])
        if got != tokens:
            pairs = zip(tokens, got, strict=False)
            differing[request_id] = next(
                (i for i, (a, b) in enumerate(pairs) if a != b), min(len(tokens), len(got))
            )
    return differing
