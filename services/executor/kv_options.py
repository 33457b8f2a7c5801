"""Settings of layer-wise KV, as they travel in vLLM's `additional_config`, and what they exclude.

vLLM hands `additional_config` to the scheduler and to every worker, so that all of them see the
same settings. Copies run without vLLM: it is imported where it is needed.
"""

from collections import UserDict
from collections.abc import Mapping
from dataclasses import asdict
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

import pydantic.dataclasses
from pydantic import Field

from services.control.measures.rates import MAX_MIRRORED_BLOCKS
from services.control.room.capacity_guard import MAX_STAGING
from services.executor.model_kinds import keeps_less, refused_kind

if TYPE_CHECKING:
    from vllm.config import VllmConfig

CONFIG_KEY = "evenflow_kv"
CPU_WORKER = "services.executor.plugin.cpu_worker.LayerwiseCPUWorker"
GPU_WORKER = "services.executor.plugin.gpu_worker.LayerwiseGPUWorker"
# KV whose tokens have been compared with stock vLLM's. With a scale per token and head it has not.
COMPARED_KV_DTYPES = frozenset(
    {"auto", "float16", "bfloat16", "float32", "fp8", "fp8_e4m3", "fp8_e5m2"}
)
# How drafts are made that have been compared: from tokens alone, or by layers with KV of their own.
DRAFTS_WITH_KV = ("eagle", "eagle3", "mtp", "draft_model")
DRAFTS = ("ngram", "suffix", "custom_class", *DRAFTS_WITH_KV)
DRAFTS_WITHOUT = "serve it without --layerwise-kv: drafts and --policy evenflow work there"
FREE_MEMORY_SHARE = 0.5  # of a machine's free memory: no more is taken for KV unasked

# What values there are; settings of the same name have the same.
LayersPerGroup: TypeAlias = Annotated[int, Field(ge=1)]
StagingBuffers: TypeAlias = Annotated[int, Field(ge=1, le=MAX_STAGING)]
Amount: TypeAlias = Annotated[int, Field(ge=0)]
AUTO: Literal["auto"] = "auto"
HostBytes: TypeAlias = Amount | Literal["auto"]  # auto: by the pool (sizing.py)
Rate: TypeAlias = Annotated[float, Field(ge=0)]
Limit: TypeAlias = Annotated[float, Field(gt=0)]
Share: TypeAlias = Annotated[float, Field(ge=0, le=1)]


class UncompiledOptions(UserDict[str, Any]):
    """Options for `additional_config` that change nothing of what vLLM compiles.

    A dict there is part of the compile cache's key: each change of it would compile anew.
    """

    def compute_hash(self) -> str:
        """Return what stands for them in that key, whatever they are."""
        return "evenflow"


class GuardMode(StrEnum):
    """Which blocks the integrity guard checks when they come back into the pool."""

    OFF = "off"
    SAMPLE = "sample"  # a few of each copy, each time others
    ALL = "all"


