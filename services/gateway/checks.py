"""What a request must satisfy beyond the range of each field, whichever edge it came by. Pure."""

from collections.abc import Sequence

from services.gateway.errors import ContextLengthError
from services.gateway.types import ROLES, GenerationRequest
from services.generation.conversation import ChatMessage, ConversationOptions, check_calls
from services.generation.prompts import ChatPrompt, TokenPrompt
from services.kit.errors import InvalidRequestError
from services.pacing.types import ServiceLevel


def check_reading_rate(level: ServiceLevel, *, field: str) -> None:
    """Raise InvalidRequestError naming `field` if a reader would read slower than its TBT SLO.

    Tokens paced at that rate would break the SLO by design.
    """
    if level.consumption_rate_tps is None or level.slo_tbt_s is None:
        return
    if 1.0 / level.consumption_rate_tps > level.slo_tbt_s:
        raise InvalidRequestError(
            f"{field}: 1 / rate is longer than the time-between-tokens SLO", field=field
        )


def check_context(request: GenerationRequest, max_model_len: int) -> None:
    """Raise ContextLengthError naming what does not fit into `max_model_len` tokens for sure.

    A text's tokens are counted by the executor.
    """
    match request.prompt:
        case TokenPrompt(token_ids) if len(token_ids) >= max_model_len:
            rule = f"has {len(token_ids)} tokens, and the model's context length is {max_model_len}"
            raise ContextLengthError(f"prompt: {rule}", field="prompt")
    max_tokens = request.sampling.max_tokens
    if max_tokens is not None and max_tokens > max_model_len:  # as vLLM's server has it
        rule = f"must be at most {max_model_len}, the model's context length"
        raise ContextLengthError(f"max_tokens: {rule}", field="max_tokens")


def checked_conversation(turns: Sequence[ChatMessage], options: ConversationOptions) -> ChatPrompt:
    """Make a prompt of at least one turn and checked options.

    Raises InvalidRequestError naming the turn with an unknown role or with calls that do not fit.
    """
    if not turns:
        raise InvalidRequestError("messages: at least one is required", field="messages")
    for index, turn in enumerate(turns):
        name = f"messages[{index}]"
        if turn.role not in ROLES:
            rule = f"must be one of {', '.join(ROLES)}"
            raise InvalidRequestError(f"{name}.role: {rule}", field=f"{name}.role")
        check_calls(turn, path=name)
    return ChatPrompt(tuple(turns), options)
