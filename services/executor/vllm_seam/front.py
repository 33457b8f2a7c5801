"""vLLM's configuration, its engine's front, prompts and parsers."""

from services.executor.vllm_seam.stated import Stated

V1 = "vllm.v1"
FORMS = "vllm.v1.structured_output"

CONFIGURATION = (
    Stated(
        "vllm.config:VllmConfig",
        fields="additional_config attention_config cache_config compilation_config "
        "kv_events_config load_config lora_config max_concurrent_batches max_in_flight_tokens "
        "model_config num_lookahead_tokens num_speculative_tokens observability_config "
        "parallel_config scheduler_config speculative_config structured_outputs_config",
    ),
    Stated(
        "vllm.config:ModelConfig",
        calls=(
            "get_diff_sampling_param()",
            "get_head_size()",
            "get_num_layers(parallel_config)",
            "get_total_num_hidden_layers()",
            "get_total_num_kv_heads()",
            "get_vocab_size()",
        ),
        fields="enable_prompt_embeds enforce_eager generation_config hf_config is_encoder_decoder "
        "is_hybrid is_moe is_multimodal_model logits_processors logprobs_mode max_model_len "
        "override_generation_config tokenizer_mode tokenizer_revision use_fp64_gumbel use_mla",
    ),
    Stated(
        "vllm.config:ParallelConfig",
        fields="data_parallel_size decode_context_parallel_size enable_dbo enable_expert_parallel "
        "local_world_size nnodes pipeline_parallel_size prefill_context_parallel_size rank "
        "tensor_parallel_size world_size",
    ),
    Stated(
        "vllm.config:SchedulerConfig",
        fields="async_scheduling disable_hybrid_kv_cache_manager enable_chunked_prefill "
        "long_prefill_token_threshold max_num_batched_tokens max_num_seqs scheduler_cls",
    ),
    Stated(
        "vllm.config:CacheConfig",
        fields="block_size cache_dtype kv_cache_memory_bytes kv_sharing_fast_prefill "
        "num_gpu_blocks prefix_caching_hash_algo",
    ),
    Stated("vllm.config:CompilationConfig", fields="cudagraph_mode static_forward_context"),
    Stated(
        "vllm.config:CUDAGraphMode",
        calls=("has_full_cudagraphs()", "has_piecewise_cudagraphs()"),
        fields="FULL",
    ),
    Stated(
        "vllm.config:KVEventsConfig",
        calls=("(*, enable_kv_cache_events, publisher, endpoint, topic)",),
        fields="enable_kv_cache_events",
    ),
    Stated("vllm.config:LoadConfig", fields="download_dir load_format"),
    Stated("vllm.config:SpeculativeConfig", fields="method"),
    Stated("vllm.config:AttentionConfig", fields="backend"),
    Stated(
        "vllm.config:StructuredOutputsConfig",
        calls=("()",),
        fields="backend disable_any_whitespace enable_in_reasoning",
    ),
    Stated(
        "vllm.engine.arg_utils:AsyncEngineArgs",
        calls=("create_engine_config()", "create_model_config()", "add_cli_args(parser)"),
        fields="kv_cache_dtype kv_offloading_size served_model_name otlp_traces_endpoint",
    ),
    Stated("vllm.utils.argparse_utils:FlexibleArgumentParser", overrides="error"),
    Stated("vllm.utils.cpu_resource_utils:get_cgroup_memory_limit", calls=("()",)),
    Stated(
        "vllm.utils.torch_utils:kv_cache_dtype_str_to_dtype",
        calls=("(kv_cache_dtype, model_config)",),
    ),
    Stated(
        "vllm.utils.torch_utils:resolve_kv_cache_dtype_string",
        calls=("(kv_cache_dtype, model_config)",),
    ),
    Stated(
        "vllm.platforms:current_platform",
        calls=("is_cpu()", "is_cuda()", "get_device_name()"),
        fields="device_name",
    ),
    Stated("vllm", fields="__version__"),
    Stated("vllm:envs"),
)

FRONT = (
    Stated(
        f"{V1}.engine.async_llm:AsyncLLM",
        calls=(
            "from_vllm_config(vllm_config, *, stat_loggers)",
            "_add_request(request, prompt, parent_req, index, queue)",
            "_run_output_handler()",
            "add_lora(lora_request)",
            "get_supported_tasks()",
            "shutdown()",
        ),
        fields="engine_core errored input_processor model_config observability_config "
        "output_handler output_processor renderer vllm_config",
    ),
    Stated(
        f"{V1}.engine.core_client:AsyncMPClient",
        calls=("add_request_async(request)", "call_utility_async(method, args)"),
    ),
    Stated(
        f"{V1}.engine.core:EngineCore",
        calls=("execute_dummy_batch()",),
        fields="model_executor scheduler",
    ),
    Stated(f"{V1}.engine.exceptions:EngineDeadError"),
    Stated(
        f"{V1}.engine:EngineCoreRequest",
        fields="cache_salt prompt_token_ids reasoning_ended reasoning_parser_kwargs "
        "sampling_params trace_headers",
    ),
    Stated(
        f"{V1}.engine:EngineCoreOutput",
        calls=(
            "(request_id, new_token_ids, new_logprobs)",
            "(*, request_id, new_token_ids, finish_reason, events, trace_headers)",
        ),
        fields="new_token_ids",
    ),
    Stated(f"{V1}.engine:EngineCoreOutputs", calls=("()",), fields="outputs"),
    Stated(
        f"{V1}.engine.input_processor:InputProcessor",
        calls=("assign_request_id(request)",),
        fields="process_inputs_async",
    ),
    Stated(
        f"{V1}.engine.output_processor:OutputProcessor",
        calls=("get_num_unfinished_requests()",),
        fields="request_states",
    ),
    Stated(f"{V1}.engine.output_processor:RequestState", fields="detokenizer logprobs_processor"),
    Stated(
        f"{V1}.engine.detokenizer:IncrementalDetokenizer",
        calls=(
            "from_new_request(tokenizer, request)",
            "update(new_token_ids, stop_terminated)",
            "get_next_output_text(finished, delta)",
        ),
    ),
    Stated(
        f"{V1}.engine.logprobs:LogprobsProcessor",
        calls=("from_new_request(tokenizer, request)", "update_from_output(output)"),
    ),
    Stated(f"{V1}.metrics.loggers:StatLoggerBase", overrides="record log_engine_initialized"),
    Stated(
        f"{V1}.metrics.stats:SchedulerStats",
        fields="kv_cache_usage prefix_cache_stats connector_prefix_cache_stats",
    ),
    Stated(f"{V1}.metrics.stats:PrefixCacheStats", fields="preempted_queries preempted_hits"),
    Stated(f"{V1}.metrics.stats:IterationStats", fields="num_generation_tokens"),
)

