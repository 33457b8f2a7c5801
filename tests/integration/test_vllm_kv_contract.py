"""What layer-wise KV relies on inside vLLM. An upgrade of vLLM fails here first."""

import dataclasses
import inspect
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.config import CompilationConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.model_executor.layers.attention.attention import Attention
from vllm.model_executor.layers.attention.kv_transfer_utils import maybe_transfer_kv_layer
from vllm.v1.attention.backend import AttentionMetadataBuilder
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionMetadata,
    CPUAttentionMetadataBuilder,
)
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionMetadata,
    FlashAttentionMetadataBuilder,
)
from vllm.v1.attention.backends.utils import resolve_kv_cache_layout
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_coordinator import KVCacheCoordinator, KVCacheCoordinatorNoPrefixCache
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.core import EngineCore
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry
from vllm.v1.request import Request
from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer
from vllm.v1.worker.block_table import MultiGroupBlockTable
from vllm.v1.worker.gpu.async_utils import AsyncOutput
from vllm.v1.worker.gpu.attn_utils import build_attn_metadata
from vllm.v1.worker.gpu.block_table import BlockTables
from vllm.v1.worker.gpu.dp_utils import dispatch_cg_and_sync_dp
from vllm.v1.worker.gpu.kv_connector import ActiveKVConnector
from vllm.v1.worker.gpu.model_runner import GPUModelRunner as GPUModelRunnerV2
from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator
from vllm.v1.worker.gpu_model_runner import GPUModelRunner
from vllm.v1.worker.gpu_worker import Worker as GPUWorker
from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin

from services.executor.plugin.block_tables import StackedBlockTables
from services.executor.plugin.connector import LayerwiseConnector
from services.executor.plugin.flash_attention import MemoFlashAttentionBackend
from services.executor.plugin.gpu_worker import LayerwiseGPUWorker
from services.executor.plugin.spec import LayerGroupSpec
from services.executor.scheduler.coordinator import LayerwiseCoordinator

pytestmark = pytest.mark.filterwarnings("default")


def source(function: Any) -> str:
    return inspect.getsource(function)


def test_blocks_are_taken_and_given_back_by_these_calls() -> None:
    assert list(inspect.signature(BlockPool.get_new_blocks).parameters) == ["self", "num_blocks"]
    assert list(inspect.signature(BlockPool.free_blocks).parameters) == ["self", "ordered_blocks"]
    assert "null_block" in source(BlockPool.__init__)


def test_blocks_that_are_unpinned_are_handed_out_last_and_whoever_left_them_is_told() -> None:
    pool, reused = BlockPool(6, False, 16), []
    left, usual = pool.get_new_blocks(2), pool.get_new_blocks(2)
    pool.unpin_blocks(left, reused.append)
    pool.free_blocks(usual)
    assert pool.get_num_free_blocks() == 5

    pool.get_new_blocks(3)
    assert reused == []
    pool.touch(left[:1])
    pool.get_new_blocks(1)

    assert [block.block_id for block in reused] == [left[1].block_id]


def test_the_manager_asks_its_coordinator_for_everything() -> None:
    body = source(KVCacheManager.allocate_slots)
    for call in (
        "self.coordinator.get_num_blocks_to_allocate(",
        "self.coordinator.remove_skipped_blocks(",
        "self.coordinator.allocate_new_blocks(",
    ):
        assert call in body
    assert "self.coordinator.free(" in source(KVCacheManager.free)
    overridden = {
        "get_num_blocks_to_allocate",
        "allocate_new_blocks",
        "allocate_new_computed_blocks",
        "get_blocks",
        "pop_blocks_for_free",
        "free",
        "remove_skipped_blocks",
        "cache_blocks",
        "new_step_starts",
    }
    assert overridden <= set(vars(LayerwiseCoordinator))
    assert all(hasattr(KVCacheCoordinator, name) for name in overridden)
    assert issubclass(LayerwiseCoordinator, KVCacheCoordinatorNoPrefixCache)


def test_windows_are_given_back_by_what_is_processed_before_blocks_are_asked_for() -> None:
    body = source(KVCacheManager.allocate_slots)
    slides = body.index("self.coordinator.remove_skipped_blocks(")
    assert "max(0, total_computed_tokens - request.num_in_flight_tokens)," in body[slides:]
    assert slides < body.rindex("self.coordinator.get_num_blocks_to_allocate(")
    assert slides < body.index("self.coordinator.allocate_new_blocks(")


