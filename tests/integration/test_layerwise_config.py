"""Layer-wise KV is switched on by settings, and refuses by name what does not work with it."""

from dataclasses import asdict, replace
from types import SimpleNamespace
from typing import Any

import pytest
from structlog.testing import capture_logs
from vllm.config import CUDAGraphMode, SpeculativeConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.platforms import current_platform
from vllm.v1.worker.gpu_worker import Worker

from lab.kind_models import kind_model
from lab.latent_model import latent_model
from lab.models import exactness_model
from lab.policies.presets import full_name
from services.control.options import ControllerOptions
from services.executor.engine import config as config_module
from services.executor.engine.config import (
    CPU_EXECUTOR,
    SYNC_ELLM_SCHEDULER,
    _block_size_for_copies,
    make_config,
)
from services.executor.engine.engine import shutdown_timeout_s
from services.executor.kv_options import (
    CONFIG_KEY,
    DRAFTS,
    DRAFTS_WITH_KV,
    KVOptions,
    caches_prefixes,
    check_drafts_supported,
    check_nodes_supported,
    check_supported,
    check_uncached_supported,
    computes_prompts_whole,
    has_side_groups,
    max_num_active_seqs,
)
from services.executor.plugin import gpu_worker
from services.executor.plugin.gpu_worker import LayerwiseGPUWorker
from services.executor.settings import ExecutorSettings
from services.executor.sizing import block_size_for_copies, max_ahead_tokens

pytestmark = pytest.mark.filterwarnings("default")


FLEXGEN = full_name("flexgen")


def make_settings(**overrides: Any) -> ExecutorSettings:
    return ExecutorSettings(
        **{"model": str(exactness_model()), "block_size": 32, "layerwise_kv": True, **overrides}
    )


@pytest.fixture(scope="module")
def config() -> Any:
    return make_config(make_settings(kv_layers_per_group=2, kv_host_memory_bytes=1 << 20))


def test_what_is_asked_of_forms_is_added_to_what_evenflow_needs() -> None:
    asked = '{"backend": "xgrammar", "disable_any_whitespace": true}'
    config = make_config(
        make_settings(reasoning_parser="qwen3", engine_args=("--structured-outputs-config", asked))
    ).structured_outputs_config

    assert (config.backend, config.disable_any_whitespace) == ("xgrammar", True)
    assert config.reasoning_parser == "qwen3"
    assert make_config(make_settings()).structured_outputs_config.backend == "xgrammar"


def test_settings_reach_the_scheduler_and_the_workers(config: Any) -> None:
    options = KVOptions.of(config)

    assert (options.layers_per_group, options.host_bytes) == (2, 1 << 20)
    assert "LayerwiseScheduler" in str(config.scheduler_config.scheduler_cls)
    assert "LayerwiseCPUWorker" in str(config.parallel_config.worker_cls)
    assert config.parallel_config.distributed_executor_backend == CPU_EXECUTOR


NODES: dict[str, Any] = {"nodes": 2, "tensor_parallel_size": 2, "leader_address": "10.0.0.1:50051"}


def test_a_node_is_told_where_its_leaders_ranks_are() -> None:
    settings = make_settings(node_rank=1, **NODES)

    parallel = make_config(settings, rendezvous_port=29_500).parallel_config

    assert (parallel.nnodes, parallel.node_rank, parallel.local_world_size) == (2, 1, 1)
    assert (parallel.master_addr, parallel.master_port) == ("10.0.0.1", 29_500)
    assert parallel.distributed_executor_backend == CPU_EXECUTOR


@pytest.fixture(scope="module")
def over_nodes() -> Any:
    """The configuration of one node of two, as vLLM gives it."""
    config = make_config(make_settings(**NODES))
    config.parallel_config.distributed_executor_backend = "mp"
    return config


