"""vLLM's `AsyncLLM` behind the few verbs that the executor needs."""

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import structlog
from vllm.exceptions import VLLMClientError
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from services.executor.collector import DeltaSink, Reporting, StepCollector
from services.executor.context_length import resolve_max_tokens
from services.executor.engine_config import make_config
from services.executor.grammar_check import GrammarCheck, GrammarError, GrammarsBusyError
from services.executor.kv import engine_calls
from services.executor.kv.options import layers_per_group
from services.executor.load_recorder import LoadRecorder
from services.executor.observation import EngineObservation, from_plain
from services.executor.prompt_renderer import PromptRenderer, rejection_of
from services.executor.reader_relay import ReaderRelay
from services.executor.sampling import (
    blamed_parameter,
    describe_tokenizer,
    grammar_of,
    to_vllm_sampling,
)
from services.executor.settings import ExecutorSettings
from services.executor.types import (
    ChatInput,
    EngineLoad,
    ModelInfo,
    PreparedRequest,
    RejectCode,
    RejectedError,
    Rejection,
    Submission,
    TextInput,
    Tokenization,
    TokenizeOptions,
)

log = structlog.get_logger()

SHUTDOWN_TIMEOUT_S = 3.0  # for an orderly end of the processes; nothing in them is worth more

DEAD = Rejection(code=RejectCode.UNAVAILABLE, message="the engine has died")
NO_PRIORITIES = Rejection(
    code=RejectCode.INVALID_ARGUMENT,
    field="priority",
    message="priority: this executor serves requests in the order of their arrival",
)


