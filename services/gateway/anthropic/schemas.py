"""What answers of the Messages API look like, for `/openapi.json`. Tests hold real ones to it."""

from typing import Any, Literal, NotRequired

from typing_extensions import TypedDict  # pydantic takes no other on Python 3.11

from services.gateway.openai.schemas import Extension

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class AnsweringText(TypedDict):
    type: Literal["text"]
    text: str


class AnsweringThoughts(TypedDict):
    type: Literal["thinking"]
    thinking: str
    signature: str


class AnsweringToolUse(TypedDict):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class OutputTokensDetails(TypedDict):
    thinking_tokens: int


class CacheCreation(TypedDict):
    """Tokens of the prompt that are kept from now on, by how long."""

    ephemeral_5m_input_tokens: int
    ephemeral_1h_input_tokens: int


class MessageUsage(TypedDict):
    input_tokens: int
    cache_creation_input_tokens: NotRequired[int]
    cache_creation: NotRequired[CacheCreation]
    cache_read_input_tokens: NotRequired[int]
    output_tokens: int
    output_tokens_details: NotRequired[OutputTokensDetails]


class AnsweredMessage(TypedDict):
    """The assistant's turn."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[AnsweringText | AnsweringThoughts | AnsweringToolUse]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessageUsage
    evenflow: NotRequired[Extension]


class TokenCount(TypedDict):
    """How many tokens a conversation has."""

    input_tokens: int


class MessageFault(TypedDict):
    type: str
    message: str


class MessageFaultAnswer(TypedDict):
    """Why a call failed."""

    type: Literal["error"]
    error: MessageFault
    request_id: str
