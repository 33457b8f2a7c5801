"""Requests on their way into the engine: rendered, checked, and in vLLM's own form."""

import asyncio
from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

from vllm.exceptions import VLLMClientError
from vllm.lora.request import LoRARequest
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from services.executor.prompts.chat_parsers import ChatParsers, ParsedChat
from services.executor.prompts.chat_template import check_variables, reads_clock
from services.executor.prompts.context_length import check_num_answers, resolve_max_tokens
from services.executor.prompts.form_progress import ids_of_form
from services.executor.prompts.grammar_check import GrammarCheck, GrammarError, GrammarsBusyError
from services.executor.prompts.grammar_compiler import GrammarCompiler
from services.executor.prompts.grammar_process import message_of
from services.executor.prompts.json_forms import fault_of_tools, kept_form, without_annotations
from services.executor.prompts.prompt_renderer import PromptRenderer, rejection_of
from services.executor.prompts.resumption import (
    cannot_resume,
    check_count,
    check_ids,
    check_place,
    prompt_digest,
)
from services.executor.prompts.sampling import (
    blamed_parameter,
    describe_tokenizer,
    grammar_of,
    is_of_any_object,
    speculates,
    to_vllm_outputs,
    to_vllm_sampling,
    vllm_seed,
)
from services.executor.settings import ExecutorSettings
from services.executor.types import (
    LOWEST_PRIORITY,
    PreparedRequest,
    RejectCode,
    RejectedError,
    Rejection,
    Resume,
    Submission,
)
from services.generation.prompts import ChatPrompt, Prompt
from services.generation.sampling_params import SamplingParams
from services.placement.presets import preset_of

NO_PRIORITIES = Rejection(
    code=RejectCode.INVALID_ARGUMENT,
    field="priority",
    message="priority: this executor serves requests in the order of their arrival",
)


