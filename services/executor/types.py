"""What the executor's parts say to each other."""

from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Any, TypeAlias

from services.generation.conversation import ToolCall, ToolCallPart
from services.generation.finish import FinishReason
from services.generation.logprobs import TokenLogprobs
from services.generation.prompts import Prompt
from services.generation.retention import Retained, RetentionHint
from services.generation.sampling_params import DEFAULT_SAMPLING, SamplingParams
from services.kit.telemetry.trace_context import TraceContext
from services.pacing.cause import Delay
from services.pacing.types import NO_SERVICE_LEVEL, ServiceLevel
from services.placement.ranges import (
    MAX_INT32,
    MAX_SECONDS,
    AtMost,
    Count,
    PositiveInt,
    Seconds,
    Within,
)
from services.placement.run.reader_capacity import ReaderCapacity

MAX_REQUEST_ID_LENGTH = 128

LOWEST_PRIORITY = MAX_INT32  # of work that no client waits for

MAX_INSTANT_S = 1e11  # since the epoch; calendars know it

AnswerId: TypeAlias = Annotated[str, AtMost(MAX_REQUEST_ID_LENGTH)]
OutputIds: TypeAlias = Annotated[tuple[int, ...], Within(0, MAX_INT32)]
Age: TypeAlias = Annotated[float, Within(-MAX_SECONDS, MAX_SECONDS)]  # seconds; < 0: to come
Instant: TypeAlias = Annotated[float, Within(0.0, MAX_INSTANT_S)]  # seconds since the epoch


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Why the engine gave up on a request."""

    message: str  # one sentence for the client
    retryable: bool  # another executor may succeed


Ending: TypeAlias = FinishReason | Failure


@dataclass(frozen=True, slots=True)
class Said:
    """What a step of an answer says."""

    text: str = ""
    reasoning: str = ""  # not part of `text`
    tool_calls: tuple[ToolCallPart, ...] = ()  # not part of `text`


@dataclass(frozen=True, slots=True)
class Token:
    """One output token."""

    id: int
    text: str  # what it completes; empty while a character or a stop string is incomplete
    logprobs: TokenLogprobs | None = None
    reasoning: str = ""  # as far as this token completes it
    tool_calls: tuple[ToolCallPart, ...] = ()  # as far as this token completes them
    delay: Delay | None = None  # None: the engine made it in time
    is_read: bool = True  # it takes a turn of its reader's pace: no thought, call or form


@dataclass(frozen=True, slots=True)
class Delta:
    """What one engine step added to one request."""

    tokens: tuple[Token, ...]
    ending: Ending | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()  # one per prompt token, with the first token
    num_reasoning_tokens: int | None = None  # of the whole answer, with its ending, if parsed
    num_cached_tokens: int = 0  # of the prompt, with the ending
    stop_string: str = ""  # that the answer came to, with the ending
    retained: Retained | None = None  # of its KV, as far as this step tells
    tool_calls: tuple[ToolCall, ...] = ()  # of an answer that ends by itself, with the ending


@dataclass(frozen=True, slots=True, kw_only=True)
class Resume:
    """An answer that was begun elsewhere. Instants are ages: clocks differ."""

    output_ids: OutputIds  # its tokens so far, at least one
    max_tokens: Count  # of the whole answer, at least as many as `output_ids`; 0: as if it began
    num_delivered_tokens: Count  # of `output_ids`, that its reader has
    last_due_age_s: Age  # since the newest of them was due at the reader
    arrived_age_s: Seconds  # since the request arrived at its gateway
    num_cached_tokens: Count  # of the prompt, when it was first computed
    prompt_digest: int  # 0: any prompt will do
    num_retold_tokens: Count = 0  # the last of `output_ids`, that the gateway knows by ids alone


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """By what a request is told apart in the account of KV."""

    account: str = ""  # the API key's name; empty without keys
    session_id: str = ""  # as its client names it; empty: of none
    request_class: str = ""  # a name; empty: not known


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """One request as a gateway hands it over."""

    request_id: AnswerId  # unique among the live requests of its stream
    generation: PositiveInt  # how often it was routed
    model: str
    prompt: Prompt
    sampling: SamplingParams = DEFAULT_SAMPLING
    service_level: ServiceLevel = NO_SERVICE_LEVEL
    echo: bool = False  # give the prompt back
    returns_prompt_ids: bool = False  # give the prompt's ids back
    priority: int = 0  # lower is served first
    trace: TraceContext | None = None  # that it belongs to
    cache_salt: str = ""  # only requests with the same one share cached prefixes
    fairness_id: str = ""  # among which the KV pool is shared
    fair_key: str = ""  # the client among which preparation is shared; empty: not known
    resume: Resume | None = None  # what its answer has already
    rendered_at_s: Instant = 0.0  # that a chat template takes for now; 0: it has a clock
    retention: RetentionHint | None = None  # what is to be kept of its KV
    holder: Holder | None = None  # None: not known


@dataclass(frozen=True, slots=True, kw_only=True)
class FurtherAnswer:
    """What a further answer to a submission's prompt has of its own."""

    request_id: AnswerId
    seed: int | None = None
    trace: TraceContext | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedRequest:
    """A request that was rendered and checked, and that the engine does not know yet."""

    engine_id: str  # id inside the engine: unique, whatever gateways choose
    num_prompt_tokens: int
    max_tokens: int = 0  # that the answer may have, >= 1; 0: not known
    prompt_digest: int = 0  # of the prompt's ids, > 0; 0: not known
    text: str | None = None  # the prompt, where it was rendered from text or is echoed
    first_token: str = ""  # the text of the prompt's first token, where the prompt is echoed
    prompt_ids: tuple[int, ...] = ()  # where they are to be given back
    core_request: Any = None  # the engine's own form of it
    parser: Any = None  # an `AnswerParser`, where the answer is parsed
    reads: bool = True  # the tokens to come are read, as far as is known
    resume: Resume | None = None
    replayed: Any = None  # a `Replayed`, of a resumed answer
    retold: tuple[Token, ...] = ()  # tokens that it has, to be told before all else
    asks_to_keep: bool = False  # its KV, or a part of it