class Engine:
    """One loaded model. `died` is set when it cannot generate any more."""

    def __init__(self, llm: AsyncLLM, load: LoadRecorder, settings: ExecutorSettings) -> None:
        """Use `Engine.load_model`."""
        self._llm = llm
        self._load = load
        self._renderer = PromptRenderer(llm.renderer)
        self._grammars = GrammarCheck(
            partial(describe_tokenizer, llm.vllm_config, llm.renderer.get_tokenizer()),
            timeout_s=settings.grammar_timeout_s,
        )
        self._aborts: set[asyncio.Task[None]] = set()
        self._delivered = ReaderRelay[int](self._call_deliver)
        self._holds = ReaderRelay[bool](self._call_hold)
        self._background: list[asyncio.Task[None]] = []
        self._supported_tasks: Any = ()
        self._closing = False
        self.died = asyncio.Event()

    @classmethod
    def load_model(cls, settings: ExecutorSettings) -> "Engine":
        """Start the engine's processes and load the model: minutes. Call in a thread, then `open`.

        Raises whatever vLLM raises; its processes are gone then.
        """
        recorders: list[LoadRecorder] = []

        def make_recorder(config: Any, engine_index: int) -> LoadRecorder:
            recorders.append(LoadRecorder(config, engine_index))
            return recorders[-1]

        llm = AsyncLLM.from_vllm_config(make_config(settings), stat_loggers=[make_recorder])
        return cls(llm, recorders[0], settings)

    async def open(self) -> None:
        """Start taking the engine's output, on this event loop."""
        self._supported_tasks = await self._llm.get_supported_tasks()
        self._llm._run_output_handler()
        self._background = [
            asyncio.create_task(self._watch_output(), name="engine-watch"),
            asyncio.create_task(self._delivered.run(), name="delivered-relay"),
            asyncio.create_task(self._holds.run(), name="hold-relay"),
        ]

    async def _watch_output(self) -> None:
        await asyncio.wait([self._llm.output_handler])
        if not self._closing:
            log.error("engine_died")
            self.died.set()

    async def prepare(self, submission: Submission) -> PreparedRequest:
        """Render, tokenise and check a request, off the event loop. Raises `RejectedError`."""
        if self._llm.errored:
            raise RejectedError(DEAD)
        if submission.priority and self._schedules_in_order:
            raise RejectedError(NO_PRIORITIES)
        rendered = await self._renderer.render(submission.input, with_text=submission.echo)
        num_prompt_tokens = len(rendered["prompt_token_ids"])
        max_tokens = resolve_max_tokens(
            submission.sampling.max_tokens,
            prompt=submission.input,
            num_prompt_tokens=num_prompt_tokens,
            max_model_len=self._llm.model_config.max_model_len,
        )
        core_request = await self._process(submission, rendered, max_tokens)
        await self._check_grammar(submission, core_request.sampling_params)
        self._llm.input_processor.assign_request_id(core_request)
        return PreparedRequest(
            engine_id=core_request.request_id,
            num_prompt_tokens=num_prompt_tokens,
            text=rendered.get("prompt"),
            first_token=await self._first_token(rendered) if submission.echo else "",
            core_request=core_request,
        )

    async def _first_token(self, rendered: Any) -> str:
        """Return the text of a prompt's first token; empty for one that the tokeniser put there."""
        text = await self._renderer.detokenize(rendered["prompt_token_ids"][:1])
        return text if rendered["prompt"].startswith(text) else ""

    async def _process(self, submission: Submission, rendered: Any, max_tokens: int) -> Any:
        """Have vLLM check a request and make its own form of it."""
        try:
            return await self._llm.input_processor.process_inputs_async(
                submission.request_id,
                rendered,
                to_vllm_sampling(submission, max_tokens),
                supported_tasks=self._supported_tasks,
                priority=submission.priority,
                trace_headers=self._trace_headers(submission),
            )
        except (VLLMClientError, ValueError) as error:
            rejection = rejection_of(error, submission.input)
            field = blamed_parameter(error, submission.sampling) or rejection.field
            raise RejectedError(replace(rejection, field=field)) from error

    async def _check_grammar(self, submission: Submission, sampling: Any) -> None:
        """Raise RejectedError unless the engine will be able to use the request's grammar."""
        grammar = grammar_of(sampling)
        if grammar is None:
            return
        try:
            await self._grammars.check(*grammar)
        except GrammarError as error:
            field = blamed_parameter(error, submission.sampling)
            code = RejectCode.INVALID_ARGUMENT
            message = f"{field}: {error}"
            raise RejectedError(Rejection(code=code, field=field, message=message)) from None
        except GrammarsBusyError as error:
            raise RejectedError(Rejection(code=RejectCode.OVERLOADED, message=str(error))) from None

    def _trace_headers(self, submission: Submission) -> dict[str, str] | None:
        """Return what vLLM's span of the request belongs to; None if vLLM makes none."""
        makes_spans = self._llm.observability_config.otlp_traces_endpoint is not None
        return submission.trace.headers if submission.trace and makes_spans else None

    @property
    def _schedules_in_order(self) -> bool:
        policy: str = self._llm.vllm_config.scheduler_config.policy
        return policy != "priority"

    async def tokenize(
        self, prompt: TextInput | ChatInput, options: TokenizeOptions
    ) -> Tokenization:
        """Return the token ids of a prompt of any length. Raises `RejectedError`."""
        ids = await self._renderer.tokenize(prompt, options)
        return Tokenization(
            ids=ids,
            texts=self._renderer.vocabulary_entries(ids) if options.with_texts else (),
            max_model_len=self._llm.model_config.max_model_len,
        )

    async def detokenize(self, ids: Sequence[int]) -> str:
        """Return the text of token ids. Raises `RejectedError` if the vocabulary lacks one."""
        size = self._llm.model_config.get_vocab_size()
        if not all(0 <= id < size for id in ids):
            message = f"tokens: must be in [0, {size})"
            code = RejectCode.INVALID_ARGUMENT
            raise RejectedError(Rejection(code=code, field="tokens", message=message))
        return await self._renderer.detokenize(ids)

    async def add(self, prepared: PreparedRequest, sink: DeltaSink) -> None:
        """Start generating. `sink` gets every step's delta, inside the output loop; the last one
        has an ending, a failure if the engine has died.
        """
        reporting = Reporting(
            num_logprobs=prepared.core_request.sampling_params.logprobs or 0,
            first_prompt_token=prepared.first_token,
        )
        collector = StepCollector(prepared.engine_id, sink, reporting)
        try:
            await self._llm._add_request(prepared.core_request, prepared.text, None, 0, collector)
        except EngineDeadError as error:
            collector.put(error)

    def abort(self, engine_ids: Sequence[str]) -> None:
        """End requests: each gets a CANCELLED delta soon. Unknown and ended ones are ignored."""
        if not engine_ids:
            return
        task = asyncio.create_task(self._abort(list(engine_ids)))
        self._aborts.add(task)
        task.add_done_callback(self._aborts.discard)

    async def _abort(self, engine_ids: list[str]) -> None:
        with contextlib.suppress(EngineDeadError):
            await self._llm.abort(engine_ids, internal=True)

    def deliver(self, engine_id: str, num_delivered: int) -> None:
        """Let the scheduler know soon how many tokens a reader has. Returns at once."""
        self._delivered.note(engine_id, num_delivered)

    def hold(self, engine_id: str, held: bool) -> None:
        """Have a request held soon, or let go on: its reader has stopped, or reads again."""
        self._holds.note(engine_id, held)

    async def _call_deliver(self, counts: dict[str, int]) -> None:
        await self._llm.engine_core.call_utility_async(engine_calls.DELIVER, counts)

    async def _call_hold(self, holds: dict[str, bool]) -> None:
        await self._llm.engine_core.call_utility_async(engine_calls.HOLD, holds)

    async def observe(self) -> EngineObservation:
        """Return what the scheduler sees now, between two steps; never returns if it has died."""
        plain = await self._llm.engine_core.call_utility_async(engine_calls.OBSERVE)
        return from_plain(plain)

    def load(self) -> EngineLoad:
        """Return the load of this moment."""
        # The engine publishes nothing while it idles: its last figures are then too high.
        num_live = self._llm.output_processor.get_num_unfinished_requests()
        num_running = min(self._load.num_running_reqs, num_live)
        return EngineLoad(
            num_running_reqs=num_running,
            num_waiting_reqs=num_live - num_running,
            kv_cache_usage_frac=self._load.kv_cache_usage_frac if num_live else 0.0,
        )

    def model_info(self, model_id: str) -> ModelInfo:
        """Describe the model, which requests call `model_id`."""
        config = self._llm.vllm_config
        model, cache = config.model_config, config.cache_config
        scheduler, parallel = config.scheduler_config, config.parallel_config
        return ModelInfo(
            model=model_id,
            max_model_len=model.max_model_len,
            max_num_seqs=scheduler.max_num_seqs,
            max_num_batched_tokens=scheduler.max_num_batched_tokens,
            num_layers=model.get_total_num_hidden_layers(),
            num_kv_heads=model.get_total_num_kv_heads(),
            head_dim=model.get_head_size(),
            block_size=cache.block_size,
            num_gpu_blocks=cache.num_gpu_blocks,
            dtype=str(model.dtype).removeprefix("torch."),
            tensor_parallel_size=parallel.tensor_parallel_size,
            pipeline_parallel_size=parallel.pipeline_parallel_size,
            layers_per_group=layers_per_group(config),
        )

    async def close(self) -> None:
        """Stop the engine's processes."""
        self._closing = True
        for task in self._background:
            task.cancel()
        if self._background:
            self._llm.output_handler.cancel()
        await self._grammars.close()
        await asyncio.to_thread(self._llm.shutdown, SHUTDOWN_TIMEOUT_S)
