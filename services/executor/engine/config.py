"""Settings to vLLM's own configuration."""

from dataclasses import asdict, replace
from typing import Any

import structlog
from vllm.config import KVEventsConfig, StructuredOutputsConfig, VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.platforms import current_platform
from vllm.utils.torch_utils import kv_cache_dtype_str_to_dtype, resolve_kv_cache_dtype_string

from services.control.options import ControllerOptions
from services.control.room.capacity_guard import PLANNED_SPARE_FRAC
from services.executor.engine.options import GRAMMAR_BACKEND, read_engine_options
from services.executor.kv_options import (
    CONFIG_KEY,
    KVOptions,
    UncompiledOptions,
    check_drafts_supported,
    check_nodes_supported,
    check_supported,
    check_uncached_supported,
    computes_prompts_whole,
    max_num_active_seqs,
)
from services.executor.prompts.prompt_renderer import NUM_WORKERS
from services.executor.settings import NO_PLANNING, ExecutorSettings
from services.executor.sizing import block_size_for_copies
from services.executor.types import UnsupportedError
from services.placement.presets import preset_of
from services.placement.run.papers.ellm import EllmRules
from services.placement.types import PolicyParameters

log = structlog.get_logger()

CPU_KV_CACHE_BYTES = 1 << 30  # vLLM's own default is a share of all memory of the machine
# The same as PLANNED_SPARE_FRAC where the capacity guard decides alone, before every step.
LONE_SPARE_FRAC = 0.1
FIT_TO_POOL = -1  # what vLLM calls a context length that is cut to the KV pool
CPU_WORKER = "services.executor.plugin.cpu_worker.EvenflowCPUWorker"
GPU_WORKER = "services.executor.plugin.gpu_worker.EvenflowGPUWorker"
CPU_EXECUTOR = "services.executor.plugin.cpu_executor.SleepingMultiprocExecutor"
_SCHEDULERS = "services.executor.scheduler"
SYNC_SCHEDULER = f"{_SCHEDULERS}.plain.plain_scheduler.EvenflowScheduler"
ASYNC_SCHEDULER = f"{_SCHEDULERS}.plain.plain_scheduler.EvenflowAsyncScheduler"
SYNC_LAYERWISE_SCHEDULER = f"{_SCHEDULERS}.scheduler.LayerwiseScheduler"
ASYNC_LAYERWISE_SCHEDULER = f"{_SCHEDULERS}.scheduler.AsyncLayerwiseScheduler"
SYNC_ELLM_SCHEDULER = f"{_SCHEDULERS}.ellm.EllmScheduler"
ASYNC_ELLM_SCHEDULER = f"{_SCHEDULERS}.ellm.AsyncEllmScheduler"

# Options that have the same name and meaning here and there.
PASSED_ON = (
    "model",
    "tokenizer",
    "revision",
    "trust_remote_code",
    "dtype",
    "quantization",
    "max_model_len",
    "seed",
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "distributed_executor_backend",
    "max_num_seqs",
    "max_num_batched_tokens",
    "scheduling_policy",
    "enforce_eager",
    "enable_prefix_caching",
    "block_size",
    "num_gpu_blocks_override",
    "gpu_memory_utilization",
    "kv_cache_memory_bytes",
)


def make_config(settings: ExecutorSettings, *, rendezvous_port: int = 0) -> VllmConfig:
    """Return the engine's configuration, on this node. Reads the model's files.

    `rendezvous_port`: on the leader's host, of an engine over several nodes. Raises
    UnsupportedError for what does not fit, or work.
    """
    try:
        return _configured(settings, rendezvous_port)
    except ValueError as error:
        raise UnsupportedError(str(error)) from error


