"""Text and conversations to token ids, by vLLM's own renderer, off the event loop."""

from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from vllm import TextPrompt as VLLMTextPrompt
from vllm.exceptions import VLLMClientError, VLLMValidationError
from vllm.renderers import BaseRenderer
from vllm.renderers.params import TokenizeParams

from services.executor.prompts.chat_template import chat_params, messages_of
from services.executor.types import PromptOverflow, RejectCode, RejectedError, Rejection
from services.generation.prompts import ChatPrompt, Prompt, TextPrompt, TokenizeOptions, TokenPrompt
from services.kit.fair_turns import FairTurns

NUM_WORKERS = 2  # threads of vLLM's renderer: one for small prompts, one for all others
SMALL_PROMPT = 64 << 10  # characters, or token ids
# Names that vLLM gives to the prompt when it does not fit the context.
CONTEXT_PARAMETERS = ("input_tokens", "input_text")
DECODE_PARAMS = TokenizeParams(max_total_tokens=None, needs_detokenization=True)


def prompt_field(prompt: Prompt) -> str:
    """Return the field of the OpenAI API that `prompt` came in."""
    return "messages" if isinstance(prompt, ChatPrompt) else "prompt"


def sure_text(prompt: TextPrompt | ChatPrompt) -> str:
    """Return text that is in the rendered prompt for sure. Templates trim turns, and may leave out
    thoughts, calls and what the model said before.
    """
    if isinstance(prompt, TextPrompt):
        return prompt.text
    return "".join(turn.content.strip() for turn in prompt.messages if turn.role != "assistant")


def size_of(prompt: Prompt) -> int:
    """Return about how many characters, or token ids, there are to prepare."""
    match prompt:
        case TextPrompt(text):
            return len(text)
        case TokenPrompt(token_ids):
            return len(token_ids)
        case ChatPrompt(messages, options):
            texts = [text for turn in messages for text in (turn.content, turn.reasoning)]
            texts += [call.arguments for turn in messages for call in turn.tool_calls]
            texts += [tool.parameters for tool in options.tools]
            return sum(map(len, texts))