PROMPTS = (
    Stated("vllm:TextPrompt", fields="prompt"),
    Stated("vllm.exceptions:VLLMClientError"),
    Stated("vllm.exceptions:VLLMValidationError", calls=("(message, *, parameter)",)),
    Stated("vllm.lora.request:LoRARequest", calls=("(lora_name, lora_int_id, lora_path)",)),
    Stated("vllm.sampling_params:RequestOutputKind", fields="DELTA"),
    Stated(
        "vllm.sampling_params:SamplingParams",
        calls=(
            "(*, max_tokens, temperature, top_p, top_k, min_p, presence_penalty, "
            "frequency_penalty, repetition_penalty, logit_bias, min_tokens, stop, stop_token_ids, "
            "ignore_eos, bad_words, allowed_token_ids, skip_special_tokens, "
            "include_stop_str_in_output, seed, logprobs, prompt_logprobs, structured_outputs, "
            "extra_args, output_kind)",
        ),
        fields="extra_args",
    ),
    Stated(
        "vllm.sampling_params:StructuredOutputsParams",
        calls=("(*, json, regex, choice, grammar, json_object, structural_tag)",),
        fields="json structural_tag",
    ),
    Stated("vllm.sampling_params:check_json_nesting", calls=("(spec)",)),
    Stated(
        "vllm.renderers:BaseRenderer",
        calls=(
            "get_tokenizer()",
            "render_chat_async(conversations, chat_params, tok_params)",
            "render_cmpl_async(prompts, tok_params)",
            "tokenize_prompt_async(prompt, params)",
        ),
        fields="default_chat_tok_params default_cmpl_tok_params tokenizer",
    ),
    Stated("vllm.renderers.chat_utils:make_tool_call_id", calls=("()",)),
    Stated(
        "vllm.renderers.hf:resolve_chat_template",
        calls=("(tokenizer, chat_template, tools, *, model_config)",),
    ),
    Stated(
        "vllm.renderers.hf:resolve_chat_template_kwargs",
        calls=("(tokenizer, chat_template, chat_template_kwargs, *, raise_on_unexpected)",),
    ),
    Stated("vllm.renderers.params:ChatParams", calls=("(*, chat_template_kwargs, tool_choice)",)),
    Stated(
        "vllm.renderers.params:TokenizeParams",
        calls=(
            "(*, max_total_tokens, needs_detokenization)",
            "apply_pre_tokenization(tokenizer, prompt)",
        ),
    ),
    Stated("vllm.utils.mistral:is_mistral_tokenizer", calls=("(obj)",)),
    Stated("vllm.entrypoints.generate.base.protocol:DeltaMessage"),
    Stated(
        "vllm.entrypoints.openai.chat_completion.protocol:ChatCompletionRequest",
        calls=("resolve_reasoning_ended(parser, prompt_token_ids)",),
    ),
    Stated("vllm.entrypoints.openai.chat_completion.protocol:ChatCompletionNamedToolChoiceParam"),
    Stated(
        "vllm.entrypoints.serve.utils.tool_calls_utils:maybe_filter_parallel_tool_calls",
        calls=("(item, request)",),
    ),
    Stated(
        "vllm.parser:Parser",
        fields="always_adjust_request reasoning_parser_cls tool_parser_cls",
    ),
    Stated(
        "vllm.parser:ParserManager",
        calls=(
            "get_parser(*, tool_parser_name, reasoning_parser_name, enable_auto_tools, model_name)",
        ),
    ),
    Stated(
        "vllm.parser.abstract_parser:DelegatingParser",
        calls=(
            "parse_delta(delta_text, delta_token_ids, request, prompt_token_ids, *, finished)",
            "adjust_request(request)",
        ),
    ),
    Stated("vllm.tool_parsers:ToolParser"),
    Stated(
        f"{FORMS}:StructuredOutputManager",
        calls=("(vllm_config)", "accept_tokens(request, new_token_ids)"),
        fields="executor",
    ),
    Stated(f"{FORMS}.request:StructuredOutputRequest", fields="grammar"),
    Stated(f"{FORMS}.request:get_structured_output_key", calls=("(params)",)),
    Stated(f"{FORMS}.backend_types:StructuredOutputOptions", fields="JSON_OBJECT"),
    Stated(
        f"{FORMS}.backend_xgrammar:XgrammarBackend",
        calls=("(vllm_config, tokenizer, vocab_size)",),
        fields="compiler",
        may_have="full_vocab_compiler",
    ),
)