def _configured(settings: ExecutorSettings, rendezvous_port: int) -> VllmConfig:
    options: dict[str, Any] = {name: getattr(settings, name) for name in PASSED_ON}
    options["renderer_num_workers"] = NUM_WORKERS
    if settings.max_model_len == "auto":
        options["max_model_len"] = FIT_TO_POOL
    if current_platform.is_cpu() and options["kv_cache_memory_bytes"] is None:
        options["kv_cache_memory_bytes"] = CPU_KV_CACHE_BYTES
    if current_platform.is_cpu():
        options["worker_cls"] = CPU_WORKER
    elif current_platform.is_cuda():
        options["worker_cls"] = GPU_WORKER
    options.update(_policy_args(settings))
    options.update(_further_options(settings))
    options.update(_event_args(settings))
    options.update(_node_args(settings, rendezvous_port))
    options["structured_outputs_config"] = replace(
        options.get("structured_outputs_config", StructuredOutputsConfig()),
        backend=GRAMMAR_BACKEND,
        reasoning_parser=settings.reasoning_parser,
    )
    if settings.lora_modules:
        options.update(_adapter_args(len(settings.lora_modules), options.get("max_loras")))
    args = AsyncEngineArgs(
        **{name: value for name, value in options.items() if value is not None},
        served_model_name=settings.model_id,
        otlp_traces_endpoint=settings.otlp_traces_endpoint or None,
    )
    if settings.uses_layerwise_kv and args.kv_offloading_size is not None:
        raise ValueError("layer-wise KV does not work with kv_offloading_size, another connector")
    if settings.uses_layerwise_kv and args.block_size is None and current_platform.is_cuda():
        args.block_size = _block_size_for_copies(args)
    config = args.create_engine_config()
    check_drafts_supported(config)
    check_nodes_supported(config)
    scheduler = config.scheduler_config
    # Afterwards, because only the finished configuration says which kind vLLM would take.
    if current_platform.is_cpu() and config.parallel_config.distributed_executor_backend == "mp":
        config.parallel_config.distributed_executor_backend = CPU_EXECUTOR
    if settings.uses_layerwise_kv:
        use_layerwise_scheduler(config)
    else:
        scheduler.scheduler_cls = ASYNC_SCHEDULER if scheduler.async_scheduling else SYNC_SCHEDULER
    return config


def use_layerwise_scheduler(config: VllmConfig) -> None:
    """Have layer groups, and requests computed partly anew where the policy wants it.

    Raises ValueError for what does not work with either.
    """
    check_supported(config)
    if computes_prompts_whole(config):
        _keep_nothing_to_begin_with(config)
    scheduler, options = config.scheduler_config, ControllerOptions.of(config)
    is_asynchronous = scheduler.async_scheduling
    if not preset_of(options.policy).recomputes:
        scheduler.scheduler_cls = (
            ASYNC_LAYERWISE_SCHEDULER if is_asynchronous else SYNC_LAYERWISE_SCHEDULER
        )
        return
    check_uncached_supported(config)
    scheduler.scheduler_cls = ASYNC_ELLM_SCHEDULER if is_asynchronous else SYNC_ELLM_SCHEDULER
    # Each request that runs may have a second row.
    scheduler.max_num_active_seqs = max_num_active_seqs(config)
    scheduler.max_num_seqs += scheduler.max_num_active_seqs


def _keep_nothing_to_begin_with(config: VllmConfig) -> None:
    """Have every request computed from its first token on, also one that comes back."""
    options = replace(KVOptions.of(config), prefix_caching=False)
    config.additional_config[CONFIG_KEY] = asdict(options)
    log.warning(
        "prompts_computed_whole",
        reason="MLA's reference backend on a CPU computes nothing behind KV that is there",
        off="cached prefixes on the host, copies of requests that are parked or preempted",
        works="layers that leave and come back; all of it with AMX and bfloat16, or on a GPU",
    )


def _block_size_for_copies(args: AsyncEngineArgs) -> int:
    token_bytes = _token_bytes(args)
    block_size = block_size_for_copies(token_bytes)
    log.info("block_size_chosen", block_size=block_size, page_bytes=block_size * token_bytes)
    return block_size


