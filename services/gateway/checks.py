"""What a request must satisfy beyond the range of each field, whichever edge it came by. Pure."""

from services.gateway.types import ROLE_THAT_MAY_BE_SILENT, ROLES, ChatMessage, ChatPrompt
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


def checked_conversation(turns: list[tuple[str, str]]) -> ChatPrompt:
    """Make a prompt of (role, content) turns, at least one.

    Raises InvalidRequestError naming the turn with an unknown role, or with no content.
    """
    if not turns:
        raise InvalidRequestError("messages: at least one is required", field="messages")
    for index, (role, content) in enumerate(turns):
        name = f"messages[{index}]"
        if role not in ROLES:
            rule = f"must be one of {', '.join(ROLES)}"
            raise InvalidRequestError(f"{name}.role: {rule}", field=f"{name}.role")
        if not content and role != ROLE_THAT_MAY_BE_SILENT:
            raise InvalidRequestError(f"{name}.content: must not be empty", field=f"{name}.content")
    return ChatPrompt(tuple(ChatMessage(role=role, content=content) for role, content in turns))
