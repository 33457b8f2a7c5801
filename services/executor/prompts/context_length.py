"""How many tokens a request may generate."""

from services.executor.types import RejectCode, RejectedError, Rejection
from services.generation.prompts import ChatPrompt, Prompt

COMPLETION_MAX_TOKENS = 16  # OpenAI's default for /v1/completions


def resolve_max_tokens(
    requested: int | None, *, prompt: Prompt, num_prompt_tokens: int, max_model_len: int
) -> int:
    """Return the output tokens that a request may generate, >= 1.

    Unset: what the context leaves for a conversation, 16 for other prompts, less if the context
    leaves less. Raises `RejectedError` with CONTEXT_LENGTH if prompt and output do not fit.
    """
    num_left = max_model_len - num_prompt_tokens
    if num_left < 1:
        is_chat = isinstance(prompt, ChatPrompt)
        _reject(
            "messages" if is_chat else "prompt",
            f"the prompt has {num_prompt_tokens} tokens and the model's context length is"
            f" {max_model_len}: no room is left for an answer",
        )
    if requested is None:
        return num_left if isinstance(prompt, ChatPrompt) else min(COMPLETION_MAX_TOKENS, num_left)
    if requested > num_left:
        _reject(
            "max_tokens",
            f"{num_prompt_tokens} prompt tokens and max_tokens={requested} exceed the model's"
            f" context length of {max_model_len}",
        )
    return requested


def _reject(field: str, message: str) -> None:
    raise RejectedError(Rejection(code=RejectCode.CONTEXT_LENGTH, field=field, message=message))
