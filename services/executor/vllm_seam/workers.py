"""vLLM's connector, workers, model runners and attention backends."""

from services.executor.vllm_seam.stated import Stated

V1 = "vllm.v1"
WORKER = "vllm.v1.worker"
ATTENTION = "vllm.v1.attention.backends"
CONNECTOR = "vllm.distributed.kv_transfer.kv_connector.v1"

PLUGIN = (
    Stated(
        f"{CONNECTOR}.base:KVConnectorBase_V1",
        calls=(
            "(vllm_config, role, kv_cache_config)",
            "_get_connector_metadata()",
            "bind_kv_cache_manager(kv_cache_manager)",
        ),
        overrides="requires_piecewise_for_cudagraph get_required_kvcache_layout "
        "requires_kv_delivery get_num_new_matched_tokens update_state_after_alloc "
        "has_pending_block_frees build_connector_meta reset_cache "
        "set_xfer_handshake_metadata_pp_aware register_kv_caches get_handshake_metadata "
        "has_connector_metadata start_load_kv wait_for_layer_load save_kv_layer finish_forward "
        "wait_for_save build_connector_worker_meta get_kv_connector_stats "
        "build_kv_connector_stats build_prom_metrics shutdown take_events",
        fields="_kv_cache_config _role _vllm_config",
    ),
    Stated(f"{CONNECTOR}.base:SupportsHMA", overrides="request_finished_all_groups"),
    Stated(f"{CONNECTOR}.base:KVConnectorMetadata"),
    Stated(f"{CONNECTOR}.base:KVConnectorRole", fields="SCHEDULER WORKER"),
    Stated(
        f"{CONNECTOR}.metrics:KVConnectorStats",
        overrides="aggregate reduce reset is_empty",
        fields="data",
    ),
    Stated(
        f"{CONNECTOR}.metrics:KVConnectorPromMetrics",
        overrides="observe",
        fields="_counter_cls _gauge_cls _histogram_cls _labelnames per_engine_labelvalues",
    ),
    Stated("vllm.distributed.kv_transfer:get_kv_transfer_group", calls=("()",)),
    Stated("vllm.forward_context:ForwardContext", fields="attn_metadata"),
    Stated(
        f"{V1}.metrics.utils:create_metric_per_engine",
        calls=("(metric, per_engine_labelvalues)",),
    ),
    Stated(
        f"{WORKER}.gpu_worker:Worker",
        calls=("load_model()", "execute_model(scheduler_output)", "sample_tokens(grammar_output)"),
        overrides="load_model sample_tokens initialize_from_config get_kv_cache_spec "
        "execute_model init_device compile_or_warm_up_model determine_available_memory",
        fields="cache_config model_config model_runner use_v2_model_runner vllm_config",
    ),
    Stated(f"{WORKER}.cpu_worker:CPUWorker", overrides="init_device compile_or_warm_up_model"),
    Stated(
        f"{WORKER}.gpu_model_runner:GPUModelRunner",
        calls=(
            "_get_slot_mappings(num_tokens_padded, num_reqs_padded, num_tokens_unpadded, "
            "ubatch_slices)",
            "_build_attention_metadata(*, num_tokens, num_reqs, max_query_len, slot_mappings)",
        ),
        fields="attn_groups cudagraph_dispatcher discard_request_mask drafter input_batch "
        "kv_cache_config kv_connector_output prepare_inputs_event requests",
    ),
    Stated(f"{WORKER}:gpu_model_runner", fields="CachedRequestState"),  # which is replaced
    Stated(
        f"{WORKER}.gpu_input_batch:CachedRequestState",
        overrides="__post_init__",
        fields="block_ids generator output_token_ids sampling_params",
    ),
    Stated(
        f"{WORKER}.gpu_input_batch:InputBatch",
        fields="block_table generators num_reqs req_id_to_index",
    ),
    Stated(f"{WORKER}.utils:AttentionGroup", fields="kernel_block_size"),
    Stated(
        f"{WORKER}.block_table:MultiGroupBlockTable",
        overrides="commit_block_table compute_slot_mapping",
        fields="block_tables",
    ),
    Stated(f"{WORKER}.block_table:BlockTable", fields="block_size block_table slot_mapping"),
    Stated(f"{V1}.utils:CpuGpuBuffer", fields="cpu gpu np"),
    Stated(
        f"{WORKER}.gpu.model_runner:GPUModelRunner",
        fields="block_tables cudagraph_manager req_states speculator",
    ),
    Stated(f"{WORKER}.gpu.async_utils:AsyncOutput", fields="model_runner_output"),
    Stated(f"{WORKER}.gpu.states:RequestState", fields="req_id_to_index"),
    Stated(f"{WORKER}.gpu.block_table:BlockTables", fields="block_tables"),
    Stated(f"{WORKER}.gpu.buffer_utils:StagedWriteTensor", calls=("stage_write(index, start, x)",)),
    Stated(
        f"{WORKER}.gpu.cudagraph_utils:CudaGraphManager",
        calls=(
            "dispatch(num_reqs, num_tokens, uniform_token_count, num_active_loras, *, "
            "max_query_len)",
        ),
    ),
    Stated(
        f"{WORKER}.gpu.spec_decode.speculator:DraftModelSpeculator", fields="draft_attn_layer_names"
    ),
    Stated(
        f"{V1}.spec_decode.llm_base_proposer:SpecDecodeBaseProposer",
        fields="_draft_attn_layer_names kv_cache_gid",
    ),
    Stated(f"{V1}.spec_decode.draft_model:DraftModelProposer"),
    Stated(
        f"{V1}.cudagraph_dispatcher:CudagraphDispatcher",
        calls=("dispatch(num_tokens, *, invalid_modes)",),
    ),
    Stated(
        f"{V1}.sample:rejection_sampler",  # of which a function is replaced
        calls=("expand_batch_to_tokens(x, cu_num_tokens, num_tokens, replace_from, replace_to)",),
    ),
    Stated("vllm.distributed.device_communicators:shm_broadcast", fields="sched_yield"),
    Stated(f"{V1}.executor.multiproc_executor:MultiprocExecutor", overrides="_init_executor"),
    Stated(
        f"{V1}.executor:Executor",
        calls=("get_class(vllm_config)", "collective_rpc(method)"),
    ),
    Stated(
        f"{V1}.executor.multiproc_executor:MultiprocExecutor",
        calls=("(vllm_config, *, monitor_workers)", "start_worker_monitor(*, inline)"),
    ),
)

