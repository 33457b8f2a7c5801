"""One generation request, from the edge's point of view."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import NewType, NoReturn, Protocol

from msgspec import Struct

from services.generation.conversation import ToolCallPart
from services.generation.finish import FinishReason
from services.generation.logprobs import EchoedPrompt, TokenLogprobs
from services.generation.prompts import ChatPrompt, Prompt, TextPrompt, TokenPrompt
from services.generation.retention import Retained, RetentionHint
from services.generation.sampling_params import DEFAULT_SAMPLING, SamplingParams
from services.kit.errors import InvalidRequestError, ServiceError
from services.pacing.cause import Delay
from services.pacing.types import NO_SERVICE_LEVEL, ServiceLevel

RequestId = NewType("RequestId", str)

MIN_RATE_TPS, MAX_RATE_TPS = 0.5, 1_000.0  # of readers
MAX_ANSWERS = 128  # of one HTTP request
MAX_MESSAGES = 4_096  # of a conversation, and calls in all of them
CHARACTERS_PER_TOKEN = 4  # of common languages and vocabularies
ROLES = ("system", "developer", "user", "assistant", "tool")


class Delivery(Enum):
    """How tokens go to the client."""

    STREAMED = "streamed"  # each when it is due
    WHOLE = "whole"  # in one response, never paced


def estimated_num_tokens(prompt: Prompt) -> int:
    """Return about how many tokens a prompt has, >= 1."""
    match prompt:
        case TokenPrompt(token_ids):
            return len(token_ids)
        case TextPrompt(text):
            num_characters = len(text)
        case ChatPrompt(messages):
            num_characters = sum(len(message.content) for message in messages)
    return max(1, num_characters // CHARACTERS_PER_TOKEN)


@dataclass(frozen=True, slots=True, kw_only=True)
class Begun:
    """An answer that the client has a beginning of, and goes on with here."""

    token_ids: Sequence[int]  # so far, at least one
    num_delivered: int  # of these, that are not told again, >= 0
    name: str  # what the client calls this

    def __post_init__(self) -> None:
        """Raise InvalidRequestError, naming the field, unless there are as many ids as it says."""
        if not self.token_ids or min(self.token_ids) < 0:
            self.refuse("token_ids", "must be ids of tokens, at least one")
        if not 0 <= self.num_delivered <= len(self.token_ids):
            self.refuse("delivered", f"must be from 0 to {len(self.token_ids)}, the ids given")

    def refuse(self, member: str, rule: str) -> NoReturn:
        """Raise InvalidRequestError naming a member of this."""
        field = f"{self.name}.{member}"
        raise InvalidRequestError(f"{field}: {rule}", field=field)


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """What a client asks for, checked."""

    request_id: RequestId
    model: str
    prompt: Prompt
    sampling: SamplingParams = DEFAULT_SAMPLING
    service_level: ServiceLevel = NO_SERVICE_LEVEL
    delivery: Delivery = Delivery.STREAMED
    echo: bool = False  # give the prompt back
    returns_prompt_ids: bool = False  # give the prompt's ids back
    priority: int | None = None  # lower is more urgent; None: the key's default, else 0
    priority_name: str = "priority"  # what the client calls that
    tenant: str = ""  # whose it is; tenants share no cached prefixes of prompts
    cache_salt: str = ""  # nor do a tenant's requests with different ones
    session_id: str = ""  # its client's name for a conversation; empty: its text tells which
    fairness_id: str = ""  # among which an executor's pool is shared; empty: not stated
    fair_key: str = ""  # the client among which preparation is shared; empty: not known
    is_resumable: bool = False  # its reader may leave and come back
    is_background: bool = False  # and need not, for it to come to its end
    rendered_at_s: float = 0.0  # what a chat template's clock reads, since the epoch; 0: now
    parent_id: RequestId | None = None  # the client's name for it, where it is one of several
    begun: Begun | None = None  # what the client has of the answer
    retention: RetentionHint | None = None  # what is to be kept of its KV

    @property
    def shared_cache(self) -> str:
        """Return what requests have in common that share cached prefixes; empty: with all others
        of which nothing is known. No tenant's name and no salt has a line end.
        """
        return f"{self.tenant}\n{self.cache_salt}" if self.cache_salt else self.tenant

    @property
    def session_name(self) -> str:
        """Return the session that it is of, as its client names it; empty: of none."""
        return self.session_id or (self.retention.session_id if self.retention else "")

    @property
    def num_begun_tokens(self) -> int:
        """Return how many tokens the answer has already, which are computed as a prompt's are."""
        return 0 if self.begun is None else len(self.begun.token_ids)

    @property
    def num_delivered_tokens(self) -> int:
        """Return how many of these the client has got."""
        return 0 if self.begun is None else self.begun.num_delivered

    @property
    def num_undelivered_tokens(self) -> int:
        """Return how many of these are to be told."""
        return self.num_begun_tokens - self.num_delivered_tokens

    @property
    def is_for_reading(self) -> bool:
        """Say whether a person may read the answer while it comes: a conversation's, streamed,
        without tools and without a form.
        """
        is_chat = isinstance(self.prompt, ChatPrompt) and not self.prompt.options.tools
        is_streamed = self.delivery is Delivery.STREAMED
        return is_chat and is_streamed and self.sampling.structured_outputs is None

    @property
    def wants_its_prompt(self) -> bool:
        """Say whether the prompt, or its ids, are to be given back."""
        return self.echo or self.returns_prompt_ids

    @property
    def ids(self) -> tuple[RequestId | None, ...]:
        """Return what a client may call it."""
        return (self.request_id, self.parent_id)