def test_blocks_are_zeroed_that_the_scheduler_names() -> None:
    assert "new_block_ids_to_zero=self._get_new_block_ids_to_zero()," in source(Scheduler.schedule)
    assert "self._zero_block_ids(scheduler_output.new_block_ids_to_zero)" in source(
        GPUModelRunner._update_states
    )


def test_a_builder_makes_metadata_for_the_window_of_its_layers() -> None:
    assert "sliding_window_size=self.window_size," in source(CPUAttentionMetadataBuilder.build)
    assert "cache_key = (kv_cache_spec, type(builder))" in source(
        GPUModelRunner._build_attention_metadata
    )


def test_the_scheduler_asks_the_connector_before_it_preempts() -> None:
    body = source(Scheduler.schedule)
    assert "self.connector.has_pending_block_frees()" in body
    assert body.index("has_pending_block_frees") < body.index("self._preempt_request(")
    assert "deferred_frees" in source(Scheduler.__init__)
    assert {"has_sync_kv_loads", "kv_connector_metadata", "num_scheduled_tokens"} <= {
        field.name for field in dataclasses.fields(SchedulerOutput)
    }


def test_a_running_request_is_passed_over_until_its_eligible_step() -> None:
    condition = "if self.current_step < request.next_decode_eligible_step:"
    assert condition in source(Scheduler.schedule)
    assert {"next_decode_eligible_step", "num_in_flight_tokens"} <= set(vars(make_request()))


def test_a_waiting_request_without_an_answer_from_the_connector_is_passed_over() -> None:
    body = source(Scheduler.schedule)
    assert "if ext_tokens is None:" in body
    assert "skip_request(request_queue)" in body.split("if ext_tokens is None:")[1][:300]
    # Only a request without computed tokens is asked about, and a preempted one has none.
    assert "request.num_computed_tokens = 0" in source(Scheduler._preempt_request)


def test_a_preemption_frees_blocks_by_the_manager_and_returns_to_the_queue() -> None:
    parameters = inspect.signature(Scheduler._preempt_request).parameters
    assert list(parameters) == ["self", "request", "timestamp", "drop_stale_output"]
    body = source(Scheduler._preempt_request)
    assert "self._free_request_blocks(request)" in body
    assert "self.waiting.prepend_request(request)" in body
    freeing = source(Scheduler._free_request_blocks)
    assert "self.kv_cache_manager.free(request)" in freeing
    assert "self.kv_cache_manager.pop_blocks_for_free(request)" in freeing


def test_a_preemption_that_drops_its_output_loses_the_tokens_of_every_step_in_flight() -> None:
    preempting = source(Scheduler._preempt_request)
    assert "request.drop_stale_output = drop_stale_output or" in preempting
    assert "request.num_stale_output_tokens = request.num_in_flight_tokens" in preempting
    taking_in = source(Scheduler.update_from_output)
    dropping = taking_in.index("if output_is_stale and request.drop_stale_output:")
    assert taking_in[dropping:].split("\n")[1].strip() == "continue"
    assert dropping < taking_in.index("generated_token_ids = (")


def test_a_request_that_did_not_run_in_the_last_step_is_sent_with_all_its_tokens() -> None:
    body = source(Scheduler._make_cached_request_data)
    sending = body.split("if req_id not in self.prev_step_scheduled_req_ids:")[1]
    assert sending.strip().startswith("all_token_ids[req_id] = req.all_token_ids")


def test_what_ranks_have_room_for_reaches_the_scheduler_before_the_first_step() -> None:
    begins = source(EngineCore.__init__)
    apart = getattr(EngineCore, "_set_kv_connector_handshake_metadata", None)
    if apart is not None:  # which a wake-up calls again
        call = "self._set_kv_connector_handshake_metadata()"
        assert begins.index("self.scheduler") < begins.index(call)
    body = begins if apart is None else source(apart)
    asking = body.index("get_kv_connector_handshake_metadata()")
    telling = body.index("kv_connector.set_xfer_handshake_metadata_pp_aware(content)")
    assert body.index("self.scheduler") < asking < telling
    assert "get_handshake_metadata()" in source(GPUWorker.get_kv_connector_handshake_metadata)