ATTENTION_BACKENDS = (
    Stated(
        "vllm.v1.attention.backend:AttentionMetadataBuilder",
        overrides="update_block_table supports_update_block_table",
        fields="kv_cache_spec",
    ),
    Stated(
        "vllm.v1.attention.backend:CommonAttentionMetadata",
        fields="block_table_tensor causal max_query_len max_seq_len num_actual_tokens "
        "query_start_loc seq_lens slot_mapping",
    ),
    Stated(f"{ATTENTION}.registry:AttentionBackendEnum", fields="CPU_ATTN FLASH_ATTN"),
    Stated(f"{ATTENTION}.registry:register_backend", calls=("(backend, class_path)",)),
    Stated(f"{ATTENTION}.cpu_attn:CPUAttentionBackend", overrides="get_builder_cls"),
    Stated(f"{ATTENTION}.cpu_attn:CPUAttentionMetadata", fields="block_table slot_mapping"),
    Stated(f"{ATTENTION}.cpu_attn:CPUAttentionMetadataBuilder"),
    Stated(f"{ATTENTION}.flash_attn:FlashAttentionBackend", overrides="get_builder_cls"),
    Stated(f"{ATTENTION}.flash_attn:FlashAttentionMetadata", fields="block_table slot_mapping"),
    Stated(
        f"{ATTENTION}.flash_attn:FlashAttentionMetadataBuilder",
        calls=(
            "build(common_prefix_len, common_attn_metadata, fast_build)",
            "update_block_table(metadata, blk_table, slot_mapping)",
        ),
        overrides="build",
    ),
    Stated(
        "vllm.model_executor.layers.attention.mla_attention:MLACommonMetadata",
        fields="decode num_decodes prefill slot_mapping",
    ),
    Stated(
        "vllm.model_executor.layers.attention.mla_attention:MLACommonMetadataBuilder",
        calls=("build(common_prefix_len, common_attn_metadata, fast_build)",),
        fields="chunked_prefill_workspace",
    ),
    Stated(
        "vllm.model_executor.layers.attention.attention:Attention",
        fields="kv_sharing_target_layer_name",
    ),
)