@pytest.mark.parametrize(
    ("part", "name", "value", "named"),
    [
        ("parallel_config", "data_parallel_size", 2, "data_parallel_size"),
        ("parallel_config", "enable_expert_parallel", True, "enable_expert_parallel"),
        ("parallel_config", "enable_dbo", True, "enable_dbo"),
        ("parallel_config", "decode_context_parallel_size", 2, "decode_context_parallel_size"),
        ("parallel_config", "prefill_context_parallel_size", 2, "prefill_context_parallel_size"),
        ("parallel_config", "distributed_executor_backend", "ray", "distributed_executor_backend"),
        ("cache_config", "cache_dtype", "fp8", "kv_cache_dtype=fp8"),
        ("model_config", "quantization", "awq", "a quantised model"),
        ("model_config", "is_multimodal_model", True, "a model of more than text"),
        ("model_config", "is_encoder_decoder", True, "an encoder-decoder model"),
    ],
)
def test_what_was_not_compared_over_nodes_is_refused_by_name(
    over_nodes: Any, monkeypatch: pytest.MonkeyPatch, part: str, name: str, value: Any, named: str
) -> None:
    owner = getattr(over_nodes, part)
    is_computed = isinstance(getattr(type(owner), name, None), property)
    monkeypatch.setattr(type(owner) if is_computed else owner, name, value)

    with pytest.raises(ValueError, match=f"over several nodes does not work with {named}"):
        check_nodes_supported(over_nodes)


@pytest.mark.parametrize(
    ("kind", "named"), [("is_hybrid", "a model with states"), ("use_mla", "MLA")]
)
def test_drafts_beside_which_vllm_computes_wrong_tokens_are_refused_on_a_cpu(
    config: Any, monkeypatch: pytest.MonkeyPatch, kind: str, named: str
) -> None:
    monkeypatch.setattr(config, "speculative_config", drafting("ngram"))
    check_drafts_supported(config)
    monkeypatch.setattr(type(config.model_config), kind, True)

    with pytest.raises(ValueError, match=f"decoding does not work with {named} on a CPU"):
        check_drafts_supported(config)
    monkeypatch.setattr(current_platform, "is_cpu", lambda: False)
    check_drafts_supported(config)