@pydantic.dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class KVOptions:
    """How KV is kept in pool and host memory. Raises `ValueError` for a value out of its range."""

    layers_per_group: LayersPerGroup = 1  # contiguous layers that share a block table
    max_staging_buffers: StagingBuffers = MAX_STAGING  # per request
    host_bytes: HostBytes = AUTO  # host memory for KV of one rank
    pin_bytes_per_s: Rate = 0.0  # CPU only: speed of modelled pinning; 0: ready at once
    predicted_output_tokens: int = 512  # host room reserved beyond the prompt, at most max_tokens
    # Write-through of resident groups; 0: none.
    max_mirrored_blocks_per_step: Amount = MAX_MIRRORED_BLOCKS
    restore_when_free_frac: float = 0.1  # of the pool must stay free for a layer to come back
    overlap_load_evict: bool = True  # loads of one request begin while another's blocks drain
    prefix_caching: bool = True  # requests begin with what others left on the host
    retention_frac: Share = 0.25  # of the host, that one account may retain at once
    # The same times the seconds that are still to come: 900 is a quarter of the host for an hour.
    retention_host_s: Rate = 900.0
    max_pause_s: Limit = 60.0  # a request whose reader has stopped runs again after this
    h2d_bytes_per_s: Rate = 0.0  # CPU only: speed of the modelled link; 0: memory speed
    d2h_bytes_per_s: Rate = 0.0  # CPU only
    copy_latency_s: float = 0.0  # CPU only: per chunk
    integrity_guard: GuardMode = GuardMode.SAMPLE  # which blocks are checked when they come back
    copy_timeout_s: Limit = 30.0  # beyond what the bytes take, until a copy counts as hung
    slowest_bytes_per_s: Limit = 50e6  # a link that is slower than this counts as broken
    poison: bool = False  # tests only: freed and awaited blocks are NaN

    @classmethod
    def of(cls, vllm_config: "VllmConfig") -> "KVOptions":
        """Return the options that an engine was started with."""
        return cls(**(vllm_config.additional_config or {}).get(CONFIG_KEY, {}))

    def engine_args(self) -> dict[str, Any]:
        """Return the engine arguments that switch layer-wise KV on, but for the scheduler class."""
        from vllm.platforms import current_platform

        return {
            "worker_cls": GPU_WORKER if current_platform.is_cuda() else CPU_WORKER,
            "kv_transfer_config": {
                "kv_connector": "LayerwiseConnector",
                "kv_connector_module_path": "services.executor.plugin.connector",
                "kv_role": "kv_both",
            },
            "additional_config": UncompiledOptions({CONFIG_KEY: asdict(self)}),
        }


def layers_per_group(vllm_config: "VllmConfig") -> int:
    """Return the layers of a pipeline stage that share a block table, layer-wise KV or not."""
    if CONFIG_KEY in (vllm_config.additional_config or {}):
        return KVOptions.of(vllm_config).layers_per_group
    num_layers: int = vllm_config.model_config.get_total_num_hidden_layers()
    num_stages: int = vllm_config.parallel_config.pipeline_parallel_size
    return num_layers // num_stages


def caches_prefixes(vllm_config: "VllmConfig") -> bool:
    """Return whether requests begin with KV of earlier ones: in the pool or on the host."""
    if CONFIG_KEY in (vllm_config.additional_config or {}):
        has_drafts = vllm_config.speculative_config is not None
        is_anchored = not (has_drafts and has_side_groups(vllm_config))
        return KVOptions.of(vllm_config).prefix_caching and is_anchored
    return bool(vllm_config.cache_config.enable_prefix_caching)


def has_side_groups(vllm_config: "VllmConfig") -> bool:
    """Return whether some layers never leave the pool: the model's, or those that make drafts."""
    drafts = vllm_config.speculative_config
    drafts_with_kv = drafts is not None and drafts.method in DRAFTS_WITH_KV
    return drafts_with_kv or keeps_less_kv(vllm_config)


def keeps_less_kv(vllm_config: "VllmConfig") -> bool:
    """Return whether some layers keep a window of their KV, or a state, as the model says.

    A window that no request outgrows is none.
    """
    model = vllm_config.model_config
    config = model.hf_config.to_dict()
    return bool(model.is_hybrid) or keeps_less(config, max_model_len=model.max_model_len)