class Preparation:
    """Prepares requests for one engine, side by side, off the event loop."""

    def __init__(self, llm: AsyncLLM, renderer: PromptRenderer, settings: ExecutorSettings) -> None:
        """Load the parsers that the settings name. TypeError for one that does not go with the
        model's tokeniser.
        """
        self._llm = llm
        self._renderer = renderer
        self._tokenizer = llm.renderer.get_tokenizer()
        self._adapters = {
            name: LoRARequest(name, number, path)
            for number, (name, path) in enumerate(settings.lora_modules.items(), start=1)
        }
        by_vllm = llm.vllm_config.scheduler_config.policy == "priority"
        self._has_priorities = by_vllm or preset_of(settings.acting_policy).has_priorities
        self._reads_clock = reads_clock(llm.model_config, self._tokenizer)
        self._supported_tasks: Any = ()
        self._parsers = ChatParsers(
            llm.model_config,
            self._tokenizer,
            tool_calls=settings.tool_call_parser or None,
            reasoning=settings.reasoning_parser or None,
        )
        describe = partial(describe_tokenizer, llm.vllm_config, self._tokenizer)
        self._grammars = GrammarCheck(
            partial(GrammarCompiler, describe),
            cpu_s=settings.grammar_timeout_s,
            max_wait_s=settings.grammar_wait_s,
        )

    async def open(self) -> None:
        """Ask the engine what it can do. Raises what it says of an adapter that it cannot use."""
        self._supported_tasks = await self._llm.get_supported_tasks()
        for adapter in self._adapters.values():
            await self._llm.add_lora(adapter)

    async def close(self) -> None:
        """End what compiles grammars."""
        await self._grammars.close()

    async def prepare(self, submissions: Sequence[Submission]) -> list[PreparedRequest]:
        """Render, tokenise and check requests for one prompt, which differ in their ids, seeds and
        traces. Raises `RejectedError`.
        """
        submission = submissions[0]
        if submission.priority and not self._has_priorities:
            if submission.priority != LOWEST_PRIORITY:
                raise RejectedError(NO_PRIORITIES)
            submission = replace(submission, priority=0)
        if submission.resume is not None:
            size = self._llm.model_config.get_vocab_size()
            check_ids(submission.resume, vocabulary_size=size)
        self._renderer.check_length(submission.prompt)
        parsed = await self._parsed(submission.prompt, submission.sampling)
        rendered = await self._renderer.render(
            submission.prompt,
            with_text=submission.echo,
            fair_key=submission.fair_key,
            now_s=(submission.rendered_at_s or None) if self._reads_clock else None,
        )
        num_prompt_tokens = len(rendered["prompt_token_ids"])
        check_num_answers(len(submissions), num_prompt_tokens)
        max_tokens = self._max_tokens(submission, rendered["prompt_token_ids"])
        core_request = await self._process(submission, rendered, max_tokens, parsed)
        if parsed is not None:
            parsed.apply_to_core(core_request)
        await self._check_grammar(submission, core_request, parsed)
        core_request.cache_salt = submission.cache_salt or None
        first_token = await self._first_token(rendered) if submission.echo else ""
        prompt_ids = tuple(rendered["prompt_token_ids"]) if submission.returns_prompt_ids else ()
        return [
            PreparedRequest(
                engine_id=core.request_id,
                num_prompt_tokens=num_prompt_tokens,
                max_tokens=max_tokens,
                prompt_digest=prompt_digest(rendered["prompt_token_ids"]),
                text=rendered.get("prompt"),
                first_token=first_token,
                prompt_ids=prompt_ids,
                core_request=core,
                reads=_reads_from_first(submission, parsed),
                parser=parsed and parsed.answer_parser(rendered["prompt_token_ids"]),
                resume=submission.resume,
                asks_to_keep=bool(submission.retention and submission.retention.marks),
            )
            for core in map(partial(self._answer, core_request), submissions)
        ]

    def _max_tokens(self, submission: Submission, prompt_ids: Sequence[int]) -> int:
        """Return how many tokens an answer may have. Raises `RejectedError`."""
        max_model_len, resume = self._llm.model_config.max_model_len, submission.resume
        if resume is not None:
            check_place(resume, prompt_ids, max_model_len=max_model_len)
            if resume.max_tokens:
                return resume.max_tokens
        max_tokens = resolve_max_tokens(
            submission.sampling.max_tokens,
            prompt=submission.prompt,
            num_prompt_tokens=len(prompt_ids),
            max_model_len=max_model_len,
        )
        if resume is not None:
            check_count(resume, max_tokens)
        return max_tokens

    def _answer(self, core_request: Any, submission: Submission) -> Any:
        """Return the engine's request for one answer, made from that for any answer, as vLLM makes
        those for its `n`.
        """
        core = copy(core_request)
        core.request_id = submission.request_id
        core.sampling_params = copy(core_request.sampling_params)
        core.sampling_params.seed = vllm_seed(submission.sampling)
        core.trace_headers = self._trace_headers(submission)
        self._llm.input_processor.assign_request_id(core)
        return core

    async def _parsed(self, prompt: Prompt, sampling: SamplingParams) -> ParsedChat | None:
        """Return how a conversation's answer is parsed; None for not at all. Raises
        `RejectedError` naming an option that cannot be followed.
        """
        if not isinstance(prompt, ChatPrompt) or not self._parsers.concern(prompt.options):
            return None
        return await asyncio.to_thread(self._prepare_parsing, prompt, sampling)

    def _prepare_parsing(self, chat: ChatPrompt, sampling: SamplingParams) -> ParsedChat | None:
        try:
            check_variables(chat.options, self._llm.model_config, self._tokenizer)
            form = to_vllm_outputs(sampling.structured_outputs)
            return self._parsers.prepare(chat, without_annotations(form))
        except (VLLMClientError, ValueError, TypeError) as error:
            raise _rejected("tools" if chat.options.tools else "messages", error) from error

    async def _first_token(self, rendered: Any) -> str:
        """Return the text of a prompt's first token; empty for one that the tokeniser put there."""
        text = await self._renderer.text_of(rendered["prompt_token_ids"][:1])
        return text if rendered["prompt"].startswith(text) else ""

    async def _process(
        self, submission: Submission, rendered: Any, max_tokens: int, parsed: ParsedChat | None
    ) -> Any:
        """Have vLLM check a request and make its own form of it."""
        try:
            reads = _reads_from_first(submission, parsed)
            sampling = to_vllm_sampling(
                submission, max_tokens, reads=reads, drafts=speculates(self._llm.vllm_config)
            )
            if parsed is not None:
                parsed.apply(sampling)
            await self._keep_form(submission, sampling, parsed)
            return await self._llm.input_processor.process_inputs_async(
                submission.request_id,
                rendered,
                sampling,
                supported_tasks=self._supported_tasks,
                lora_request=self._adapters.get(submission.model),
                priority=submission.priority,
            )
        except (VLLMClientError, ValueError) as error:
            rejection = rejection_of(error, submission.prompt, self._llm.model_config.max_model_len)
            field = _blamed(error, submission, parsed) or rejection.field
            if isinstance(error.__cause__, RuntimeError):  # xgrammar's, which vLLM does not tell
                raise _rejected(field, message_of(error.__cause__)) from error
            raise RejectedError(replace(rejection, field=field)) from error

    async def _keep_form(
        self, submission: Submission, sampling: Any, parsed: ParsedChat | None
    ) -> None:
        """Have the engine keep to a form in JSON. Raises RejectedError naming what it cannot."""
        form = sampling.structured_outputs
        if form is None:
            return
        forms = self._llm.vllm_config.structured_outputs_config
        keep = partial(kept_form, form, is_compact=forms.disable_any_whitespace)
        try:
            sampling.structured_outputs = await asyncio.to_thread(keep)
        except (VLLMClientError, ValueError) as error:
            tools = parsed.request.tools if parsed and parsed.has_form_of_tools else None
            fault = fault_of_tools(tools or ())
            raise _rejected(_blamed(error, submission, parsed), fault or error) from error

    async def _check_grammar(
        self, submission: Submission, core_request: Any, parsed: ParsedChat | None
    ) -> None:
        """Raise RejectedError unless the engine will be able to use the request's grammar, and the
        grammar allows what the answer has already.
        """
        grammar, resume = grammar_of(core_request.sampling_params), submission.resume
        if grammar is None or (resume is None and is_of_any_object(grammar)):
            return
        ids: Sequence[int] = ()
        if resume is not None:
            ids = await asyncio.to_thread(self._ids_of_form, core_request, resume)
        try:
            await self._grammars.check(*grammar, ids, fair_key=submission.fair_key)
        except GrammarError as error:
            if resume is not None:
                raise RejectedError(cannot_resume(str(error))) from None
            raise _rejected(_blamed(error, submission, parsed), error) from None
        except GrammarsBusyError as error:
            raise RejectedError(Rejection(code=RejectCode.BUSY, message=str(error))) from None

    def _ids_of_form(self, core_request: Any, resume: Resume) -> Sequence[int]:
        """Return those of an answer's tokens that its form must allow."""
        request = Request.from_engine_core_request(core_request, None)
        return ids_of_form(self._forms, request, resume.output_ids)

    @cached_property
    def _forms(self) -> StructuredOutputManager:
        return StructuredOutputManager(self._llm.vllm_config)

    def _trace_headers(self, submission: Submission) -> dict[str, str] | None:
        """Return what vLLM's span of the request belongs to; None if vLLM makes none."""
        makes_spans = self._llm.observability_config.otlp_traces_endpoint is not None
        return submission.trace.headers if submission.trace and makes_spans else None


def _reads_from_first(submission: Submission, parsed: ParsedChat | None) -> bool:
    """Return whether an answer is read from its first token on; else its parser says from where,
    if at all.
    """
    is_for_reader = submission.priority != LOWEST_PRIORITY
    return is_for_reader and parsed is None and submission.sampling.structured_outputs is None


def _rejected(field: str, error: Exception | str) -> RejectedError:
    code = RejectCode.INVALID_ARGUMENT
    return RejectedError(Rejection(code=code, field=field, message=f"{field}: {error}"))


def _blamed(error: Exception, submission: Submission, parsed: ParsedChat | None) -> str:
    """Return the parameter whose form vLLM complains about; "" if it names another one itself."""
    if parsed is not None and parsed.has_form_of_tools and not getattr(error, "parameter", None):
        return "tools"
    return blamed_parameter(error, submission.sampling)