class Continued(Enum):
    """What an answer is that went on elsewhere."""

    IDENTICAL = "identical"  # token for token what it would have been
    VALID = "valid"  # as good as any other of the same model to the same request


class Token(Struct, frozen=True, gc=False):
    """One output token. `gc=False`, as for all objects made for each token: no cycle can lead
    through it, and a collection, in which no token goes out, need not walk those that wait.
    """

    index: int  # in the output, from 0
    id: int  # in the model's vocabulary
    text: str  # that it completes; may be empty
    logprobs: TokenLogprobs | None = None
    reasoning: str = ""  # what the model thinks, as far as this token completes it
    tool_calls: tuple[ToolCallPart, ...] = ()  # as far as this token completes them
    delay: Delay | None = None  # None: the engine made it in time
    is_read: bool = True  # it takes a turn of its reader's pace; False: a thought, a call, a form


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    """How a request ended."""

    reason: FinishReason
    num_prompt_tokens: int
    num_output_tokens: int  # generated, whether or not they were delivered
    num_reasoning_tokens: int | None = None  # of these; None: nothing tells reasoning from text
    num_cached_tokens: int = 0  # of the prompt; not computed again
    stop_string: str = ""  # that it came to; empty: none
    clipped_max_tokens: int | None = None  # all that the context left; None: as asked for
    moves: int = 0  # to another executor, or to its own after that was lost
    continued: Continued = Continued.IDENTICAL  # through all of them
    retained: Retained | None = None  # of its KV; None: nothing was asked for