def check_supported(vllm_config: "VllmConfig") -> None:
    """Raise ValueError naming the first option that does not work with layer-wise KV."""
    from vllm.platforms import current_platform

    options = KVOptions.of(vllm_config)
    parallel = vllm_config.parallel_config
    model = vllm_config.model_config
    num_layers = model.get_total_num_hidden_layers()
    num_stages = parallel.pipeline_parallel_size
    graphs = vllm_config.compilation_config.cudagraph_mode
    cache_dtype = vllm_config.cache_config.cache_dtype
    events = vllm_config.kv_events_config
    has_sides = keeps_less_kv(vllm_config)
    kind = refused_kind(model.hf_config.to_dict(), max_model_len=model.max_model_len)
    refusals = {
        **({} if current_platform.is_cpu() else _refusals_on_a_device(options)),
        f"the device {current_platform.device_name}, only with CPU and CUDA": not (
            current_platform.is_cpu() or current_platform.is_cuda()
        ),
        "enable_prefix_caching": vllm_config.cache_config.enable_prefix_caching,
        "kv_events_config": events is not None and events.enable_kv_cache_events,
        f"kv_cache_dtype={cache_dtype}": cache_dtype not in COMPARED_KV_DTYPES,
        **_refusals_of_drafts(vllm_config),
        "kv_sharing_fast_prefill": vllm_config.cache_config.kv_sharing_fast_prefill,
        "data_parallel_size": parallel.data_parallel_size > 1,
        "enable_dbo": parallel.enable_dbo,
        "decode_context_parallel_size": parallel.decode_context_parallel_size > 1,
        "prefill_context_parallel_size": parallel.prefill_context_parallel_size > 1,
        "full CUDA graphs alone, for steps with copies need piecewise ones": bool(
            graphs and graphs.has_full_cudagraphs() and not graphs.has_piecewise_cudagraphs()
        ),
        "an encoder-decoder model": model.is_encoder_decoder,
        f"kv_cache_dtype={cache_dtype} and MLA": model.use_mla and cache_dtype.startswith("fp8"),
        str(kind): kind is not None,
        "disable_hybrid_kv_cache_manager": bool(
            vllm_config.scheduler_config.disable_hybrid_kv_cache_manager
        ),
        f"layers_per_group={options.layers_per_group} with {num_layers} layers in {num_stages} "
        "pipeline stages": not has_sides
        and bool(num_layers % (num_stages * options.layers_per_group)),
        "pipeline stages and a model with sliding windows or states": has_sides and num_stages > 1,
        f"kv_cache_dtype={cache_dtype} and a model with sliding windows or states": (
            has_sides and cache_dtype.startswith("fp8")
        ),
    }
    _refuse("layer-wise KV", refusals)


def check_drafts_supported(vllm_config: "VllmConfig") -> None:
    """Raise ValueError for drafts beside which vLLM itself computes wrong tokens, if there are."""
    from vllm.platforms import current_platform

    model = vllm_config.model_config
    if vllm_config.speculative_config is None or not current_platform.is_cpu():
        return
    why = "on a CPU, where vLLM's kernels for it take no drafts and compute wrong tokens"
    refusals = {f"a model with states {why}": model.is_hybrid, f"MLA {why}": model.use_mla}
    _refuse("speculative decoding", refusals)


def check_nodes_supported(vllm_config: "VllmConfig") -> None:
    """Raise ValueError naming the first option that does not work with several nodes, if there are.

    Where tokens have not been compared with those of one process.
    """
    from vllm.platforms import current_platform

    parallel, model = vllm_config.parallel_config, vllm_config.model_config
    if parallel.nnodes == 1:
        return
    cache_dtype, drafts = vllm_config.cache_config.cache_dtype, vllm_config.speculative_config
    has_stages = parallel.pipeline_parallel_size > 1
    refusals = {
        f"the device {current_platform.device_name}, only with CPU": not current_platform.is_cpu(),
        f"distributed_executor_backend={parallel.distributed_executor_backend}, only with mp": (
            parallel.distributed_executor_backend != "mp"
        ),
        "data_parallel_size": parallel.data_parallel_size > 1,
        "enable_expert_parallel": parallel.enable_expert_parallel,
        "decode_context_parallel_size": parallel.decode_context_parallel_size > 1,
        "prefill_context_parallel_size": parallel.prefill_context_parallel_size > 1,
        "enable_dbo": parallel.enable_dbo,
        "adapters": vllm_config.lora_config is not None,
        "a quantised model": model.quantization is not None,
        f"kv_cache_dtype={cache_dtype}": cache_dtype.startswith("fp8"),
        "a model of more than text": model.is_multimodal_model,
        "an encoder-decoder model": model.is_encoder_decoder,
        "pipeline stages and a model with states": has_stages and model.is_hybrid,
        "pipeline stages and speculative decoding": has_stages and drafts is not None,
        f"speculative decoding by {drafts and drafts.method}, only by {', '.join(DRAFTS)}": (
            drafts is not None and drafts.method not in DRAFTS
        ),
    }
    _refuse("an engine over several nodes", refusals)


