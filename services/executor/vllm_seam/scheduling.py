"""vLLM's scheduler, requests and blocks."""

from services.executor.vllm_seam.stated import Stated

V1 = "vllm.v1"
CORE = "vllm.v1.core"
SCHED = "vllm.v1.core.sched"

SCHEDULER = (
    Stated(
        f"{SCHED}.scheduler:Scheduler",
        calls=(
            "add_request(request)",
            "schedule()",
            "update_from_output(scheduler_output, model_runner_output)",
            "has_requests()",
            "finish_requests(request_ids, finished_status)",
            "_preempt_request(request, timestamp, drop_stale_output)",
            "_handle_blocked_waiting_request(request)",
            "_free_request(request)",
            "make_stats(spec_decoding_stats, kv_connector_stats)",
            "reset_prefix_cache()",
            "shutdown()",
        ),
        overrides="schedule update_from_output add_request make_stats reset_prefix_cache shutdown "
        "has_requests "
        "_get_new_block_ids_to_zero _handle_blocked_waiting_request _preempt_request _free_request",
        fields="vllm_config requests running waiting kv_holding_waiting kv_cache_manager connector "
        "deferred_frees prev_step_scheduled_req_ids max_model_len max_num_active_reqs "
        "max_num_scheduled_tokens num_spec_tokens hash_block_size log_stats "
        "needs_kv_cache_zeroing pause_state structured_output_manager",
    ),
    Stated(f"{SCHED}.interface:PauseState", fields="UNPAUSED"),
    Stated(f"{SCHED}.async_scheduler:AsyncScheduler"),
    Stated(f"{SCHED}.request_queue:RequestQueue", calls=("remove_requests(requests)",)),
    Stated(
        f"{SCHED}.output:SchedulerOutput",
        fields="finished_req_ids has_sync_kv_loads kv_connector_metadata num_scheduled_tokens "
        "preempted_req_ids scheduled_cached_reqs scheduled_new_reqs total_num_scheduled_tokens",
    ),
    Stated(
        f"{SCHED}.output:NewRequestData",
        calls=(
            "(*, req_id, prompt_token_ids, prefill_token_ids, mm_features, sampling_params, "
            "pooling_params, block_ids, num_computed_tokens, lora_request)",
        ),
        fields="req_id num_computed_tokens mm_features lora_request prompt_embeds",
    ),
    Stated(f"{SCHED}.output:CachedRequestData", fields="req_ids resumed_req_ids"),
    Stated(f"{SCHED}.utils:check_stop", calls=("(request, max_model_len)",)),
    Stated(
        f"{V1}.request:Request",
        calls=(
            "from_engine_core_request(request, block_hasher)",
            "append_output_token_ids(token_ids)",
            "update_block_hashes()",
            "is_finished()",
            "get_finished_reason()",
            "take_events()",
        ),
        fields="_block_hasher block_hashes client_index drop_stale_output mm_features "
        "next_decode_eligible_step num_in_flight_tokens num_output_placeholders num_preemptions "
        "num_stale_output_tokens num_tokens_with_spec prompt_embeds sampling_params "
        "skip_reading_prefix_cache structured_output_request trace_headers",
    ),
    Stated(
        f"{V1}.request:RequestStatus",
        fields="FINISHED_ABORTED FINISHED_ERROR FINISHED_STOPPED PREEMPTED RUNNING WAITING "
        "WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR",
    ),
    Stated(f"{V1}.outputs:ModelRunnerOutput", fields="kv_connector_output"),
    Stated(f"{V1}.outputs:KVConnectorOutput", fields="kv_connector_worker_meta"),
    Stated(
        f"{V1}.outputs:LogprobsLists",
        calls=("(logprob_token_ids, logprobs, sampled_token_ranks, cu_num_generated_tokens)",),
    ),
)

BLOCKS = (
    Stated(
        f"{CORE}.block_pool:BlockPool",
        calls=(
            "get_new_blocks(num_blocks)",
            "free_blocks(ordered_blocks)",
            "touch(blocks)",
            "unpin_blocks(blocks, on_reuse)",
            "get_num_free_blocks()",
        ),
        fields="null_block num_gpu_blocks hash_block_size",
    ),
    Stated(f"{CORE}.kv_cache_utils:KVCacheBlock", fields="block_id ref_cnt is_null"),
    Stated(f"{CORE}.kv_cache_utils:BlockHash"),
    Stated(
        f"{CORE}.kv_cache_utils:get_request_block_hasher",
        calls=("(hash_block_size, caching_hash_fn)",),
    ),
    Stated("vllm.utils.hashing:get_hash_fn_by_name", calls=("(hash_fn_name)",)),
    Stated(
        f"{CORE}.kv_cache_manager:KVCacheManager",
        fields="block_pool coordinator empty_kv_cache_blocks enable_kv_cache_events "
        "kv_cache_config max_model_len metrics_collector",
    ),
    Stated(
        f"{CORE}.kv_cache_manager:KVCacheBlocks", calls=("(blocks)",), overrides="get_block_ids"
    ),
    Stated(
        f"{CORE}.kv_cache_coordinator:KVCacheCoordinator",
        overrides="get_num_blocks_to_allocate allocate_new_blocks allocate_new_computed_blocks "
        "get_blocks pop_blocks_for_free free remove_skipped_blocks cache_blocks new_step_starts",
        fields="block_pool scheduler_block_size single_type_managers",
    ),
    Stated(
        f"{CORE}.kv_cache_coordinator:KVCacheCoordinatorNoPrefixCache",
        calls=(
            "(kv_cache_config, max_model_len, max_in_flight_tokens, use_eagle, "
            "enable_kv_cache_events, *, dcp_world_size, pcp_world_size, scheduler_block_size, "
            "hash_block_size, metrics_collector)",
        ),
    ),
    Stated(
        f"{CORE}.single_type_kv_cache_manager:FullAttentionManager",
        fields="block_size kv_cache_spec req_to_blocks",
    ),
    Stated(
        f"{CORE}.single_type_kv_cache_manager:register_all_kvcache_specs", calls=("(vllm_config)",)
    ),
    Stated(
        f"{V1}.kv_cache_spec_registry:KVCacheSpecRegistry",
        calls=("register(kvcache_spec_cls, manager_class, *, uniform_type_base_spec)",),
    ),
    Stated(
        f"{V1}.kv_cache_interface:KVCacheSpec",
        overrides="is_uniform_with_collection",
        fields="page_size_bytes block_size",
    ),
    Stated(
        f"{V1}.kv_cache_interface:FullAttentionSpec",
        calls=("max_memory_usage_bytes(vllm_config)",),
        overrides="merge max_memory_usage_bytes",
    ),
    Stated(f"{V1}.kv_cache_interface:MLAAttentionSpec", overrides="merge"),
    Stated(f"{V1}.kv_cache_interface:MambaSpec", fields="num_speculative_blocks"),
    Stated(f"{V1}.kv_cache_interface:SlidingWindowSpec", fields="sliding_window"),
    Stated(f"{V1}.kv_cache_interface:ChunkedLocalAttentionSpec", fields="attention_chunk_size"),
    Stated(f"{V1}.kv_cache_interface:KVCacheGroupSpec", fields="kv_cache_spec layer_names"),
    Stated(
        f"{V1}.kv_cache_interface:KVCacheConfig",
        fields="kv_cache_groups kv_cache_tensors num_blocks",
    ),
    Stated(f"{V1}.kv_cache_interface:replace_as", calls=("(spec, target_cls, *, drop)",)),
)
