"""What a policy sees, and what it answers.

A snapshot is complete: a policy reads nothing else, neither a clock nor an environment. Ages are
seconds before the snapshot was taken. A *layer group* is `layers_per_group` contiguous layers that
share one block table, and so are offloaded together; with one layer per group it is a layer.
"""

import math
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Annotated, NewType, TypeAlias

from services.placement.blocks import BlockGeometry
from services.placement.ranges import (
    MAX_ID_LENGTH,
    MAX_PREFIXES,
    MAX_REQUESTS,
    AtMost,
    Blocks,
    Buffers,
    Count,
    Duration,
    EachGroup,
    EachLayer,
    EachSideGroup,
    Epoch,
    Layers,
    LongInt,
    PerStep,
    PositiveBlocks,
    PositiveInt,
    PositiveSeconds,
    Rate,
    Seconds,
    TokensPerStep,
    Window,
)

RequestId = NewType("RequestId", str)
PrefixId = NewType("PrefixId", str)


class RequestPhase(Enum):
    WAITING = "waiting"  # not yet scheduled
    PREFILL = "prefill"  # its prompt is being computed
    DECODING = "decoding"  # it generates
    PAUSED = "paused"  # keeps its place, is not scheduled
    PREEMPTED = "preempted"  # lost its turn and its blocks

    @property
    def holds_kv(self) -> bool:
        """Whether placement has something to decide."""
        return self in (RequestPhase.PREFILL, RequestPhase.DECODING, RequestPhase.PAUSED)


class PlanStatus(Enum):
    OPTIMAL = "optimal"  # nothing better exists under the policy's own objective
    FEASIBLE = "feasible"  # keeps every constraint; something better may exist
    INFEASIBLE = "infeasible"  # certified: nothing keeps every constraint
    UNDECIDED = "undecided"  # neither a feasible placement nor a proof was found in time


class Replan(Enum):
    """When a placement is asked for anew, beside its expiry."""

    NEVER = "never"  # there is nothing to decide
    BATCH_CHANGE = "batch-change"  # a request joins or leaves
    EVERY_STEP = "every-step"
    ADAPTIVE = "adaptive"  # batch change, end of the window, steps unlike the predicted ones


