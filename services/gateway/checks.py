"""What a request must satisfy beyond the range of each field, whichever edge it came by. Pure."""

from collections.abc import Mapping, Sequence

from services.gateway.errors import ContextLengthError
from services.gateway.types import (
    MAX_MESSAGES,
    MAX_RATE_TPS,
    MIN_RATE_TPS,
    ROLES,
    GenerationRequest,
)
from services.generation.conversation import ChatMessage, ConversationOptions, check_calls
from services.generation.prompts import ChatPrompt, TokenPrompt
from services.generation.retention import MAX_SESSION_ID_LENGTH
from services.kit.errors import InvalidRequestError
from services.pacing.types import ServiceLevel

MIN_SLO_S, MAX_SLO_S = 1e-3, 3_600.0
SESSION_HEADER = "x-session-id"


def session_of(stated: str, headers: Mapping[str, str]) -> str:
    """Return the session that a request is of: as the request itself states, else headers or a
    call's metadata; empty: of none. Raises InvalidRequestError for a header that is too long.
    """
    session = stated or headers.get(SESSION_HEADER, "")
    if len(session) > MAX_SESSION_ID_LENGTH:
        rule = f"must have at most {MAX_SESSION_ID_LENGTH} characters"
        raise InvalidRequestError(f"{SESSION_HEADER}: {rule}", field=SESSION_HEADER)
    return session


def check_service_level(level: ServiceLevel, fields: Mapping[str, str]) -> None:
    """Raise InvalidRequestError for a bound out of its range, or a reader slower than its TBT SLO.

    `fields` says what the client calls each bound, by its name in a `ServiceLevel`.
    """
    for name, field in fields.items():
        value = getattr(level, name)
        low, high, rule = MIN_SLO_S, MAX_SLO_S, "from 1 ms to 1 h"
        if name == "consumption_rate_tps":
            low, high = MIN_RATE_TPS, MAX_RATE_TPS
            rule = f"from {low:g} to {high:g} tokens per second"
        if value is not None and not low <= value <= high:
            raise InvalidRequestError(f"{field}: must be {rule}", field=field)
    _check_reading_rate(level, field=fields["consumption_rate_tps"])


def _check_reading_rate(level: ServiceLevel, *, field: str) -> None:
    """Tokens paced at a rate slower than the TBT SLO would break it by design."""
    if level.consumption_rate_tps is None or level.slo_tbt_s is None:
        return
    if 1.0 / level.consumption_rate_tps > level.slo_tbt_s:
        raise InvalidRequestError(
            f"{field}: 1 / rate is longer than the time-between-tokens SLO", field=field
        )


def check_context(request: GenerationRequest, max_model_len: int) -> None:
    """Raise ContextLengthError for a prompt that leaves nothing of `max_model_len` tokens for sure.

    A text's tokens are counted by the executor, which cuts `max_tokens` to what they leave.
    """
    match request.prompt:
        case TokenPrompt(token_ids) if len(token_ids) >= max_model_len:
            rule = f"has {len(token_ids)} tokens, and the model's context length is {max_model_len}"
            raise ContextLengthError(
                f"prompt: {rule}",
                field="prompt",
                num_tokens=len(token_ids),
                max_model_len=max_model_len,
            )


def check_begun(request: GenerationRequest) -> None:
    """Raise InvalidRequestError for what cannot go on from tokens that the client has."""
    begun = request.begun
    if begun is None:
        return
    if request.echo:
        raise InvalidRequestError(f"echo: not allowed together with {begun.name}", field="echo")
    if request.is_resumable:
        name = begun.name.removesuffix("resume") + "resumable"
        raise InvalidRequestError(f"{name}: not allowed together with {begun.name}", field=name)
    if request.sampling.logprobs is not None and request.num_undelivered_tokens:
        rule = f"must be {len(begun.token_ids)}, all ids given: their log-probabilities are gone"
        begun.refuse("delivered", rule)


def check_length(num_tokens: int, max_model_len: int) -> None:
    """Raise ContextLengthError for what is to be tokenised, or was, and is far too long."""
    most = 2 * max_model_len
    if num_tokens > most:
        raise ContextLengthError(f"about {num_tokens} tokens are more than {most}, twice a context")


def fits_context(request: GenerationRequest, max_model_len: int) -> bool:
    """Say whether a request may fit into `max_model_len` tokens, answer and all, as far as that is
    known here.
    """
    try:
        check_context(request, max_model_len)
    except ContextLengthError:
        return False
    return (request.sampling.max_tokens or 0) <= max_model_len


def checked_conversation(turns: Sequence[ChatMessage], options: ConversationOptions) -> ChatPrompt:
    """Make a prompt of at least one turn and checked options.

    Raises InvalidRequestError naming the turn with an unknown role or with calls that do not fit.
    """
    if not turns:
        raise InvalidRequestError("messages: at least one is required", field="messages")
    if len(turns) > MAX_MESSAGES or sum(len(turn.tool_calls) for turn in turns) > MAX_MESSAGES:
        rule = f"at most {MAX_MESSAGES}, and as many calls in them"
        raise InvalidRequestError(f"messages: {rule}", field="messages")
    for index, turn in enumerate(turns):
        name = f"messages[{index}]"
        if turn.role not in ROLES:
            rule = f"must be one of {', '.join(ROLES)}"
            raise InvalidRequestError(f"{name}.role: {rule}", field=f"{name}.role")
        check_calls(turn, path=name)
    return ChatPrompt(tuple(turns), options)