def check_uncached_supported(vllm_config: "VllmConfig") -> None:
    """Raise ValueError naming the first option that does not work with uncached KV (`ellm`).

    Where KV that is computed anew has not been compared with stock vLLM's, token by token.
    """
    from vllm.platforms import current_platform

    cache_dtype = vllm_config.cache_config.cache_dtype
    refusals = {
        f"the device {current_platform.device_name}, only with CPU": not current_platform.is_cpu(),
        f"kv_cache_dtype={cache_dtype}": cache_dtype.startswith("fp8"),
        "a model of more than text": vllm_config.model_config.is_multimodal_model,
        "several nodes": vllm_config.parallel_config.nnodes > 1,
        "MLA": vllm_config.model_config.use_mla,
        "prompt embeddings": vllm_config.model_config.enable_prompt_embeds,
        "a model with sliding windows or states": keeps_less_kv(vllm_config),
        "speculative decoding": vllm_config.speculative_config is not None,
    }
    _refuse("ellm", refusals)


def _refuse(what: str, refusals: Mapping[str, bool]) -> None:
    for name, asked in refusals.items():
        if asked:
            raise ValueError(f"{what} does not work with {name}")


def computes_prompts_whole(vllm_config: "VllmConfig") -> bool:
    """Return whether attention cannot compute the rest of a prompt behind KV that is there.

    vLLM's reference backend of MLA on a CPU. Without chunked prefill others compute it, if asked.
    """
    is_chunked = vllm_config.scheduler_config.enable_chunked_prefill
    if is_chunked or not vllm_config.model_config.use_mla:
        return False
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


def max_num_active_seqs(vllm_config: "VllmConfig") -> int:
    """Return how many requests a step may serve: the batch may have more rows."""
    scheduler = vllm_config.scheduler_config
    most: int = scheduler.max_num_active_seqs or scheduler.max_num_seqs
    return most


def _refusals_of_drafts(vllm_config: "VllmConfig") -> dict[str, bool]:
    """Return with what speculative decoding has not been compared, and whether it is asked for."""
    drafts = vllm_config.speculative_config
    if drafts is None:
        return {}
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    cache_dtype = vllm_config.cache_config.cache_dtype
    return {
        f"speculative decoding by {drafts.method}, only by {', '.join(DRAFTS)}; {DRAFTS_WITHOUT}": (
            drafts.method not in DRAFTS
        ),
        f"speculative decoding and a model with states; {DRAFTS_WITHOUT}": model.is_hybrid,
        f"speculative decoding by {drafts.method} and sliding windows; {DRAFTS_WITHOUT}": (
            drafts.method == "draft_model" and keeps_less_kv(vllm_config)
        ),
        f"speculative decoding and MLA; {DRAFTS_WITHOUT}": model.use_mla,
        f"speculative decoding by {drafts.method} and kv_cache_dtype={cache_dtype}": (
            drafts.method in DRAFTS_WITH_KV and cache_dtype.startswith("fp8")
        ),
        f"speculative decoding and pipeline stages; {DRAFTS_WITHOUT}": (
            parallel.pipeline_parallel_size > 1
        ),
    }


def _refusals_on_a_device(options: KVOptions) -> dict[str, bool]:
    """Return what only a CPU can do, and whether it is asked for."""
    is_modelled = any((options.h2d_bytes_per_s, options.d2h_bytes_per_s, options.copy_latency_s))
    return {
        "a modelled link on a real one": is_modelled,
        "modelled pinning on a real device": bool(options.pin_bytes_per_s),
    }