def make_request() -> Request:
    return Request("r", [1], SamplingParams(max_tokens=1), None)


def test_loads_start_before_the_layers_only_if_the_step_says_so() -> None:
    body = source(KVConnectorModelRunnerMixin._get_kv_connector_output)
    assert "start_after_forward = not scheduler_output.has_sync_kv_loads" in body
    assert body.index("wait_for_save()") < body.index("build_connector_worker_meta()")


def test_layers_wait_before_attention_and_save_after_it() -> None:
    body = source(maybe_transfer_kv_layer)
    assert body.index("connector.has_connector_metadata()") < body.index("wait_for_layer_load(")
    assert body.index("wait_for_layer_load(") < body.index("result = func(")
    assert body.index("result = func(") < body.index("save_kv_layer(")


def test_metadata_of_groups_differs_in_block_table_and_slots_only() -> None:
    body = source(GPUModelRunner._build_attention_metadata)
    assert "kv_cache_groups = self.kv_cache_config.kv_cache_groups" in body
    per_group = body[body.index("for kv_cache_gid, kv_cache_group in enumerate(") :]
    assert "cm.block_table_tensor = _get_block_table(kv_cache_gid)" in per_group
    assert "cm.slot_mapping = slot_mappings[kv_cache_gid]" in per_group
    assert "self._build_attention_metadata(" in source(GPUModelRunner.execute_model)


def test_slots_are_told_by_group_and_by_layer() -> None:
    parameters = inspect.signature(GPUModelRunner._get_slot_mappings).parameters
    assert list(parameters) == [
        "self",
        "num_tokens_padded",
        "num_reqs_padded",
        "num_tokens_unpadded",
        "ubatch_slices",
    ]
    body = source(GPUModelRunner._get_slot_mappings)
    assert "slot_mapping = blk_table.slot_mapping.gpu[:num_tokens_padded]" in body
    assert "slot_mapping[num_tokens_unpadded:num_tokens_padded].fill_(-1)" in body
    assert "return slot_mappings_by_gid, slot_mappings_by_layer" in body


def test_requests_without_new_blocks_share_the_managers_empty_ones() -> None:
    assert "self.empty_kv_cache_blocks" in source(KVCacheManager.create_kv_cache_blocks)
    assert "get_block_ids(allow_none=True)" in source(Scheduler._make_cached_request_data)


def test_blocks_are_hashed_only_if_a_request_has_a_hasher() -> None:
    assert "if self._block_hasher is not None" in source(Request.update_block_hashes)


def test_new_kv_is_written_before_attention_is_entered() -> None:
    body = source(Attention.forward)
    assert body.index("unified_kv_cache_update") < body.index("unified_attention_with_output")


def test_a_row_that_the_scheduler_does_not_know_is_left_out_of_its_output() -> None:
    body = source(Scheduler.update_from_output)
    looking = body.index("request = self.requests.get(req_id)")
    passing = body.index("if request is None or request.is_finished():")
    assert looking < passing < body.index("req_index = model_runner_output.req_id_to_index[req_id]")


def test_a_row_whose_prompt_is_longer_than_what_is_scheduled_samples_nothing() -> None:
    body = source(GPUModelRunner._prepare_inputs)
    assert "self.optimistic_seq_lens_cpu[:num_reqs].numpy() < num_tokens_np" in body


def test_a_row_may_end_and_begin_anew_in_one_step() -> None:
    body = source(GPUModelRunner._update_states)
    ending = body.index("for req_id in scheduler_output.finished_req_ids:")
    assert ending < body.index("for new_req_data in scheduler_output.scheduled_new_reqs:")


def test_what_a_step_has_room_for_is_asked_in_every_step() -> None:
    body = source(Scheduler.schedule)
    assert "token_budget = self.max_num_scheduled_tokens" in body
    assert "if num_running >= self.max_num_active_reqs:" in body


def test_rows_of_running_requests_are_where_edits_go() -> None:
    body = source(GPUModelRunner._update_states)
    assert "req_state.block_ids" in body
    assert "self.input_batch.req_id_to_index" in body
    assert "self.prepare_inputs_event.synchronize()" in source(
        GPUModelRunner.synchronize_input_prep
    )
    assert "stage_write(req_index, start, block_ids)" in source(BlockTables.append_block_ids)