class VictimRule(Enum):
    """Which request to pause first (OrbitFlow, sections 3.4 and 5.4, Fig. 14c)."""

    KV_AND_DEPOSIT = "kv_and_deposit"  # most KV tokens + deposited tokens
    LONGEST = "longest"  # most KV tokens
    SHORTEST = "shortest"  # fewest KV tokens
    RANDOM = "random"  # by the snapshot's seed


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineShape:
    """What does not change while an engine runs."""

    num_layers: Layers  # layers with a KV cache
    layers_per_group: Layers  # contiguous layers that share one block table, [1, num_layers]
    block_size: PositiveInt  # tokens
    num_blocks: PositiveBlocks  # blocks of the pool; one holds block_size tokens of one layer group
    block_bytes: PositiveBlocks  # of one block, over all ranks
    max_num_seqs: PositiveInt  # requests in one step
    max_num_batched_tokens: PositiveInt  # tokens in one step
    num_host_blocks: Blocks = 0  # blocks of the host pool
    max_model_len: Count = 0  # tokens of the longest request; 0: unknown
    max_prefill_chunk_tokens: Count = 0  # of one request in one step; 0: max_num_batched_tokens
    # Groups that never leave, beside those of `num_layers`; as `BlockGeometry` has them.
    side_windows: EachSideGroup = ()
    side_block_size: Count = 0  # tokens
    max_in_flight_tokens: Count = 0
    max_ahead_tokens: Count = 0  # of a request: drafts; as `BlockGeometry` has them

    @property
    def geometry(self) -> BlockGeometry:
        return BlockGeometry(
            num_groups=self.num_groups,
            block_size=self.block_size,
            side_windows=tuple(self.side_windows),  # a list, where the shape was told as JSON
            side_block_size=self.side_block_size,
            max_in_flight_tokens=self.max_in_flight_tokens,
            max_ahead_tokens=self.max_ahead_tokens,
        )

    @property
    def num_groups(self) -> int:
        """Number of layer groups; the last may have fewer layers."""
        return -(-self.num_layers // self.layers_per_group)

    def layers_of(self, group: int) -> range:
        first = group * self.layers_per_group
        return range(first, min(first + self.layers_per_group, self.num_layers))


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestState:
    """One request as the scheduler sees it: its own part, without the prefixes it begins with."""

    request_id: Annotated[RequestId, AtMost(MAX_ID_LENGTH)]
    phase: RequestPhase
    num_prompt_tokens: PositiveInt
    num_output_tokens: Count  # generated
    num_computed_tokens: Count  # whose KV exists, [0, prompt + output]
    num_deposited_tokens: Count  # generated and not yet delivered, [0, num_output_tokens]
    last_release_age_s: Seconds | None = None  # of the newest delivered token; None: none yet
    paused_age_s: Duration | None = None  # of the running pause; set iff phase is PAUSED
    resumed_age_s: Duration | None = None  # of the end of its last pause; None if never paused
    slo_tpot_s: PositiveSeconds | None = None
    slo_tbt_s: PositiveSeconds | None = None
    priority: int = 0  # lower is served first, as in vLLM
    predicted_min_output_tokens: Count | None = None  # of the whole answer; None: not predicted
    predicted_max_output_tokens: Count | None = None  # >= the minimum
    offloaded_layers: EachLayer = ()  # present plan: in host memory, ascending, whole groups
    num_prefetch_buffers: Buffers = 0  # present plan: staging buffers, 0 iff nothing is offloaded
    num_blocks: EachGroup = ()  # pool blocks held per layer group; (): none
    num_host_blocks: EachGroup = ()  # mirrored full blocks per layer group; (): none
    on_hold: bool = False  # its reader has stopped, or enough: not scheduled, whatever a plan says
    # What it begins with that others may have, too, in the order of positions; () if nothing.
    prefix_ids: Annotated[tuple[PrefixId, ...], AtMost(MAX_PREFIXES)] = ()
    tokens_per_step: TokensPerStep = 1.0  # that a decode step brings it: more with accepted drafts

    @property
    def holder_id(self) -> str:
        return self.request_id

    @property
    def num_tokens(self) -> int:
        """Tokens whose KV it holds when its prompt is complete."""
        return max(self.num_computed_tokens, self.num_prompt_tokens)

    @property
    def slo_s(self) -> float | None:
        """The bound on a decode step: by the TBT SLO, else by the TPOT SLO, else none."""
        token_s = self.slo_tbt_s if self.slo_tbt_s is not None else self.slo_tpot_s
        return None if token_s is None else token_s * self.tokens_per_step

    def growth(self, num_steps: int) -> int:
        """Return the tokens that so many decode steps add, on average, rounded up."""
        return math.ceil(num_steps * self.tokens_per_step)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixState:
    """A stretch of leading positions that several requests have once: full blocks.

    It is placed as a request is, and takes part in each step that one of its users is in.
    """

    prefix_id: Annotated[PrefixId, AtMost(MAX_ID_LENGTH)]  # that no request has
    num_tokens: PositiveInt  # of the stretch alone, whole blocks
    offloaded_layers: EachLayer = ()  # as a request's
    num_prefetch_buffers: Buffers = 0
    num_blocks: EachGroup = ()
    num_host_blocks: EachGroup = ()

    @property
    def holder_id(self) -> str:
        return self.prefix_id

    @property
    def num_computed_tokens(self) -> int:
        return self.num_tokens


Holder: TypeAlias = RequestState | PrefixState  # what has blocks of the pool, and a placement


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """One direction between host and GPU memory, as measured over whole copies."""

    bytes_per_s: Rate
    copy_overhead_s: Seconds = 0.0  # per copy
    chunk_bytes: PositiveBlocks = 4 << 20  # of one copy at most
    num_queued_bytes: LongInt = 0  # waiting in the queue
    peak_bytes_per_s: Rate | None = None  # of an idle link; None: bytes_per_s

    def at_peak(self) -> "Link":
        """Return the link with nothing else on it."""
        return replace(self, bytes_per_s=self.peak_bytes_per_s or self.bytes_per_s)

    def copy_s(self, num_bytes: float) -> float:
        """Return how long a transfer holds the link."""
        num_copies = math.ceil(num_bytes / self.chunk_bytes)
        return num_bytes / self.bytes_per_s + num_copies * self.copy_overhead_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Measured times of this engine. Steps with prefill do not feed the decode figures."""

    outside_layers_s: Seconds = 0.0  # scheduling, metadata, head, sampling: per step
    layer_base_s: PositiveSeconds  # one layer, whatever the batch: weights, launch
    layer_s_per_token: Seconds = 0.0  # per request that decodes, its drafts included, and layer
    layer_s_per_context_token: Seconds = 0.0  # per KV token read and layer
    prefill_s_per_token: Seconds = 0.0  # whole model
    mean_tpot_s: Seconds = 0.0  # over recent decode steps, >= 0; 0: none yet

    def layer_s(self, num_tokens: int, num_context_tokens: int) -> float:
        """Return the compute time of one layer for a step of `num_tokens` new tokens."""
        return (
            self.layer_base_s
            + self.layer_s_per_token * num_tokens
            + self.layer_s_per_context_token * num_context_tokens
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyParameters:
    """What can be chosen beside the policy's name."""

    deposit: bool | None = None  # whether deposited tokens back plans; None: the preset's
    pause: bool | None = None  # whether placement may pause; None: the preset's
    alpha: PerStep = 0.0  # SLO violations per step, mean over the window, >= 0; OrbitFlow's is 1
    min_window: Window = 1  # Delta_min, decode steps
    max_window: Window = 256  # Delta_max, decode steps, >= min_window
    min_pause_s: Seconds = 1.0  # a pause lasts this long unless a request completes
    max_pause_s: Seconds = 10.0  # no request is paused longer for an SLO, >= min_pause_s
    victim_rule: VictimRule | None = None  # None: the preset's
    even_patterns_only: bool = False  # the paper's space: even distances, one buffer


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """State of one engine at one step."""

    epoch: Epoch  # grows by one with each snapshot of an engine
    policy: str  # that decides: a preset's name, or `module:attribute`
    seed: int  # for policies that draw at random
    engine: EngineShape
    # Those that hold KV or wait for it, in scheduling order.
    requests: Annotated[tuple[RequestState, ...], AtMost(MAX_REQUESTS)]
    num_free_blocks: Blocks  # that none owns, [0, engine.num_blocks]
    last_completion_age_s: Seconds | None = None  # of the newest request to leave; None: none yet
    h2d: Link | None = None  # host to GPU; None: not measured
    d2h: Link | None = None  # GPU to host; None: not measured
    profile: Profile | None = None  # None: not measured
    parameters: PolicyParameters = field(default_factory=PolicyParameters)
    num_write_through_blocks: Blocks = 0  # copied to the host in one step at most; 0: unknown
    # Those that requests begin with.
    prefixes: Annotated[tuple[PrefixState, ...], AtMost(MAX_PREFIXES)] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """What happens to one request."""

    request_id: Annotated[RequestId, AtMost(MAX_ID_LENGTH)]
    offloaded_layers: tuple[int, ...] = ()  # belong in host memory, ascending; empty: all resident
    num_prefetch_buffers: int = 0  # layers prefetched ahead; 0 iff nothing is offloaded
    paused: bool = False  # keeps its place, is not scheduled


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixPlacement:
    """Where one prefix belongs."""

    prefix_id: Annotated[PrefixId, AtMost(MAX_ID_LENGTH)]
    offloaded_layers: tuple[int, ...] = ()  # as a request's
    num_prefetch_buffers: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Quality:
    """What is known about a plan. Latencies are of one decode step."""

    latency_s: Duration  # predicted, at the last step of the window: no step of it is longer
    mean_latency_s: Duration  # predicted, mean over the window
    first_latency_s: Duration  # predicted, at the first step of the window
    objective_s: Duration  # what the optimiser minimises: latency_s + switching cost per step
    lower_bound_s: Duration  # certified: no placement of the running requests has a lower objective
    window: PositiveInt  # Delta: decode steps that the plan is meant to hold
    expires_after: Count  # decode steps until the first capacity or SLO breach
    num_nodes: int  # search nodes spent: with the snapshot, all that a replay needs
    serve_all: PlanStatus = (
        PlanStatus.UNDECIDED
    )  # of all requests whose pause may end: why some are paused

    @property
    def gap_frac(self) -> float:
        """How much better the best placement could be, as a fraction of the lower bound."""
        if self.lower_bound_s <= 0.0:
            return 0.0 if self.objective_s <= 0.0 else math.inf
        return max(0.0, self.objective_s / self.lower_bound_s - 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A placement for one batch."""

    epoch: int  # of the snapshot it answers
    policy: str  # that decided
    status: PlanStatus
    placements: tuple[Placement, ...]  # one per request of the snapshot, in its order
    quality: Quality | None = None  # None: no profile or no link to predict with
    prefixes: tuple[PrefixPlacement, ...] = ()  # one per prefix of the snapshot, in its order