@dataclass(frozen=True, slots=True, kw_only=True)
class Resume:
    """An answer that was begun elsewhere, as it is handed over. Ages are in seconds."""

    output_ids: Sequence[int]  # so far, at least one
    max_tokens: int  # that the whole answer may have; 0: what the request says
    num_delivered_tokens: int  # that its reader has
    last_due_age_s: float  # since the newest token was due at the reader; < 0: it is due later
    arrived_age_s: float  # since the request came in
    prompt_digest: int  # of the prompt's tokens; 0: not known
    num_cached_tokens: int = 0  # of the prompt, where it was begun; told with the ending alone
    num_retold_tokens: int = 0  # the last of `output_ids`, of which nothing but the ids is known

    @property
    def num_known_tokens(self) -> int:
        """Return how many of `output_ids` the gateway has whole."""
        return len(self.output_ids) - self.num_retold_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """A low-rank adapter of a model."""

    model: str
    root: str = ""  # directory or hub id that it was loaded from; empty: not known
    fingerprint: str = ""  # of what must be equal for an answer to move; empty: none moves


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """What one executor serves."""

    executor_id: str
    model: str
    max_model_len: int  # prompt and output tokens of one request at most
    default_sampling: SamplingParams = DEFAULT_SAMPLING  # where a client names nothing
    caches_prefixes: bool = False  # requests begin with the KV that earlier ones left
    root: str = ""  # directory or hub id that it was loaded from; empty: not known
    parent: str | None = None  # the model that it adapts; None: it is no adapter
    adapters: tuple[Adapter, ...] = ()
    template_variables: frozenset[str] = frozenset()  # that its chat template reads; empty: unknown
    fingerprint: str = ""  # of what must be equal for an answer to move; empty: none moves
    numerics: str = ""  # of what rounds
    is_repeatable: bool = False  # with equal numerics tokens do not depend on what is beside them
    makes_drafts: bool = False  # on which draws with a seed depend
    epoch: int = 0  # number of its executor's start, greater for later ones; 0: not known
    block_size: int = 0  # tokens; of this and what follows 0: not known
    num_gpu_blocks: int = 0  # each of `layers_per_group` layers on each stage
    layers_per_group: int = 0
    pipeline_parallel_size: int = 0
    num_layers: int = 0
    max_loras: int = 0  # adapters in one step

    @property
    def num_pool_blocks(self) -> int:
        """Return how many blocks of all layers the KV pool holds."""
        if not (self.layers_per_group and self.num_layers):
            return self.num_gpu_blocks
        num_layers = self.layers_per_group * self.pipeline_parallel_size
        return self.num_gpu_blocks * num_layers // self.num_layers

    def each(self) -> list["ServedModel"]:
        """Return it and its adapters, which are models of their own to clients."""
        adapted = [
            replace(
                self,
                model=one.model,
                root=one.root,
                parent=self.model,
                adapters=(),
                fingerprint=self._fingerprint_with(one),
            )
            for one in self.adapters
        ]
        return [self, *adapted]

    def _fingerprint_with(self, adapter: Adapter) -> str:
        both = (self.fingerprint, adapter.fingerprint)
        return "/".join(both) if all(both) else ""


class RequestSink(Protocol):
    """Takes what an executor says about one request: first `accepted` or `rejected`, at last
    `rejected`, `ended` or `failed`, nothing after that. Calls neither block nor raise.
    """

    def accepted(self, num_prompt_tokens: int, max_tokens: int = 0, prompt_digest: int = 0) -> None:
        """Take the prompt's length, how long the answer may be, and a hash of the prompt's tokens;
        zeros: not known.
        """

    def rejected(self, error: ServiceError) -> None: ...

    def echoed(self, prompt: EchoedPrompt) -> None:
        """Take the prompt or its next piece, before the first token, if it is to be given back."""

    def extended(self, tokens: Sequence[Token], generated_s: float) -> None:
        """Take the next tokens, none missing, none twice, and when they came in."""

    def retained(self, retained: Retained) -> None:
        """Take what is kept of its KV, just before it ends, if anything was asked for."""

    def ended(
        self,
        reason: FinishReason,
        num_reasoning_tokens: int | None = None,
        num_cached_tokens: int = 0,
        stop_string: str = "",
    ) -> None:
        """Take how it ended, how many tokens are reasoning where anything tells, how many of the
        prompt were not computed again, and the stop string that it came to, if any.
        """

    def failed(self, error: ServiceError) -> None: ...

    def is_waited_for(self, now_s: float) -> bool:
        """Say whether tokens should come: the reader has read what is there, and none is held."""
