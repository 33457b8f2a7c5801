"""Text and conversations to token ids, by vLLM's own renderer, off the event loop."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from vllm.exceptions import VLLMClientError, VLLMValidationError
from vllm.renderers import BaseRenderer
from vllm.renderers.params import TokenizeParams

from services.executor.prompts.chat_template import chat_params, messages_of
from services.executor.types import PromptOverflow, RejectCode, RejectedError, Rejection
from services.generation.prompts import ChatPrompt, Prompt, TextPrompt, TokenizeOptions, TokenPrompt

# Names that vLLM gives to the prompt when it does not fit the context.
CONTEXT_PARAMETERS = ("input_tokens", "input_text")
DECODE_PARAMS = TokenizeParams(max_total_tokens=None, needs_detokenization=True)


def prompt_field(prompt: Prompt) -> str:
    """Return the field of the OpenAI API that `prompt` came in."""
    return "messages" if isinstance(prompt, ChatPrompt) else "prompt"


class PromptRenderer:
    """Renders one prompt at a time; prompts of other requests render meanwhile."""

    def __init__(self, renderer: BaseRenderer) -> None:
        self._renderer = renderer
        self._max_model_len = renderer.model_config.max_model_len

    async def render(self, prompt: Prompt, *, with_text: bool = False) -> Any:
        """Return vLLM's `EngineInput`, tokenised; `with_text` with the text of token ids too.

        Raises `RejectedError`.
        """
        try:
            return await self._render(prompt, with_text)
        except (VLLMClientError, ValueError, TypeError) as error:
            raise RejectedError(rejection_of(error, prompt, self._max_model_len)) from error

    async def _render(self, prompt: Prompt, with_text: bool) -> Any:
        match prompt:
            case TextPrompt():
                (rendered,) = await self._renderer.render_cmpl_async([{"prompt": prompt.text}])
            case TokenPrompt():
                ids = {"prompt_token_ids": list(prompt.token_ids)}
                (rendered,) = await self._renderer.render_cmpl_async([ids])
                if with_text:
                    rendered["prompt"] = await self.detokenize(prompt.token_ids)
            case ChatPrompt():
                _, (rendered,) = await self._renderer.render_chat_async(
                    [messages_of(prompt)], chat_params(prompt.options)
                )
        return rendered

    async def tokenize(
        self, prompt: TextPrompt | ChatPrompt, options: TokenizeOptions
    ) -> tuple[int, ...]:
        """Return the token ids of a prompt of any length. Raises `RejectedError`."""
        try:
            return tuple((await self._tokenize(prompt, options))["prompt_token_ids"])
        except (VLLMClientError, ValueError, TypeError) as error:
            raise RejectedError(rejection_of(error, prompt, self._max_model_len)) from error

    async def _tokenize(self, prompt: TextPrompt | ChatPrompt, options: TokenizeOptions) -> Any:
        renderer = self._renderer
        match prompt:
            case TextPrompt():
                how = replace(
                    renderer.default_cmpl_tok_params,
                    max_total_tokens=None,
                    add_special_tokens=options.add_special_tokens,
                )
                (rendered,) = await renderer.render_cmpl_async([{"prompt": prompt.text}], how)
            case ChatPrompt():
                how = replace(renderer.default_chat_tok_params, max_total_tokens=None)
                params = chat_params(prompt.options)
                params.chat_template_kwargs["add_generation_prompt"] = options.add_generation_prompt
                _, (rendered,) = await renderer.render_chat_async(
                    [messages_of(prompt)], params, how
                )
        return rendered

    def vocabulary_entries(self, ids: Sequence[int]) -> tuple[str, ...]:
        """Return each id's entry in the vocabulary."""
        return tuple(self._renderer.get_tokenizer().convert_ids_to_tokens(list(ids)))

    async def detokenize(self, ids: Sequence[int]) -> str:
        """Return the text of token ids that the vocabulary has."""
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
        num_tokens = getattr(error, "value", 0) if parameter == "input_tokens" else 0
        return Rejection(
            code=RejectCode.CONTEXT_LENGTH,
            field=prompt_field(prompt),
            message=message,
            overflow=PromptOverflow(num_prompt_tokens=num_tokens, max_model_len=max_model_len),
        )
    return Rejection(
        code=RejectCode.INVALID_ARGUMENT, field=parameter or prompt_field(prompt), message=message
    )
