"""vLLM's `AsyncLLM` behind the few verbs that the executor needs."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import structlog
from vllm.platforms import current_platform
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from services.executor import kv_holders
from services.executor.engine import engine_calls
from services.executor.engine.aborts import Aborts
from services.executor.engine.collector import UNREADABLE, DeltaSink, Reporting, StepCollector
from services.executor.engine.config import make_config
from services.executor.engine.fingerprint import Fingerprints, is_repeatable, numerics_of
from services.executor.engine.kept_parts import KeptParts
from services.executor.engine.kv_facts import kv_facts
from services.executor.engine.load_recorder import LoadRecorder
from services.executor.engine.reader_relay import ReaderRelay
from services.executor.engine.replay import Replay, Replayed
from services.executor.kv_holders import KVHolders
from services.executor.kv_options import caches_prefixes, layers_per_group, max_num_active_seqs
from services.executor.observation import EngineObservation, from_plain
from services.executor.prompts.chat_template import known_variables
from services.executor.prompts.preparation import Preparation
from services.executor.prompts.prompt_renderer import PromptRenderer
from services.executor.prompts.sampling import advised_sampling, speculates
from services.executor.request_tag import Begun, to_extra_args, with_begun
from services.executor.settings import ExecutorSettings
from services.executor.types import (
    Adapter,
    Delta,
    EngineLoad,
    HeldRequests,
    ModelInfo,
    PreparedRequest,
    RejectCode,
    RejectedError,
    Rejection,
    Resume,
    Submission,
)
from services.generation.prompts import ChatPrompt, TextPrompt, Tokenization, TokenizeOptions
from services.kit.fair_turns import FairTurns
from services.pacing.types import ServiceLevel

log = structlog.get_logger()

SHUTDOWN_TIMEOUT_S = 3.0  # for an orderly end of the processes; nothing in them is worth more

DEAD = Rejection(code=RejectCode.UNAVAILABLE, message="the engine has died")


class Engine:
    """One loaded model. `died` is set when it cannot generate any more."""

    def __init__(self, llm: AsyncLLM, load: LoadRecorder, settings: ExecutorSettings) -> None:
        """Use `Engine.load_model`."""
        self._llm = llm
        self._load = load
        self._renderer = PromptRenderer(llm.renderer)
        self._preparation = Preparation(llm, self._renderer, settings)
        self._max_tool_wait_s = settings.kv_retention_tools_s if settings.uses_layerwise_kv else 0.0
        self._kept_parts = KeptParts(self._renderer, keeps_tool_turns=self._max_tool_wait_s > 0)
        self._default_sampling = advised_sampling(
            llm.model_config.get_diff_sampling_param(), drafts=speculates(llm.vllm_config)
        )
        self._template_variables = known_variables(llm.model_config, llm.renderer.get_tokenizer())
        self._root = settings.model
        fingerprints = Fingerprints(llm.vllm_config, settings, llm.renderer.get_tokenizer())
        self._fingerprint = fingerprints.of_model
        self._adapters = tuple(
            Adapter(model=name, root=path, fingerprint=fingerprints.of_adapter(path))
            for name, path in settings.lora_modules.items()
        )
        self._aborts = Aborts(llm.output_processor, llm.engine_core)
        self._delivered = ReaderRelay[tuple[int, float]](self._call_deliver)
        self._turns = ReaderRelay[tuple[int, bool]](self._call_turn)
        self._holds = ReaderRelay[bool](self._call_hold)
        self._replays = FairTurns()  # each has the interpreter while it runs
        self._paces = ReaderRelay[dict[str, Any]](self._call_repace)
        self._tool_turns = ReaderRelay[float](self._call_keep_turns)
        self._background: list[asyncio.Task[None]] = []
        self._closing = False
        self._shutdown_timeout_s = shutdown_timeout_s(settings)
        self._kv = kv_facts(llm.vllm_config, {})
        self.died = asyncio.Event()

    @classmethod
    def load_model(cls, settings: ExecutorSettings, *, rendezvous_port: int = 0) -> "Engine":
        """Start the engine's processes and load the model: minutes. Call in a thread, then `open`.
        `rendezvous_port` as for `make_config`.

        Raises whatever vLLM raises; its processes are gone then.
        """
        recorders: list[LoadRecorder] = []

        def make_recorder(config: Any, engine_index: int) -> LoadRecorder:
            recorders.append(LoadRecorder(config, engine_index))
            return recorders[-1]

        config = make_config(settings, rendezvous_port=rendezvous_port)
        llm = AsyncLLM.from_vllm_config(config, stat_loggers=[make_recorder])
        return cls(llm, recorders[0], settings)

    async def open(self) -> None:
        """Start taking the engine's output, on this event loop."""
        await self._preparation.open()
        self._llm._run_output_handler()
        self._background = [
            asyncio.create_task(self._watch_output(), name="engine-watch"),
            asyncio.create_task(self._delivered.run(), name="delivered-relay"),
            asyncio.create_task(self._turns.run(), name="turn-relay"),
            asyncio.create_task(self._holds.run(), name="hold-relay"),
            asyncio.create_task(self._paces.run(), name="pace-relay"),
            asyncio.create_task(self._tool_turns.run(), name="tool-turn-relay"),
        ]
        if self._kv.is_layerwise:
            told = await self._llm.engine_core.call_utility_async(engine_calls.DESCRIBE)
            self._kv = kv_facts(self._llm.vllm_config, told)
        log.info("engine_described", **asdict(self._kv))

    async def _watch_output(self) -> None:
        await asyncio.wait([self._llm.output_handler])
        if not self._closing:
            log.error("engine_died")
            self.died.set()

    async def prepare(self, submissions: Sequence[Submission]) -> list[PreparedRequest]:
        """Render, tokenise and check requests for one prompt, off the event loop. Raises
        `RejectedError`.
        """
        if self._llm.errored:
            raise RejectedError(DEAD)
        came_s = time.monotonic()
        prepared = await self._preparation.prepare(submissions)
        await self._kept_parts.ask(submissions[0], prepared)
        resume = prepared[0].resume
        if resume is None:
            return prepared
        work = partial(asyncio.to_thread, self._replay, prepared[0], resume, came_s)
        key, size = submissions[0].fair_key, len(resume.output_ids)
        return [await self._replays.run(work, key=key, size=size)]

    def _replay(self, prepared: PreparedRequest, resume: Resume, came_s: float) -> PreparedRequest:
        """Return a request, which came at `came_s`, with what is told by the tokens that its answer
        has. Raises `RejectedError`.
        """
        core, processor = prepared.core_request, self._llm.output_processor
        replay = Replay(core, processor.tokenizer, _reporting(prepared))
        max_model_len = self._llm.model_config.max_model_len
        replayed = replay.run(
            resume.output_ids, max_model_len=max_model_len, num_retold=resume.num_retold_tokens
        )
        reads = prepared.reads if prepared.parser is None else prepared.parser.is_read
        begun = Begun(
            list(resume.output_ids),
            resume.num_delivered_tokens,
            came_s - resume.last_due_age_s,
            came_s - resume.arrived_age_s,
        )
        sampling = core.sampling_params
        sampling.extra_args = with_begun(sampling.extra_args, begun, reads=reads)
        return replace(prepared, replayed=replayed, retold=replayed.retold, reads=reads)

    async def tokenize(
        self, prompt: TextPrompt | ChatPrompt, options: TokenizeOptions
    ) -> Tokenization:
        """Return the token ids of a prompt of any length. Raises `RejectedError`."""
        ids = await self._renderer.tokenize(prompt, options)
        return Tokenization(
            ids=ids,
            texts=self._renderer.vocabulary_entries(ids) if options.with_texts else (),
            max_model_len=self._llm.model_config.max_model_len,
        )

    async def detokenize(self, ids: Sequence[int], *, fair_key: str) -> str:
        """Return the text of token ids. Raises `RejectedError` if the vocabulary lacks one."""
        size = self._llm.model_config.get_vocab_size()
        if not all(0 <= id < size for id in ids):
            message = f"tokens: must be in [0, {size})"
            code = RejectCode.INVALID_ARGUMENT
            raise RejectedError(Rejection(code=code, field="tokens", message=message))
        return await self._renderer.detokenize(ids, fair_key=fair_key)

    async def add(self, prepared: PreparedRequest, sink: DeltaSink) -> None:
        """Start generating. `sink` gets every step's delta, inside the output loop; the last one
        has an ending, a failure if the engine has died.
        """
        pass_on = partial(self._pass_on, prepared.engine_id, sink)
        replayed: Replayed | None = prepared.replayed
        if replayed is not None and replayed.ending is not None:
            pass_on(replayed.ending)
            return
        collector = StepCollector(prepared.engine_id, pass_on, _reporting(prepared))
        core = prepared.core_request
        try:
            if replayed is None:
                await self._llm._add_request(core, prepared.text, None, 0, collector)
            else:
                self._put_back(replayed, core, collector)
                await self._llm.engine_core.add_request_async(core)
        except EngineDeadError as error:
            collector.put(error)

    def _put_back(self, replayed: Replayed, core: Any, collector: StepCollector) -> None:
        """Have vLLM's front half await the rest of an answer. The engine may be told of it at once
        behind this, before anything else runs: else its first step would be taken for the first.
        """
        processor = self._llm.output_processor
        processor.add_request(core, None, None, 0, collector)
        state = processor.request_states[core.request_id]
        state.detokenizer, state.logprobs_processor = replayed.detokenizer, replayed.logprobs

    def _pass_on(self, engine_id: str, sink: DeltaSink, delta: Delta) -> None:
        """Hand a delta over; a request whose output cannot be read or taken is ended in the engine.

        Raises nothing into vLLM's output loop, which is every request's.
        """
        if delta.ending is UNREADABLE:
            self.abort([engine_id])
        try:
            sink(delta)
        except Exception:
            log.exception("delta_not_taken", engine_request_id=engine_id)
            self.abort([engine_id])

    def abort(self, engine_ids: Sequence[str]) -> None:
        """End requests: each gets a CANCELLED delta soon. Unknown and ended ones are ignored."""
        self._aborts.start(engine_ids)

    async def held(self) -> HeldRequests:
        """Return which requests vLLM has; never returns if the engine has died.

        A request that was added before the call and is in neither answer has ended.
        """
        core: list[str] = await self._llm.engine_core.call_utility_async(engine_calls.HELD)
        return HeldRequests(
            answered=frozenset(self._llm.output_processor.request_states), computed=frozenset(core)
        )

    def deliver(self, engine_id: str, num_delivered: int) -> None:
        """Let the scheduler know soon how many tokens a reader has. Returns at once."""
        self._delivered.note(engine_id, (num_delivered, time.monotonic()))

    def turn(self, engine_id: str, index: int, *, reads: bool) -> None:
        """Let the scheduler know soon that a request's tokens from `index` on are read, or are
        not. Returns at once.
        """
        self._turns.note(engine_id, (index, reads))

    def hold(self, engine_id: str, held: bool) -> None:
        """Have a request held soon, or let go on: its reader has stopped, or reads again."""
        self._holds.note(engine_id, held)

    def repace(self, engine_id: str, service_level: ServiceLevel) -> None:
        """Let the scheduler know soon what a request is promised from now on. Returns at once."""
        self._paces.note(engine_id, to_extra_args(service_level))

    def keep_turn(self, engine_id: str, seconds: float) -> None:
        """Have a request's KV kept for so long, at most as long as the settings say: it ends with a
        tool call. Returns at once.
        """
        if self._max_tool_wait_s > 0:
            self._tool_turns.note(engine_id, min(seconds, self._max_tool_wait_s))

    async def _call_deliver(self, counts: dict[str, tuple[int, float]]) -> None:
        await self._llm.engine_core.call_utility_async(engine_calls.DELIVER, counts)

    async def _call_turn(self, turns: dict[str, tuple[int, bool]]) -> None:
        await self._llm.engine_core.call_utility_async(engine_calls.TURN, turns)

    async def _call_hold(self, holds: dict[str, bool]) -> None:
        await self._llm.engine_core.call_utility_async(engine_calls.HOLD, holds)

    async def _call_repace(self, paces: dict[str, dict[str, Any]]) -> None:
        await self._llm.engine_core.call_utility_async(engine_calls.REPACE, paces)

    async def _call_keep_turns(self, turns: dict[str, float]) -> None:
        await self._llm.engine_core.call_utility_async(engine_calls.KEEP_TURNS, turns)

    async def release_session(self, account: str, session_id: str) -> int:
        """Keep nothing for a session any more; return how many tokens were."""
        await self._tool_turns.flush()  # of the session, too
        call = self._llm.engine_core.call_utility_async
        num_tokens: int = await call(engine_calls.RELEASE_SESSION, account, session_id)
        return num_tokens

    async def observe(self) -> EngineObservation:
        """Return what the scheduler sees now, between two steps; never returns if it has died."""
        plain = await self._llm.engine_core.call_utility_async(engine_calls.OBSERVE)
        return from_plain(plain)

    async def kv_holders(self, max_sessions: int) -> KVHolders:
        """Return what holds KV now, and of sessions those with most; between two steps."""
        call = self._llm.engine_core.call_utility_async
        return kv_holders.from_plain(await call(engine_calls.KV_HOLDERS, max_sessions))

    def num_steps(self) -> int:
        """Return how many steps the engine has ended, as far as this process has heard."""
        return self._load.num_steps

    def load(self) -> EngineLoad:
        """Return the load of this moment."""
        # The engine publishes nothing while it idles: its last figures are then too high.
        num_live = self._llm.output_processor.get_num_unfinished_requests()
        num_running = min(self._load.num_running_reqs, num_live)
        return EngineLoad(
            num_running_reqs=num_running,
            num_waiting_reqs=num_live - num_running,
            kv_cache_usage_frac=self._load.kv_cache_usage_frac if num_live else 0.0,
            output_tps=self._load.output_tps,
        )

    def model_info(self, model_id: str) -> ModelInfo:
        """Describe the model, which requests call `model_id`."""
        config = self._llm.vllm_config
        model, cache = config.model_config, config.cache_config
        scheduler, parallel = config.scheduler_config, config.parallel_config
        return ModelInfo(
            model=model_id,
            max_model_len=model.max_model_len,
            max_num_seqs=max_num_active_seqs(config),
            max_num_batched_tokens=scheduler.max_num_batched_tokens,
            num_layers=model.get_total_num_hidden_layers(),
            num_kv_heads=1 if model.use_mla else model.get_total_num_kv_heads(),
            head_dim=model.get_head_size(),
            block_size=cache.block_size,
            num_gpu_blocks=cache.num_gpu_blocks,
            dtype=str(model.dtype).removeprefix("torch."),
            tensor_parallel_size=parallel.tensor_parallel_size,
            pipeline_parallel_size=parallel.pipeline_parallel_size,
            layers_per_group=layers_per_group(config),
            default_sampling=self._default_sampling,
            caches_prefixes=caches_prefixes(config),
            root=self._root,
            adapters=self._adapters,
            template_variables=self._template_variables,
            kv=self._kv,
            fingerprint=self._fingerprint,
            numerics=numerics_of(config),
            is_repeatable=is_repeatable(config),
            makes_drafts=speculates(config),
            max_loras=config.lora_config.max_loras if config.lora_config else 0,
        )

    async def close(self) -> None:
        """Stop the engine's processes."""
        self._closing = True
        for task in self._background:
            task.cancel()
        if self._background:
            self._llm.output_handler.cancel()
        await self._replays.close()
        await self._preparation.close()
        await asyncio.to_thread(self._llm.shutdown, self._shutdown_timeout_s)


def _reporting(prepared: PreparedRequest) -> Reporting:
    sampling, resume = prepared.core_request.sampling_params, prepared.resume
    return Reporting(
        num_logprobs=sampling.logprobs or 0,
        first_prompt_token=prepared.first_token,
        parser=prepared.parser,
        has_form=sampling.structured_outputs is not None,
        reads=prepared.reads,
        num_cached_tokens=resume.num_cached_tokens if resume is not None else None,
        asks_to_keep=prepared.asks_to_keep,
    )


def shutdown_timeout_s(settings: ExecutorSettings) -> float:
    """Return how long the processes may take to end, unpinning their host memory."""
    return SHUTDOWN_TIMEOUT_S + (settings.unpin_s if current_platform.is_cuda() else 0.0)
