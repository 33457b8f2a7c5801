"""What answers of the Responses API look like, for `/openapi.json`. Tests hold real ones to it."""

from typing import Any, Literal, NotRequired

from typing_extensions import TypedDict  # pydantic takes no other on Python 3.11

from services.gateway.openai.schemas import ChatTokenLogprobs, Extension

ItemStatus = Literal["completed", "incomplete"]


class OutputText(TypedDict):
    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: list[ChatTokenLogprobs]


class OutputMessage(TypedDict):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    status: ItemStatus
    content: list[OutputText]


class ReasoningText(TypedDict):
    type: Literal["reasoning_text"]
    text: str


class OutputReasoning(TypedDict):
    id: str
    type: Literal["reasoning"]
    status: ItemStatus
    summary: list[Any]
    content: list[ReasoningText]


class OutputCall(TypedDict):
    id: str
    type: Literal["function_call"]
    status: ItemStatus
    call_id: str
    name: str
    arguments: str


class InputTokensDetails(TypedDict):
    cached_tokens: int
    cache_write_tokens: int


class ReasoningTokensDetails(TypedDict):
    reasoning_tokens: int


class ResponseUsage(TypedDict):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: ReasoningTokensDetails
    total_tokens: int


class IncompleteDetails(TypedDict):
    reason: Literal["max_output_tokens"]


class AnsweredResponse(TypedDict):
    """What was put out, and what was asked for."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["in_progress", "completed", "incomplete"]
    background: Literal[False]
    error: None
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    model: str
    parallel_tool_calls: bool
    reasoning: dict[str, Any]
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, str]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    output: list[OutputMessage | OutputReasoning | OutputCall]
    previous_response_id: None
    service_tier: Literal["default"]
    store: Literal[False]
    truncation: Literal["disabled"]
    usage: ResponseUsage | None
    evenflow: NotRequired[Extension]