class PromptRenderer:
    """Renders small prompts one at a time, and beside them large ones, in turns that clients share.
    Only what is to begin at once is handed to vLLM, which counts the time from then.
    """

    def __init__(self, renderer: BaseRenderer) -> None:
        self._renderer = renderer
        self._max_model_len = renderer.model_config.max_model_len
        self._small = FairTurns()
        self._large = FairTurns()

    def check_length(self, prompt: Prompt) -> None:
        """Raise `RejectedError` if a prompt's characters alone are too many for the context, in
        vLLM's words, before anything is done for it.
        """
        if isinstance(prompt, TokenPrompt):
            return
        how = self._renderer.default_cmpl_tok_params
        text = VLLMTextPrompt(prompt=sure_text(prompt))
        try:
            how.apply_pre_tokenization(self._renderer.tokenizer, text)
        except VLLMValidationError as error:
            raise RejectedError(rejection_of(error, prompt, self._max_model_len)) from error

    async def render(
        self,
        prompt: Prompt,
        *,
        with_text: bool = False,
        fair_key: str = "",
        now_s: float | None = None,
    ) -> Any:
        """Return vLLM's `EngineInput`, tokenised; `with_text` with the text of token ids too.

        `now_s`: seconds since the epoch that a template takes for now. Raises `RejectedError`.
        """
        work = partial(self._render, prompt, with_text, now_s)
        return await self._in_turn(work, prompt, fair_key)

    async def _in_turn(
        self, work: Callable[[], Coroutine[Any, Any, Any]], prompt: Prompt, fair_key: str
    ) -> Any:
        """Return what `work` makes of `prompt`; faults that vLLM finds as `RejectedError`."""
        size = size_of(prompt)
        turns = self._small if size < SMALL_PROMPT else self._large
        try:
            return await turns.run(work, key=fair_key, size=size)
        except (VLLMClientError, ValueError, TypeError) as error:
            raise RejectedError(rejection_of(error, prompt, self._max_model_len)) from error

    async def _render(self, prompt: Prompt, with_text: bool, now_s: float | None) -> Any:
        match prompt:
            case TextPrompt():
                (rendered,) = await self._renderer.render_cmpl_async([{"prompt": prompt.text}])
            case TokenPrompt():
                ids = {"prompt_token_ids": list(prompt.token_ids)}
                (rendered,) = await self._renderer.render_cmpl_async([ids])
                if with_text:
                    rendered["prompt"] = await self.text_of(prompt.token_ids)
            case ChatPrompt():
                params = chat_params(prompt.options, now_s=now_s)
                _, (rendered,) = await self._renderer.render_chat_async(
                    [messages_of(prompt)], params
                )
        return rendered

    async def tokenize(
        self, prompt: TextPrompt | ChatPrompt, options: TokenizeOptions
    ) -> tuple[int, ...]:
        """Return the token ids of a prompt of any length. Raises `RejectedError`."""
        work = partial(self._tokenize, prompt, options)
        return tuple((await self._in_turn(work, prompt, options.fair_key))["prompt_token_ids"])

    async def _tokenize(self, prompt: TextPrompt | ChatPrompt, options: TokenizeOptions) -> Any:
        renderer = self._renderer
        match prompt:
            case TextPrompt():
                how = replace(
                    renderer.default_cmpl_tok_params,
                    max_total_tokens=None,
                    add_special_tokens=not options.omits_special_tokens,
                )
                (rendered,) = await renderer.render_cmpl_async([{"prompt": prompt.text}], how)
            case ChatPrompt():
                how = replace(renderer.default_chat_tok_params, max_total_tokens=None)
                params = chat_params(prompt.options)
                adds_prompt = not options.omits_generation_prompt
                params.chat_template_kwargs["add_generation_prompt"] = adds_prompt
                _, (rendered,) = await renderer.render_chat_async(
                    [messages_of(prompt)], params, how
                )
        return rendered

    def vocabulary_entries(self, ids: Sequence[int]) -> tuple[str, ...]:
        """Return each id's entry in the vocabulary."""
        return tuple(self._renderer.get_tokenizer().convert_ids_to_tokens(list(ids)))

    async def detokenize(self, ids: Sequence[int], *, fair_key: str) -> str:
        """Return the text of token ids that the vocabulary has, in the turn of `fair_key`."""
        prompt = TokenPrompt(tuple(ids))
        return str(await self._in_turn(partial(self.text_of, ids), prompt, fair_key))

    async def text_of(self, ids: Sequence[int]) -> str:
        """Return the same at once, as part of work that has its turn."""
        prompt = {"prompt_token_ids": list(ids)}
        decoded = await self._renderer.tokenize_prompt_async(prompt, DECODE_PARAMS)
        return str(decoded["prompt"])


def rejection_of(error: Exception, prompt: Prompt, max_model_len: int) -> Rejection:
    """Return what a client is told about vLLM's complaint; faults without a name are the prompt's.

    vLLM's own text says which of its parameters failed; that part is left out.
    """
    parameter = getattr(error, "parameter", None)
    message = error.args[0] if isinstance(error, VLLMValidationError) else str(error)
    if parameter in CONTEXT_PARAMETERS:
        num_told = getattr(error, "value", 0) if parameter == "input_tokens" else 0
        # Tokenizers stop there: vLLM tells of "at least" so many.
        is_cut = num_told == max_model_len + 1 and not isinstance(prompt, TokenPrompt)
        num_tokens = 0 if is_cut else num_told
        return Rejection(
            code=RejectCode.CONTEXT_LENGTH,
            field=prompt_field(prompt),
            message=message,
            overflow=PromptOverflow(num_prompt_tokens=num_tokens, max_model_len=max_model_len),
        )
    return Rejection(
        code=RejectCode.INVALID_ARGUMENT, field=parameter or prompt_field(prompt), message=message
    )
