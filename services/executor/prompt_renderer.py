"""Text and conversations to token ids, by vLLM's own renderer, off the event loop."""

from typing import Any

from vllm.exceptions import VLLMClientError, VLLMValidationError
from vllm.renderers import BaseRenderer
from vllm.renderers.params import ChatParams

from services.executor.types import (
    ChatInput,
    Input,
    RejectCode,
    RejectedError,
    Rejection,
    TextInput,
    TokenInput,
)

# Names that vLLM gives to the prompt when it does not fit the context.
CONTEXT_PARAMETERS = ("input_tokens", "input_text")
CHAT_PARAMS = ChatParams(chat_template_kwargs={"add_generation_prompt": True})


def prompt_field(prompt: Input) -> str:
    """Return the field of the OpenAI API that `prompt` came in."""
    return "messages" if isinstance(prompt, ChatInput) else "prompt"


class PromptRenderer:
    """Renders one prompt at a time; prompts of other requests render meanwhile."""

    def __init__(self, renderer: BaseRenderer) -> None:
        self._renderer = renderer

    async def render(self, prompt: Input) -> Any:
        """Return vLLM's `EngineInput`, tokenised. Raises `RejectedError`."""
        try:
            return await self._render(prompt)
        except (VLLMClientError, ValueError, TypeError) as error:
            raise RejectedError(rejection_of(error, prompt)) from error

    async def _render(self, prompt: Input) -> Any:
        match prompt:
            case TextInput():
                (rendered,) = await self._renderer.render_cmpl_async([{"prompt": prompt.text}])
            case TokenInput():
                ids = {"prompt_token_ids": list(prompt.ids)}
                (rendered,) = await self._renderer.render_cmpl_async([ids])
            case ChatInput():
                turns = [{"role": t.role, "content": t.content} for t in prompt.turns]
                _, (rendered,) = await self._renderer.render_chat_async([turns], CHAT_PARAMS)
        return rendered


def rejection_of(error: Exception, prompt: Input) -> Rejection:
    """Return what a client is told about vLLM's complaint; faults without a name are the prompt's.

    vLLM's own text says which of its parameters failed; that part is left out.
    """
    parameter = getattr(error, "parameter", None)
    message = error.args[0] if isinstance(error, VLLMValidationError) else str(error)
    if parameter in CONTEXT_PARAMETERS:
        return Rejection(
            code=RejectCode.CONTEXT_LENGTH, field=prompt_field(prompt), message=message
        )
    return Rejection(
        code=RejectCode.INVALID_ARGUMENT, field=parameter or prompt_field(prompt), message=message
    )
