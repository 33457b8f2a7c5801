"""What answers of the OpenAI API look like, for `/openapi.json`. Tests hold real ones to it."""

from typing import Literal, NotRequired

from typing_extensions import TypedDict  # pydantic takes no other on Python 3.11

FinishReason = Literal["stop", "length", "tool_calls"]


class LogprobEntry(TypedDict):
    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprobs(LogprobEntry):
    top_logprobs: list[LogprobEntry]


class ChatLogprobs(TypedDict):
    content: list[ChatTokenLogprobs]
    refusal: None


class CompletionLogprobs(TypedDict):
    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class PromptTokensDetails(TypedDict):
    cached_tokens: int


class CompletionTokensDetails(TypedDict):
    reasoning_tokens: int


class Usage(TypedDict):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: NotRequired[PromptTokensDetails]
    completion_tokens_details: NotRequired[CompletionTokensDetails]


class Moves(TypedDict):
    """How often an answer lost its executor and went on, and what it is for all that."""

    moves: int
    continued: Literal["identical", "valid"]


class FunctionCall(TypedDict):
    name: str
    arguments: str


class MadeCall(TypedDict):
    id: str
    type: Literal["function"]
    function: FunctionCall


class AnsweringMessage(TypedDict):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning: NotRequired[str]
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[MadeCall]]


class ChatChoice(TypedDict):
    index: int
    message: AnsweringMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason
    token_ids: NotRequired[list[int]]


class ChatCompletion(TypedDict):
    """Answers to a conversation."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    evenflow: NotRequired[Moves]
    prompt_token_ids: NotRequired[list[int]]


class FunctionCallPart(TypedDict):
    name: NotRequired[str]
    arguments: str


class CallPart(TypedDict):
    index: int
    id: NotRequired[str]
    type: NotRequired[Literal["function"]]
    function: FunctionCallPart


class MessageDelta(TypedDict):
    role: NotRequired[Literal["assistant"]]
    content: NotRequired[str]
    reasoning: NotRequired[str]
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[CallPart]]


class ChatChunkChoice(TypedDict):
    index: int
    delta: MessageDelta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None
    token_ids: NotRequired[list[int]]


class ChatCompletionChunk(TypedDict):
    """An event of a streamed chat completion."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: NotRequired[Usage | None]
    evenflow: NotRequired[Moves]
    prompt_token_ids: NotRequired[list[int]]


class CompletionChoice(TypedDict):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason
    token_ids: NotRequired[list[int]]
    prompt_token_ids: NotRequired[list[int]]


class Completion(TypedDict):
    """Answers to prompts."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage
    evenflow: NotRequired[Moves]


class CompletionChunkChoice(TypedDict):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None
    token_ids: NotRequired[list[int]]
    prompt_token_ids: NotRequired[list[int]]


class CompletionChunk(TypedDict):
    """An event of a streamed completion."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChunkChoice]
    usage: NotRequired[Usage | None]
    evenflow: NotRequired[Moves]


class Model(TypedDict):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int


class ModelList(TypedDict):
    """The models of the connected executors."""

    object: Literal["list"]
    data: list[Model]


class Tokens(TypedDict):
    """A prompt's tokens."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizedText(TypedDict):
    """The text of tokens."""

    prompt: str


class Fault(TypedDict):
    message: str
    type: str
    param: str | None
    code: str | None


class FaultAnswer(TypedDict):
    """Why a call failed."""

    error: Fault


class Status(TypedDict):
    status: Literal["ok", "ready"]


class Index(TypedDict):
    """What answers here, and the paths to begin with."""

    name: str
    models: str
    openapi: str
    docs: str


class Version(TypedDict):
    version: str


class Pace(TypedDict):
    """What a running stream is promised."""

    id: str
    slo_tpot_ms: float | None
    slo_tbt_ms: float | None
    consumption_rate_tps: float | None


class TrackedRequest(TypedDict):
    """A live request, as executor and gateway last reported it to the tracker."""

    request_id: str
    gateway_id: str
    state: str
    num_prompt_tokens: int
    num_generated_tokens: int
    num_delivered_tokens: int
    num_deposited_tokens: int


class ExecutorLoad(TypedDict):
    """What the requests of all gateways ask of an executor."""

    num_running_reqs: int
    num_newcomers: int
    num_newcomer_tokens: int
    prefill_tps: float
    kv_unavailable_frac: float
    deposit_s: float
    reading_load_frac: float


class Executor(TypedDict):
    """An executor that holds a lease, and the requests that it has."""

    executor_id: str
    address: str
    model: str
    lease_ttl_s: float
    load: ExecutorLoad
    requests: list[TrackedRequest]


class Fleet(TypedDict):
    """All executors, by id."""

    executors: list[Executor]


class Load(TypedDict):
    """Live requests."""

    server_load: int
