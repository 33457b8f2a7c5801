"""How many tokens a request may generate."""

from services.executor.types import PromptOverflow, RejectCode, RejectedError, Rejection
from services.generation.prompts import ChatPrompt, Prompt

COMPLETION_MAX_TOKENS = 16  # OpenAI's default for /v1/completions
MAX_PROMPT_TOKENS_OF_ALL_ANSWERS = 1 << 20  # each answer's prompt goes to the engine


def check_num_answers(num_answers: int, num_prompt_tokens: int) -> None:
    """Raise `RejectedError` for more answers than a prompt of so many tokens may have."""
    most = max(1, MAX_PROMPT_TOKENS_OF_ALL_ANSWERS // num_prompt_tokens)
    if num_answers > most:
        message = f"n: at most {most} answers to a prompt of {num_prompt_tokens} tokens"
        code = RejectCode.INVALID_ARGUMENT
        raise RejectedError(Rejection(code=code, field="n", message=message))


def resolve_max_tokens(
    requested: int | None, *, prompt: Prompt, num_prompt_tokens: int, max_model_len: int
) -> int:
    """Return the output tokens that a request may generate, >= 1.

    Unset: what the context leaves for a conversation, 16 for other prompts. Never more than the
    context leaves, as in vLLM's server. Raises `RejectedError` with CONTEXT_LENGTH if it leaves
    nothing.
    """
    num_left = max_model_len - num_prompt_tokens
    if num_left < 1:
        is_chat = isinstance(prompt, ChatPrompt)
        message = (
            f"the prompt has {num_prompt_tokens} tokens and the model's context length is"
            f" {max_model_len}: no room is left for an answer"
        )
        field = "messages" if is_chat else "prompt"
        raise RejectedError(
            Rejection(
                code=RejectCode.CONTEXT_LENGTH,
                field=field,
                message=message,
                overflow=PromptOverflow(
                    num_prompt_tokens=num_prompt_tokens, max_model_len=max_model_len
                ),
            )
        )
    if requested is None:
        requested = num_left if isinstance(prompt, ChatPrompt) else COMPLETION_MAX_TOKENS
    return min(requested, num_left)
