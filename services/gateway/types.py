"""One generation request, from the edge's point of view."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NewType, Protocol, TypeAlias

from services.kit.errors import ServiceError
from services.pacing.types import NO_SERVICE_LEVEL, ServiceLevel

RequestId = NewType("RequestId", str)

# Limits of the sampling parameters, shared by the HTTP and the gRPC edge.
MAX_TEMPERATURE = 2.0
MAX_STOP_STRINGS = 4
MAX_TOKENS = 2**31 - 1
MAX_TOKEN_ID = 2**31 - 1
ROLES = ("system", "developer", "user", "assistant")
ROLE_THAT_MAY_BE_SILENT = "assistant"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatMessage:
    """One turn of a conversation."""

    role: str  # one of ROLES
    content: str  # empty only for the assistant


@dataclass(frozen=True, slots=True)
class TextPrompt:
    text: str  # tokenised by the executor


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    token_ids: tuple[int, ...]  # at least one, each in [0, MAX_TOKEN_ID]


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    messages: tuple[ChatMessage, ...]  # oldest first, at least one


Prompt: TypeAlias = TextPrompt | TokenPrompt | ChatPrompt


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are drawn; None leaves the choice to the executor (OpenAI's default)."""

    max_tokens: int | None = None  # output tokens at most, >= 1
    temperature: float | None = None  # in [0, MAX_TEMPERATURE]
    top_p: float | None = None  # in (0, 1]
    stop: tuple[str, ...] = ()  # at most MAX_STOP_STRINGS, none empty
    seed: int | None = None  # signed 64 bit


class Delivery(Enum):
    """How tokens go to the client."""

    STREAMED = "streamed"  # each when it is due
    WHOLE = "whole"  # in one response, never paced


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """What a client asks for, checked."""

    request_id: RequestId
    model: str
    prompt: Prompt
    sampling: SamplingParams = SamplingParams()
    service_level: ServiceLevel = NO_SERVICE_LEVEL
    delivery: Delivery = Delivery.STREAMED


@dataclass(frozen=True, slots=True)
class Token:
    """One output token."""

    index: int  # in the output, from 0
    id: int  # in the model's vocabulary
    text: str  # that it completes; may be empty


class FinishReason(Enum):
    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    """How a request ended."""

    reason: FinishReason
    num_prompt_tokens: int
    num_output_tokens: int  # generated, whether or not they were delivered


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """What one executor serves."""

    executor_id: str
    model: str
    max_model_len: int  # prompt and output tokens of one request at most


class RequestSink(Protocol):
    """Takes what an executor says about one request: first `accepted` or `rejected`, at last
    `rejected`, `ended` or `failed`, nothing after that. Calls neither block nor raise.
    """

    def accepted(self, num_prompt_tokens: int) -> None: ...

    def rejected(self, error: ServiceError) -> None: ...

    def extended(self, tokens: Sequence[Token], generated_s: float) -> None:
        """Take the next tokens, none missing, none twice, and when they came in."""

    def ended(self, reason: FinishReason) -> None: ...

    def failed(self, error: ServiceError) -> None: ...
