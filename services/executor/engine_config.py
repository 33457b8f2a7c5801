"""Settings to vLLM's own configuration."""

from vllm.config import VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.platforms import current_platform

from services.executor.settings import ExecutorSettings

CPU_KV_CACHE_BYTES = 1 << 30  # vLLM's own default is a share of all memory of the machine
FIT_TO_POOL = -1  # what vLLM calls a context length that is cut to the KV pool
SYNC_SCHEDULER = "services.executor.kv.scheduler.EvenflowScheduler"
ASYNC_SCHEDULER = "services.executor.kv.scheduler.EvenflowAsyncScheduler"

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
    "enforce_eager",
    "enable_prefix_caching",
    "block_size",
    "num_gpu_blocks_override",
    "gpu_memory_utilization",
    "kv_cache_memory_bytes",
)


def make_config(settings: ExecutorSettings) -> VllmConfig:
    """Return the engine's configuration. Reads the model's files; ValueError if they do not fit."""
    options = {name: getattr(settings, name) for name in PASSED_ON}
    if settings.max_model_len == "auto":
        options["max_model_len"] = FIT_TO_POOL
    if current_platform.is_cpu() and options["kv_cache_memory_bytes"] is None:
        options["kv_cache_memory_bytes"] = CPU_KV_CACHE_BYTES
    args = AsyncEngineArgs(
        **{name: value for name, value in options.items() if value is not None},
        served_model_name=settings.model_id,
    )
    config = args.create_engine_config()
    scheduler = config.scheduler_config
    # Afterwards, because only the finished configuration says which kind vLLM would take.
    scheduler.scheduler_cls = ASYNC_SCHEDULER if scheduler.async_scheduling else SYNC_SCHEDULER
    return config