def test_adapters_over_nodes_are_refused(over_nodes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    check_nodes_supported(over_nodes)
    monkeypatch.setattr(over_nodes, "lora_config", SimpleNamespace())

    with pytest.raises(ValueError, match="adapters"):
        check_nodes_supported(over_nodes)


def test_states_and_drafts_over_nodes_take_no_pipeline_stages(
    over_nodes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafts = SimpleNamespace(method="ngram")
    monkeypatch.setattr(over_nodes, "speculative_config", drafts)
    check_nodes_supported(over_nodes)
    with monkeypatch.context() as in_stages:
        in_stages.setattr(over_nodes.parallel_config, "pipeline_parallel_size", 2)
        with pytest.raises(ValueError, match="pipeline stages and speculative decoding"):
            check_nodes_supported(over_nodes)
        in_stages.setattr(type(over_nodes.model_config), "is_hybrid", True)
        with pytest.raises(ValueError, match="pipeline stages and a model with states"):
            check_nodes_supported(over_nodes)
    drafts.method = "medusa"

    with pytest.raises(ValueError, match="speculative decoding by medusa, only by ngram"):
        check_nodes_supported(over_nodes)


def test_ellm_over_nodes_is_refused() -> None:
    with pytest.raises(ValueError, match="ellm does not work with several nodes"):
        make_config(make_settings(**NODES, policy="ellm"))


def test_nodes_of_a_device_that_was_not_compared_are_refused(
    over_nodes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(current_platform, "is_cpu", lambda: False)

    with pytest.raises(ValueError, match=r"the device .*, only with CPU"):
        check_nodes_supported(over_nodes)


@pytest.mark.parametrize(("asked", "expected"), [(None, True), (True, True), (False, False)])
def test_prefixes_are_cached_on_the_host_and_not_in_the_pool_unless_switched_off(
    asked: bool | None, expected: bool
) -> None:
    config = make_config(make_settings(enable_prefix_caching=asked))

    assert config.cache_config.enable_prefix_caching is False
    assert KVOptions.of(config).prefix_caching is expected
    assert caches_prefixes(config) is expected


def test_layerwise_kv_serves_in_the_order_of_arrival() -> None:
    with pytest.raises(ValueError, match="scheduling_policy"):
        make_config(make_settings(scheduling_policy="priority"))


def test_on_a_cpu_a_slot_for_adapters_stays_empty() -> None:
    """What is in the last one changes the tokens of requests without an adapter."""
    modules = {name: f"/adapters/{name}" for name in ("a", "b")}
    config = make_config(make_settings(lora_modules=modules))
    roomy = make_config(make_settings(lora_modules=modules, engine_args=("--max-loras", "5")))

    assert (config.lora_config.max_loras, roomy.lora_config.max_loras) == (3, 5)
    assert make_config(make_settings()).lora_config is None


def test_stock_vllm_keeps_prefix_caching() -> None:
    plain = make_config(make_settings(layerwise_kv=False))

    assert plain.cache_config.enable_prefix_caching
    assert caches_prefixes(plain)
    assert plain.kv_transfer_config is None


def test_one_setting_switches_to_stock_vllm() -> None:
    stock = make_config(make_settings(policy="vllm"))

    assert stock.kv_transfer_config is None
    assert stock.scheduler_config.policy == "fcfs"
    assert "EvenflowScheduler" in str(stock.scheduler_config.scheduler_cls)


def test_the_policy_and_its_options_reach_the_scheduler() -> None:
    options = ControllerOptions.of(
        make_config(make_settings(policy=FLEXGEN, shadow_policy="orbitflow", plan_alpha=2.0))
    )

    assert (options.policy, options.shadow_policy) == (FLEXGEN, "orbitflow")
    assert options.parameters.alpha == 2.0


@pytest.mark.parametrize(
    ("section", "name", "value", "named"),
    [
        ("cache_config", "enable_prefix_caching", True, "enable_prefix_caching"),
        ("cache_config", "kv_sharing_fast_prefill", True, "kv_sharing_fast_prefill"),
        ("cache_config", "cache_dtype", "fp8_per_token_head", "kv_cache_dtype=fp8_per_token_head"),
        ("cache_config", "cache_dtype", "int8_per_token_head", "kv_cache_dtype=int8"),
        ("cache_config", "cache_dtype", "nvfp4", "kv_cache_dtype=nvfp4"),
        ("parallel_config", "data_parallel_size", 2, "data_parallel_size"),
        ("parallel_config", "enable_dbo", True, "enable_dbo"),
        ("parallel_config", "decode_context_parallel_size", 2, "decode_context_parallel_size"),
        ("parallel_config", "prefill_context_parallel_size", 2, "prefill_context_parallel_size"),
        (
            "scheduler_config",
            "disable_hybrid_kv_cache_manager",
            True,
            "disable_hybrid_kv_cache_manager",
        ),
        ("model_config.hf_text_config", "sliding_window", 128, "sliding windows only"),
        ("model_config.hf_text_config", "index_topk", 2048, "sparse attention"),
    ],
)
def test_options_that_do_not_work_with_it_are_refused_by_name(
    config: Any,
    monkeypatch: pytest.MonkeyPatch,
    section: str,
    name: str,
    value: Any,
    named: str,
) -> None:
    target = config
    for part in section.split("."):
        target = getattr(target, part)
    monkeypatch.setattr(target, name, value, raising=False)

    with pytest.raises(ValueError, match=named):
        check_supported(config)


@pytest.mark.parametrize(("given", "expected"), [(None, None), (0.25, 0.25)])
def test_under_ellm_each_request_may_have_a_second_row(
    given: float | None, expected: float | None
) -> None:
    plain = make_config(make_settings(max_num_seqs=8))
    config = make_config(make_settings(policy="ellm", ellm_uncached_frac=given, max_num_seqs=8))

    assert config.scheduler_config.scheduler_cls == SYNC_ELLM_SCHEDULER
    assert config.scheduler_config.max_num_seqs == 16
    assert max_num_active_seqs(config) == max_num_active_seqs(plain) == 8
    assert ControllerOptions.of(config).ellm.uncached_frac == expected


@pytest.mark.parametrize(
    ("section", "name", "value", "named"),
    [
        ("cache_config", "cache_dtype", "fp8_e4m3", "kv_cache_dtype=fp8_e4m3"),
        ("model_config", "multimodal_config", object(), "more than text"),
        ("model_config", "enable_prompt_embeds", True, "prompt embeddings"),
    ],
)
def test_ellm_refuses_by_name_what_has_not_been_compared(
    config: Any,
    monkeypatch: pytest.MonkeyPatch,
    section: str,
    name: str,
    value: Any,
    named: str,
) -> None:
    check_uncached_supported(config)
    monkeypatch.setattr(getattr(config, section), name, value, raising=False)

    with pytest.raises(ValueError, match=named):
        check_uncached_supported(config)


def test_ellm_is_refused_on_a_gpu(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(current_platform, "is_cpu", lambda: False)

    with pytest.raises(ValueError, match="only with CPU"):
        check_uncached_supported(config)


def test_an_option_of_vllms_that_brings_another_connector_is_refused() -> None:
    with pytest.raises(ValueError, match="kv_offloading_size"):
        make_config(make_settings(engine_args=("--kv-offloading-size", "1")))


EVENTS = ("--kv-events-config", '{"enable_kv_cache_events": true}')


def test_what_is_told_of_vllms_own_cache_is_what_vllm_tells() -> None:
    told = {"kv_events_endpoint": "tcp://*:5557", "kv_events_topic": "kv@a"}
    events = make_config(make_settings(layerwise_kv=False, **told)).kv_events_config

    assert (events.enable_kv_cache_events, events.publisher) == (True, "zmq")
    assert (events.endpoint, events.topic) == ("tcp://*:5557", "kv@a")


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        ({"kv_events_endpoint": "tcp://*:5557"}, "kv_events_endpoint"),
        (
            {
                "kv_events_endpoint": "tcp://*:5557",
                "layerwise_kv": False,
                "enable_prefix_caching": False,
            },
            "kv_events_endpoint",
        ),
        (
            {
                "kv_events_endpoint": "tcp://*:5557",
                "layerwise_kv": False,
                "engine_args": EVENTS,
            },
            "kv_events_config",
        ),
        ({"engine_args": EVENTS}, "kv_events_config"),
    ],
    ids=["layers", "no cache", "twice", "layers, as an option"],
)
def test_where_vllm_has_no_cache_of_its_own_nothing_is_told_of_it(
    overrides: dict[str, Any], named: str
) -> None:
    with pytest.raises(ValueError, match=named):
        make_config(make_settings(**overrides))


def pretend(config: Any, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Let a model be of a kind, as vLLM says."""
    monkeypatch.setattr(type(config.model_config), kind, True)
    monkeypatch.delitem(vars(config.model_config), kind, raising=False)  # a cached one


def test_encoder_decoder_models_are_refused_by_name(
    config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(config, monkeypatch, "is_encoder_decoder")

    with pytest.raises(ValueError, match="encoder-decoder"):
        check_supported(config)


def test_latents_of_eight_bits_and_latents_that_are_computed_anew_are_refused_by_name(
    config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(config, monkeypatch, "use_mla")
    check_supported(config)

    with pytest.raises(ValueError, match="ellm does not work with MLA"):
        check_uncached_supported(config)
    monkeypatch.setattr(config.cache_config, "cache_dtype", "fp8")
    with pytest.raises(ValueError, match="kv_cache_dtype=fp8 and MLA"):
        check_supported(config)


def test_behind_a_backend_that_computes_prompts_whole_nothing_is_kept_to_begin_with() -> None:
    reference = ("--attention-backend", "CPU_MLA")
    settings = make_settings(model=str(latent_model()), block_size=None, engine_args=reference)
    with capture_logs() as logs:
        config = make_config(settings)

    assert not config.scheduler_config.enable_chunked_prefill
    assert computes_prompts_whole(config)
    assert not caches_prefixes(config)
    assert KVOptions.of(config) == replace(KVOptions.of(config), prefix_caching=False)
    (said,) = [entry for entry in logs if entry["event"] == "prompts_computed_whole"]
    assert "GPU" in said["works"]


def test_a_dense_model_keeps_prefixes_also_where_prompts_are_not_chunked(config: Any) -> None:
    assert not computes_prompts_whole(config)
    config = make_config(make_settings(engine_args=("--no-enable-chunked-prefill",)))

    assert not config.scheduler_config.enable_chunked_prefill
    assert not computes_prompts_whole(config)
    assert caches_prefixes(config)


def drafting(method: str) -> SpeculativeConfig:
    drafts = SpeculativeConfig.__new__(SpeculativeConfig)
    drafts.method, drafts.num_speculative_tokens = method, 3
    return drafts


def test_drafts_that_are_made_in_another_way_are_refused_by_name(
    config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for method in DRAFTS:
        monkeypatch.setattr(config, "speculative_config", drafting(method))
        check_supported(config)

    for method in ("medusa", "ngram_gpu", "dflash"):
        monkeypatch.setattr(config, "speculative_config", drafting(method))
        said = rf"decoding by {method}, only by .*without --layerwise-kv"
        with pytest.raises(ValueError, match=said):
            check_supported(config)


def test_what_drafts_were_not_compared_with_is_refused(
    config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    staged = make_config(make_settings(pipeline_parallel_size=2))
    latent = make_config(make_settings(model=str(latent_model())))
    monkeypatch.setattr(config, "speculative_config", drafting("ngram"))
    states = make_config(make_settings(model=str(kind_model("granite4"))))
    refused = ((staged, "pipeline stages"), (latent, "MLA"), (states, "a model with states"))
    for one, reason in refused:
        monkeypatch.setattr(one, "speculative_config", drafting("ngram"))
        with pytest.raises(ValueError, match=f"speculative decoding and {reason}"):
            check_supported(one)
    with pytest.raises(ValueError, match="ellm does not work with speculative decoding"):
        check_uncached_supported(config)
    monkeypatch.setattr(config.cache_config, "cache_dtype", "fp8")
    check_supported(config)
    monkeypatch.setattr(config, "speculative_config", drafting("eagle"))
    with pytest.raises(ValueError, match="decoding by eagle and kv_cache_dtype=fp8"):
        check_supported(config)


@pytest.mark.parametrize("method", DRAFTS)
def test_drafts_go_with_windows(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    windows = make_config(make_settings(model=str(kind_model("gpt_oss"))))
    monkeypatch.setattr(windows, "speculative_config", drafting(method))

    if method == "draft_model":
        with pytest.raises(ValueError, match="decoding by draft_model and sliding windows"):
            check_supported(windows)
    else:
        check_supported(windows)


@pytest.mark.parametrize("method", DRAFTS)
def test_prefixes_are_not_cached_where_drafts_have_kv_of_their_own(
    method: str, config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(config, "speculative_config", drafting(method))

    assert has_side_groups(config) == (method in DRAFTS_WITH_KV)
    assert caches_prefixes(config) == (method not in DRAFTS_WITH_KV)


def test_room_for_drafts_is_what_steps_in_flight_may_accept_and_the_drafter_writes(
    config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert max_ahead_tokens(config) == 0
    monkeypatch.setattr(config, "speculative_config", drafting("ngram"))
    assert max_ahead_tokens(config) == 3
    monkeypatch.setattr(config, "speculative_config", drafting("eagle"))
    assert max_ahead_tokens(config) == 3 + 3
    monkeypatch.setattr(config.scheduler_config, "async_scheduling", True)
    assert max_ahead_tokens(config) == 2 * 3 + 3


@pytest.mark.parametrize(("layers_per_group", "stages"), [(3, 1), (16, 1), (8, 2)])
def test_groups_must_divide_the_layers_of_a_stage(layers_per_group: int, stages: int) -> None:
    settings = make_settings(kv_layers_per_group=layers_per_group, pipeline_parallel_size=stages)

    with pytest.raises(ValueError, match="layers_per_group"):
        make_config(settings)


def test_a_gpu_gets_its_worker_and_other_devices_are_refused_by_name(
    config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    platform = type(current_platform)
    monkeypatch.setattr(platform, "is_cpu", lambda self: False)
    monkeypatch.setattr(platform, "device_name", "abacus")
    with pytest.raises(ValueError, match="the device abacus"):
        check_supported(config)

    monkeypatch.setattr(platform, "is_cuda", lambda self: True)
    check_supported(config)
    assert KVOptions().engine_args()["worker_cls"].endswith(".LayerwiseGPUWorker")


def test_options_change_nothing_of_what_vllm_compiles(config: Any) -> None:
    other = make_config(make_settings(kv_layers_per_group=2, kv_host_memory_bytes=2 << 20))

    assert KVOptions.of(other) != KVOptions.of(config)
    assert other.additional_config.compute_hash() == config.additional_config.compute_hash()
    assert other.compute_hash() == config.compute_hash()


def test_blocks_are_made_for_copy_engines_rank_by_rank() -> None:
    args = AsyncEngineArgs(model=str(exactness_model()), dtype="bfloat16")
    model = args.create_model_config()
    token_bytes = 4 * model.get_total_num_kv_heads() * model.get_head_size()

    assert _block_size_for_copies(args) == block_size_for_copies(token_bytes)
    args.tensor_parallel_size = 2
    assert _block_size_for_copies(args) == block_size_for_copies(token_bytes // 2)
    args.kv_cache_dtype = "fp8"
    assert _block_size_for_copies(args) == block_size_for_copies(token_bytes // 4)


def test_a_latents_blocks_are_as_long_on_every_rank() -> None:
    """576 values of two bytes are 1,152: 128 KiB would be 114 tokens, and 128 are the next step."""
    args = AsyncEngineArgs(model=str(latent_model()), dtype="bfloat16")

    assert _block_size_for_copies(args) == block_size_for_copies(2 * 576) == 128
    args.tensor_parallel_size = 2
    assert _block_size_for_copies(args) == 128


@pytest.mark.parametrize(("asked", "chosen"), [(None, 96), (32, 32)])
def test_on_a_gpu_blocks_have_a_copy_engines_size_unless_one_is_set(
    monkeypatch: pytest.MonkeyPatch, asked: int | None, chosen: int
) -> None:
    monkeypatch.setattr(config_module, "block_size_for_copies", lambda token_bytes: 96)
    platform = SimpleNamespace(is_cpu=lambda: True, is_cuda=lambda: True)
    monkeypatch.setattr(config_module, "current_platform", platform)

    assert make_config(make_settings(block_size=asked)).cache_config.block_size == chosen


def test_processes_that_pin_memory_get_the_time_to_unpin_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pinned = make_settings(kv_host_memory_bytes=50 * 10**9, tensor_parallel_size=2)
    assert shutdown_timeout_s(pinned) == 3.0

    monkeypatch.setattr(type(current_platform), "is_cuda", lambda self: True)
    assert shutdown_timeout_s(pinned) == 3.0 + 2 * 10.0
    assert shutdown_timeout_s(pinned.model_copy(update={"layerwise_kv": False})) == 3.0


@pytest.mark.parametrize(
    ("is_second", "asked_bytes", "num_tables"), [(True, None, 2), (False, None, 1), (True, 1, 0)]
)
def test_the_block_tables_of_all_groups_have_room_beside_the_pool(
    config: Any,
    monkeypatch: pytest.MonkeyPatch,
    is_second: bool,
    asked_bytes: int | None,
    num_tables: int,
) -> None:
    """8 layers in groups of 2, each group with a row of blocks of 32 tokens per request."""
    worker: Any = object.__new__(LayerwiseGPUWorker)
    worker.vllm_config, worker.use_v2_model_runner = config, is_second
    worker.cache_config = SimpleNamespace(kv_cache_memory_bytes=asked_bytes)
    monkeypatch.setattr(Worker, "determine_available_memory", lambda self: 1 << 30)
    row_bytes = 4 * config.model_config.max_model_len // 32

    table_bytes = 4 * config.scheduler_config.max_num_seqs * row_bytes
    assert worker.determine_available_memory() == (1 << 30) - num_tables * table_bytes


@pytest.mark.parametrize(("is_second", "table_bytes"), [(False, 16), (False, 17), (True, 17)])
def test_tables_that_are_copied_whole_in_every_step_are_told_if_they_are_large(
    config: Any, monkeypatch: pytest.MonkeyPatch, is_second: bool, table_bytes: int
) -> None:
    worker: Any = object.__new__(LayerwiseGPUWorker)
    worker.vllm_config, worker.use_v2_model_runner = config, is_second
    worker.cache_config = SimpleNamespace(kv_cache_memory_bytes=None)
    monkeypatch.setattr(Worker, "determine_available_memory", lambda self: 1 << 30)
    monkeypatch.setattr(gpu_worker, "MAX_TABLE_BYTES_PER_STEP", 16)
    monkeypatch.setattr(gpu_worker, "block_table_bytes", lambda config: table_bytes)
    with capture_logs() as lines:
        worker.determine_available_memory()

    told = [line["bytes"] for line in lines if line["event"].endswith("copied_in_every_step")]
    assert told == ([17] if not is_second and table_bytes > 16 else [])


@pytest.mark.parametrize("mode", [CUDAGraphMode.FULL, CUDAGraphMode.FULL_DECODE_ONLY])
def test_graphs_that_always_leave_out_our_hooks_are_refused(
    config: Any, monkeypatch: pytest.MonkeyPatch, mode: CUDAGraphMode
) -> None:
    monkeypatch.setattr(config.compilation_config, "cudagraph_mode", mode)
    with pytest.raises(ValueError, match="full CUDA graphs alone"):
        check_supported(config)

    for other in (CUDAGraphMode.FULL_AND_PIECEWISE, CUDAGraphMode.PIECEWISE, CUDAGraphMode.NONE):
        monkeypatch.setattr(config.compilation_config, "cudagraph_mode", other)
        check_supported(config)


@pytest.mark.parametrize(
    ("option", "named"),
    [
        ({"h2d_bytes_per_s": 1e9}, "a modelled link"),
        ({"pin_bytes_per_s": 1e9}, "modelled pinning"),
    ],
)
def test_what_only_a_cpu_can_do_is_refused_on_a_gpu(
    config: Any, monkeypatch: pytest.MonkeyPatch, option: dict[str, Any], named: str
) -> None:
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda self: False)
    monkeypatch.setattr(type(current_platform), "is_cuda", lambda self: True)
    asked = {**config.additional_config, CONFIG_KEY: asdict(KVOptions(**option))}
    monkeypatch.setattr(config, "additional_config", asked)

    with pytest.raises(ValueError, match=named):
        check_supported(config)


@pytest.mark.parametrize(
    "wrong",
    [
        {"layers_per_group": 0},
        {"max_staging_buffers": 3},
        {"host_bytes": -1},
        {"max_mirrored_blocks_per_step": -1},
    ],
)
def test_options_out_of_range_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        KVOptions(**wrong)