class RejectCode(Enum):
    """Why a request was refused."""

    INVALID_ARGUMENT = "invalid_argument"
    CONTEXT_LENGTH = "context_length"
    UNKNOWN_MODEL = "unknown_model"
    DUPLICATE = "duplicate"
    OVERLOADED = "overloaded"
    UNAVAILABLE = "unavailable"
    INTERNAL = "internal"
    BUSY = "busy"  # with the forms of other answers
    CANNOT_RESUME = "cannot_resume"  # here: it is another prompt, or form, or there is less room


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptOverflow:
    """A prompt that leaves nothing of the context."""

    num_prompt_tokens: int  # 0: not counted to its end
    max_model_len: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejection:
    """Why a request left no trace."""

    code: RejectCode
    message: str  # one sentence for the client
    field: str = ""  # request field at fault, as the OpenAI API names it
    overflow: PromptOverflow | None = None  # with CONTEXT_LENGTH


class UnsupportedError(ValueError):
    """What is asked of an engine does not work, or not together; says it in a sentence."""


class RejectedError(Exception):
    """A request cannot be served; nothing of it was kept."""

    def __init__(self, rejection: Rejection) -> None:
        super().__init__(rejection.message)
        self.rejection = rejection


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """A low-rank adapter of the model."""

    model: str  # id that requests name
    root: str  # directory or hub id
    fingerprint: str = ""  # like the model's; empty: its answers do not move


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """The loaded model and how it is laid out."""

    model: str  # id that requests name
    max_model_len: int  # prompt and output tokens of one request
    max_num_seqs: int  # requests in one step
    max_num_batched_tokens: int  # tokens in one step
    num_layers: int  # over all pipeline stages
    num_kv_heads: int  # over all tensor-parallel ranks; 1 with MLA, whose latent each rank has
    head_dim: int  # elements
    block_size: int  # tokens
    num_gpu_blocks: int  # one holds block_size tokens of layers_per_group layers on each stage
    dtype: str
    tensor_parallel_size: int
    pipeline_parallel_size: int
    layers_per_group: int  # of a pipeline stage; all of them without layer-wise KV
    default_sampling: SamplingParams = DEFAULT_SAMPLING  # what the model's makers advise
    caches_prefixes: bool = False  # requests begin with the KV that earlier ones left
    root: str = ""  # directory or hub id that it was loaded from
    adapters: tuple[Adapter, ...] = ()
    template_variables: tuple[str, ...] = ()  # that the chat template reads, sorted; empty: unknown
    kv: "KVFacts | None" = None
    fingerprint: str = ""  # equal where an answer can go on; empty: nowhere
    numerics: str = ""  # what rounds, in words
    is_repeatable: bool = False  # tokens depend neither on the batch nor on what began them
    makes_drafts: bool = False  # by speculative decoding
    max_loras: int = 0  # adapters in one step; 0: there are none


@dataclass(frozen=True, slots=True, kw_only=True)
class KVFacts:
    """How KV is kept, and what was measured of it at the start; 0: not measured, or none."""

    num_pool_tokens: int  # of all layers
    num_host_tokens: int = 0
    token_bytes: int = 0  # of all layers and ranks
    link_bytes_per_s: float = 0.0  # host to pool, all ranks
    step_s: float = 0.0  # of one token without context
    link_ratio: float = 0.0  # lambda at least
    is_layerwise: bool
    policy: str
    run_policy: str
    placement_policy: str
    plans_with_deposit: bool
    readers: ReaderCapacity | None = None  # None: requests do not take turns, or nothing is known
    layers: str = ""  # by kind, and how many may leave the pool, in words; empty: not known


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLoad:
    """Load of the engine at one moment."""

    num_running_reqs: int = 0
    num_waiting_reqs: int = 0  # accepted, not yet running
    kv_cache_usage_frac: float = 0.0  # [0, 1]
    output_tps: float = 0.0  # tokens per second that its steps make; 0: not measured


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldRequests:
    """Ids of the requests that the engine's two halves have, by the engine's names."""

    answered: frozenset[str] = frozenset()  # their output is awaited in the front's process
    computed: frozenset[str] = frozenset()  # the scheduler has them, running or waiting