def _token_bytes(args: AsyncEngineArgs) -> int:
    """Return the KV bytes of one token in one layer on one rank."""
    model = args.create_model_config()
    dtype = kv_cache_dtype_str_to_dtype(
        resolve_kv_cache_dtype_string(args.kv_cache_dtype, model), model
    )
    if model.use_mla:  # one latent for all heads, on every rank
        return int(model.get_head_size() * dtype.itemsize)
    num_heads = max(1, model.get_total_num_kv_heads() // args.tensor_parallel_size)
    return int(2 * num_heads * model.get_head_size() * dtype.itemsize)  # K and V


def _adapter_args(num_adapters: int, max_loras: int | None) -> dict[str, Any]:
    """Return the engine arguments that let requests name adapters."""
    args: dict[str, Any] = {"enable_lora": True}
    if current_platform.is_cpu():
        # There vLLM gives tokens of requests without an adapter the one in the last slot, as soon
        # as others of the step have one: that slot must stay empty (vllm PR #48421).
        args["max_loras"] = max(max_loras or 1, num_adapters + 1)
    return args


def _further_options(settings: ExecutorSettings) -> dict[str, Any]:
    """Return what `engine_args` gives. ValueError if a setting has the same name."""
    if not settings.engine_args:
        return {}
    given = read_engine_options(settings.engine_args)
    if twice := sorted(given.keys() & ExecutorSettings.model_fields.keys()):
        raise ValueError(f"engine_args: {', '.join(twice)} has a setting of its own")
    forms = given.get("structured_outputs_config")
    if forms is not None and forms.reasoning_parser:
        raise ValueError("engine_args: reasoning_parser has a setting of its own")
    if settings.kv_events_endpoint and "kv_events_config" in given:
        raise ValueError("engine_args: kv_events_config beside kv_events_endpoint")
    return given


def _event_args(settings: ExecutorSettings) -> dict[str, Any]:
    """Return the engine arguments that have vLLM tell of its own prefix cache."""
    if not settings.kv_events_endpoint:
        return {}
    if settings.uses_layerwise_kv or settings.enable_prefix_caching is False:
        raise ValueError("kv_events_endpoint: vLLM's own prefix cache is off, nothing is told of")
    events = KVEventsConfig(
        enable_kv_cache_events=True,
        publisher="zmq",
        endpoint=settings.kv_events_endpoint,
        topic=settings.kv_events_topic,
    )
    return {"kv_events_config": events}


def _node_args(settings: ExecutorSettings, rendezvous_port: int) -> dict[str, Any]:
    """Return the engine arguments of a node among several; none of a single one."""
    if settings.nodes == 1:
        return {}
    return {
        "nnodes": settings.nodes,
        "node_rank": settings.node_rank,
        "master_addr": settings.leader_address.rpartition(":")[0].strip("[]"),
        "master_port": rendezvous_port,
    }


def _policy_args(settings: ExecutorSettings) -> dict[str, Any]:
    """Return the engine arguments of whoever decides; none for stock vLLM."""
    if settings.uses_layerwise_kv:
        return _layerwise_args(settings)
    if settings.acting_policy == NO_PLANNING:
        return {}
    options = _controller_options(settings)
    return {"additional_config": UncompiledOptions(options.engine_args())}


def _layerwise_args(settings: ExecutorSettings) -> dict[str, Any]:
    """Return the engine arguments that switch layer-wise KV on. ValueError if they exclude it."""
    if settings.scheduling_policy == "priority":
        raise ValueError("layer-wise KV does not work with scheduling_policy=priority")
    options = KVOptions(
        layers_per_group=settings.kv_layers_per_group,
        max_staging_buffers=settings.kv_staging_buffers,
        host_bytes=settings.kv_host_memory_bytes,
        max_mirrored_blocks_per_step=settings.kv_mirrored_blocks_per_step,
        prefix_caching=settings.enable_prefix_caching is not False,
        max_pause_s=settings.kv_max_pause_s,
        retention_frac=settings.kv_retention_frac,
        retention_host_s=settings.kv_retention_host_s,
        h2d_bytes_per_s=settings.kv_link_bytes_per_s,
        d2h_bytes_per_s=settings.kv_link_bytes_per_s,
        integrity_guard=settings.kv_integrity_guard,
        copy_timeout_s=settings.kv_copy_timeout_s,
        # Plans hold for a window, so that layers do not go back and forth for want of slack.
        restore_when_free_frac=PLANNED_SPARE_FRAC if settings.planner_address else LONE_SPARE_FRAC,
    )
    args = options.engine_args()
    args["additional_config"] |= _controller_options(settings).engine_args()
    return {**args, "enable_prefix_caching": False}  # vLLM's own, of the pool


def _controller_options(settings: ExecutorSettings) -> ControllerOptions:
    return ControllerOptions(
        policy=settings.acting_policy,
        shadow_policy=settings.shadow_policy or "",
        planner_address=settings.planner_address,
        transport=settings.transport,
        plan_timeout_s=settings.plan_timeout_s,
        mismatch_frac=settings.plan_mismatch_frac,
        fairness_half_life_s=settings.fairness_half_life_s if settings.fairness else 0.0,
        run_log=str(settings.run_log or ""),
        seed=settings.seed,
        ellm=EllmRules(uncached_frac=settings.ellm_uncached_frac),
        parameters=PolicyParameters(
            deposit=settings.plan_deposit,
            alpha=settings.plan_alpha,
            min_window=settings.plan_min_window,
            max_window=settings.plan_max_window,
            min_pause_s=settings.plan_min_pause_s,
            max_pause_s=settings.plan_max_pause_s,
        ),
    )