def test_the_second_model_runner_takes_in_edits_with_the_steps_own_writes() -> None:
    body = source(GPUModelRunnerV2.execute_model)
    ends, adds = body.index("self.finish_requests("), body.index("self.add_requests(")
    assert ends < adds < body.index("self.update_requests(")
    assert body.index("self.update_requests(") < body.index("block_tables.apply_staged_writes()")
    assert body.index("apply_staged_writes()") < body.index("kv_connector.no_forward(")
    assert body.index("apply_staged_writes()") < body.index("self.prepare_attn(")
    assert "preempted_req_ids" in source(GPUModelRunnerV2.finish_requests)
    assert "self.req_states.req_id_to_index" in source(GPUModelRunnerV2.update_requests)
    assert "use_v2_model_runner" in source(GPUWorker.__init__)


def test_the_second_model_runner_calls_the_connector_around_the_layers() -> None:
    body = source(GPUModelRunnerV2.execute_model)
    assert body.index("kv_connector.pre_forward(") < body.index("self.model(**model_inputs)")
    before = source(ActiveKVConnector.pre_forward)
    assert "if scheduler_output.has_sync_kv_loads" in before
    after = source(ActiveKVConnector.post_forward)
    assert after.index("wait_for_save()") < after.index("build_connector_worker_meta()")
    assert "set_disabled(True)" in source(GPUModelRunnerV2._dummy_run)


def test_a_step_with_drafts_ends_behind_the_drafter() -> None:
    """The first model runner has asked the connector by then; the second ends it likewise, or asks
    behind the drafter: its step's output is found in what it returns.
    """
    lifecycle = source(KVConnectorModelRunnerMixin._get_kv_connector_output)
    assert "if not defer_finalize:\n                kv_connector.wait_for_save()" in lifecycle
    layers = source(GPUModelRunner.execute_model)
    assert "defer_kv_connector_finalize = self.speculative_config is not None" in layers
    assert "self.kv_connector_output = kv_connector_output" in layers
    body = source(GPUModelRunner.sample_tokens)
    ends = body.index("self.finalize_kv_connector()")
    assert body.rindex("propose_draft_token_ids(valid_sampled_token_ids)") < ends
    assert ends < body.rindex("kv_connector_output = self.kv_connector_output")
    second = source(GPUModelRunnerV2.sample_tokens)
    proposes = second.index("self.speculator.propose(")
    if second.rindex("kv_connector.post_forward(") < proposes:
        assert proposes < second.index("self.kv_connector.finalize_step()")
        deferring = source(ActiveKVConnector.post_forward)
        assert "if not defer_finalize:\n            self.kv_connector.wait_for_save()" in deferring
        assert "self.kv_connector.wait_for_save()" in source(ActiveKVConnector.finalize_step)
    assert "self.model_runner_output = model_runner_output" in source(AsyncOutput.__init__)


def test_layers_that_make_drafts_are_known_by_these_names() -> None:
    assert "self._draft_attn_layer_names = {" in source(SpecDecodeBaseProposer.load_model)
    assert "self.draft_attn_layer_names = " in source(DraftModelSpeculator)
    assert "self.drafter.kv_cache_gid == kv_cache_gid" in source(
        GPUModelRunner._build_attention_metadata
    )


def test_a_step_in_flight_gives_one_token_at_least() -> None:
    """Placeholders stand for its drafts as well: those that are rejected are taken off."""
    after_schedule = source(AsyncScheduler._update_after_schedule)
    assert "request.num_output_placeholders += (" in after_schedule
    assert "self.num_sampled_tokens_per_step + cur_num_spec_tokens" in after_schedule
    update = source(Scheduler.update_from_output)
    assert "request.num_output_placeholders -= num_rejected" in update
    assert "num_output_placeholders = 0" in source(Scheduler._preempt_request)


def test_a_connector_may_have_full_graphs_beside_piecewise_ones() -> None:
    assert not LayerwiseConnector.requires_piecewise_for_cudagraph({})
    assert "connector_cls.requires_piecewise_for_cudagraph(" in source(VllmConfig.__post_init__)
    assert "self.cudagraph_dispatcher.dispatch(" in source(
        GPUModelRunner._determine_batch_execution_and_padding
    )
    assert "cudagraph_manager.dispatch(" in source(dispatch_cg_and_sync_dp)
    assert "vllm::unified_attention_with_output" in CompilationConfig._attention_ops
    assert "self.splitting_ops = list(self._attention_ops)" in source(
        CompilationConfig.set_splitting_ops_for_v1
    )


def test_a_connector_may_ask_for_a_layout_with_dense_blocks() -> None:
    assert "get_kv_connector_cache_layout(vllm_config)" in source(resolve_kv_cache_layout)
    assert KVCacheLayout["LBNHC"].is_block_compact
    assert KVCacheLayout["LBNHC"].is_layer_compact


def test_the_gpu_worker_is_vllms_with_our_parts_before_it() -> None:
    names = [cls.__name__ for cls in LayerwiseGPUWorker.__mro__]
    assert names.index("LayerwiseWorkerMixin") < names.index("Worker")
    assert "get_kv_transfer_group" in source(GPUWorker.initialize_from_config)
    assert "ensure_kv_transfer_shutdown" in source(GPUWorker.shutdown)


def test_flash_attention_builds_metadata_that_differs_by_group_in_two_fields() -> None:
    names = {field.name for field in dataclasses.fields(FlashAttentionMetadata)}
    assert {"block_table", "slot_mapping"} <= names
    body = source(FlashAttentionMetadataBuilder.update_block_table)
    assert "copy.copy(metadata)" in body  # these two, says vLLM itself
    assert body.count("new_metadata.") == 2
    body = source(build_attn_metadata)  # one slice per step, whose identity stands for the step
    assert body.index("seq_lens = seq_lens[:num_reqs]") < body.index("for i in range(")
    memo = MemoFlashAttentionBackend.get_builder_cls()
    assert memo.__mro__[1] is FlashAttentionMetadataBuilder


def test_groups_differ_in_two_fields_of_the_attention_metadata() -> None:
    names = {field.name for field in dataclasses.fields(CPUAttentionMetadata)}
    assert {"block_table", "slot_mapping"} <= names
    assert not hasattr(CPUAttentionMetadata, "__slots__")
    body = source(GPUModelRunner._build_attention_metadata)
    assert "cache_key = (kv_cache_spec, type(builder))" in body
    assert "builder.update_block_table(" in body
    assert not CPUAttentionMetadataBuilder.supports_update_block_table  # ours does
    parameters = inspect.signature(AttentionMetadataBuilder.update_block_table).parameters
    assert list(parameters) == ["self", "metadata", "blk_table", "slot_mapping"]


def test_block_tables_of_all_groups_are_asked_through_these_calls() -> None:
    overridden = ("commit_block_table", "compute_slot_mapping")
    for name in overridden:
        ours, theirs = getattr(StackedBlockTables, name), getattr(MultiGroupBlockTable, name)
        assert ours is not theirs
        assert (
            inspect.signature(ours).parameters.keys() == inspect.signature(theirs).parameters.keys()
        )
    others = {"append_row", "add_row", "clear_row", "move_row", "swap_row", "clear", "__getitem__"}
    methods = {n for n, f in vars(MultiGroupBlockTable).items() if inspect.isfunction(f)}
    assert methods == {"__init__", *overridden, *others}
    assert "_prepare_inputs" in vars(GPUModelRunner)
    assert "self.input_batch.block_table.compute_slot_mapping(" in source(
        GPUModelRunner._prepare_inputs
    )


def test_the_spec_is_registered_beside_vllms_own() -> None:
    spec = LayerGroupSpec(block_size=32, num_kv_heads=2, head_size=32, dtype=None, group_key=1)
    other = dataclasses.replace(spec, group_key=2, group_index=1)

    assert KVCacheSpecRegistry.get_manager_class(spec) is not None
    assert spec != other
    with pytest.raises(AssertionError):
        LayerGroupSpec.merge([spec, other])
    merged = LayerGroupSpec.merge([spec, spec])
    assert merged == LayerGroupSpec.merge([other])  # as groups, they are of one kind
    assert not spec.is_uniform_with_collection({"a": spec, "b": other})


def test_every_abstract_method_of_a_connector_is_one_we_know() -> None:
    assert KVConnectorBase_V1.__abstractmethods__ == {
        "start_load_kv",
        "wait_for_layer_load",
        "save_kv_layer",
        "wait_for_save",
        "get_num_new_matched_tokens",
        "update_state_after_alloc",
        "build_connector_meta",
    }
