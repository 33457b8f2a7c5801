"""What a run policy sees, and what it answers. Pure: ages, no clock.

Units: seconds, tokens, blocks of the pool, bytes. "Beside" a request means in the same batch.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from services.placement.blocks import BlockGeometry, side_blocks, side_copy_blocks
from services.placement.run.reason import Reason
from services.placement.run.resume import ResumeWay
from services.placement.types import EngineShape, RequestId

WHOLE = frozenset({ResumeWay.LOAD, ResumeWay.RECOMPUTE})  # no layer stays on the host
ALL_WAYS = frozenset(ResumeWay)
AHEAD_TOKENS = 2  # of an answer, in flight at once at most
COPY_LACKS_ROWS = 4  # newest blocks of a layer group, at most: they go with a step that decodes


class RunPhase(Enum):
    """Where a request is, as far as running goes."""

    NEW = "new"  # in the queue, nothing computed yet
    RUNNING = "running"
    RETURNING = "returning"  # in the queue, and holds blocks: what it has is on its way back
    PARKED = "parked"  # in the queue, has run before; what it has is on the host


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RunRequest:
    """One request: equal to itself only, for policies look for requests in lists."""

    request_id: RequestId
    phase: RunPhase
    num_prompt_tokens: int
    num_output_tokens: int
    max_tokens: int  # of the answer: its limit
    num_host_tokens: int  # leading ones whose host copy is complete
    rate_tps: float  # at which its reader reads; 0: none is stated, or it reads nothing now
    slack_s: float  # until its reader lacks a token; < 0: has waited so long; inf: no token yet
    arrival_age_s: float
    run_age_s: float  # since it was admitted or came back; inf: it does not run
    num_parks: int = 0
    num_computed_tokens: int = 0  # of prompt and answer
    decoding_s: float = 0.0  # since its first token
    slo_ttft_s: float | None = None
    least_answer_tokens: int = 0  # lower bound of the predicted length; 0: nothing is predicted
    prefixes: Sequence[int] = ()  # what it shares with others: indices of `prefix_rows`
    tokens_per_step: float = 1.0  # of its answer, that a decode step brings it, >= 1
    priority: int = 0  # lower is more urgent, as in vLLM
    # Since it was last part of a step, or arrived; of one that runs: before it came in.
    waited_s: float = 0.0
    fairness_id: str = ""  # that has a share of the pool, where ids have
    # Of its id, token-seconds of KV in the pool of late, what it holds counted for `ahead_s` more;
    # < 0: it has been passed over for too long. 0 where ids have no shares.
    attained: float = 0.0

    @property
    def num_tokens(self) -> int:
        return self.num_prompt_tokens + self.num_output_tokens

    @property
    def steps_per_s(self) -> float:
        """Decode steps that its reader needs; 0: none is stated, or it reads nothing now."""
        return self.rate_tps / self.tokens_per_step

    @property
    def num_answer_left(self) -> int:
        """Tokens until its answer's limit."""
        return max(0, self.max_tokens - self.num_output_tokens)

    @property
    def num_prompt_left(self) -> int:
        """Tokens of its prompt that are still to be computed: nothing has their KV."""
        num_there = max(self.num_computed_tokens, self.num_host_tokens)
        return max(0, self.num_prompt_tokens - num_there)

    @property
    def num_left(self) -> int:
        """Tokens that are still to be computed before it decodes: of its prompt, and of what it has
        of its answer. Its newest token decodes.
        """
        num_there = max(self.num_computed_tokens, self.num_host_tokens)
        return max(0, self.num_prompt_tokens + max(0, self.num_output_tokens - 1) - num_there)

    @property
    def runs(self) -> bool:
        return self.phase is RunPhase.RUNNING

    @property
    def has_begun(self) -> bool:
        """Whether it has a token."""
        return self.num_output_tokens > 0

    @property
    def spare_s(self) -> float:
        """What its reader has in hand; nothing where no rate is stated, or no token is there."""
        return self.slack_s if self.rate_tps and self.has_begun else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCosts:
    """A step by its parts, as measured."""

    outside_s: float  # outside the layers
    base_s: float  # of a decode step, with `outside_s`
    token_s: float  # per request that decodes, its drafts included
    context_s: float  # per token of KV that is read
    chunk_base_s: float  # that a step with a prompt takes more, whatever the chunk
    chunk_token_s: float  # per token of a prompt; 0: not measured yet

    def decode_s(self, num_requests: float, num_context_tokens: float) -> float:
        """Return the length of a decode step that waits for no copy."""
        return self.base_s + self.token_s * num_requests + self.context_s * num_context_tokens

    def prompt_s(self, num_tokens: float) -> float:
        """Return what so many tokens of prompts take in one step, beside what it decodes."""
        return self.chunk_base_s + self.chunk_token_s * num_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSnapshot:
    """An engine between two steps."""

    requests: tuple[RunRequest, ...]  # running ones in scheduling order, then the queue
    engine: EngineShape
    costs: StepCosts | None  # None: too little is measured
    h2d_bytes_per_s: float  # 0: not measured
    h2d_queued_bytes: int
    prefill_frac: float  # of the engine's time that prompts took of late
    mean_answer_tokens: float  # of answers that have ended; 0: none has
    # Parts that several requests begin with and the pool holds once, in blocks of one group.
    prefix_rows: Sequence[int] = ()
    # Of the link's time, what is left beside the loads of layers that the batch has on the host, in
    # [0, 1]. `h2d_bytes_per_s` is the rate of a busy link, whatever it carries.
    h2d_free_frac: float = 1.0
    # That what a fairness id holds counts for before they have passed; 0: ids have no shares.
    ahead_s: float = 0.0
    # By growth and whether prompts count as computed, once it is asked for.
    _blocks: dict[tuple[int, bool], Mapping[RequestId, int]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @property
    def h2d_queue_s(self) -> float:
        return self.h2d_queued_bytes / self.h2d_bytes_per_s if self.h2d_bytes_per_s else 0.0

    def num_rows(self, num_tokens: int) -> int:
        """Return the blocks of one layer group that hold so many tokens."""
        return -(-num_tokens // self.engine.block_size)

    def num_blocks(self, request: RunRequest, *, growth: int, is_computed: bool = False) -> int:
        """Return the blocks of a request with all layers in the pool, `growth` tokens later.

        Drafts have room behind them. `is_computed`: once its KV is there, prompt and all; windows
        have more blocks until then.
        """
        num_rows = self.num_rows(request.num_tokens + growth + self.engine.max_ahead_tokens)
        num_left = 0 if is_computed else request.num_left
        num_side = 0
        if self.engine.side_windows:
            num_side = _side_blocks(self.engine.geometry, request, growth, num_left)
        return self.engine.num_groups * num_rows + num_side

    def blocks(self, *, growth: int, is_computed: bool = False) -> Mapping[RequestId, int]:
        """Return `num_blocks` of each request."""
        key = growth, is_computed and bool(self.engine.side_windows)
        known = self._blocks.get(key)
        if known is None:
            num_groups, size = self.engine.num_groups, self.engine.block_size
            ahead = growth + self.engine.max_ahead_tokens
            known = {
                r.request_id: num_groups
                * -(-(r.num_prompt_tokens + r.num_output_tokens + ahead) // size)
                for r in self.requests
            }
            if self.engine.side_windows:
                geometry = self.engine.geometry
                for r in self.requests:
                    num_left = 0 if is_computed else r.num_left
                    known[r.request_id] += _side_blocks(geometry, r, growth, num_left)
            self._blocks[key] = known
        return known

    def num_blocks_of(
        self, batch: Iterable[RunRequest], *, growth: int, is_computed: bool = False
    ) -> int:
        """Return the blocks of requests together: what several of them share counts once."""
        blocks = self.blocks(growth=growth, is_computed=is_computed)
        num_blocks, users = 0, Counter[int]()
        for request in batch:
            num_blocks += blocks[request.request_id]
            if request.prefixes:
                users.update(request.prefixes)
        return num_blocks - sum((n - 1) * self.prefix_blocks(part) for part, n in users.items())

    def num_own_blocks(self, request: RunRequest, *, growth: int) -> int:
        """Return `num_blocks` of a request without what it shares."""
        shared = sum(map(self.prefix_blocks, request.prefixes))
        return self.num_blocks(request, growth=growth) - shared

    def prefix_blocks(self, part: int) -> int:
        """Return the blocks of a part that is shared."""
        return self.prefix_rows[part] * self.engine.num_groups

    @property
    def prefixes_there(self) -> set[int]:
        """Return which shared parts are in the pool, or on their way there."""
        there = (RunPhase.RUNNING, RunPhase.RETURNING)
        return {part for r in self.requests if r.phase in there for part in r.prefixes}

    @property
    def is_nothing_kept(self) -> bool:
        """Whether a request that leaves is computed again: there is no room for copies."""
        return not self.engine.num_host_blocks

    def is_saved(self, request: RunRequest, *, unsaved_blocks: int) -> bool:
        """Return whether all but its newest `unsaved_blocks` per layer group have a host copy."""
        num_unsaved = request.num_tokens - request.num_host_tokens
        return num_unsaved <= unsaved_blocks * self.engine.block_size

    def is_prompt(self, request: RunRequest) -> bool:
        """Return whether a request has a prompt to compute before it decodes, or what is as good as
        one: an answer that was begun elsewhere, or whose KV was lost.
        """
        most = COPY_LACKS_ROWS * self.engine.block_size
        return not request.has_begun or request.num_left > most

    def load_s(self, request: RunRequest) -> float:
        """Return how long the link brings a parked request back."""
        if not self.h2d_bytes_per_s:
            return 0.0
        num_blocks = request.num_host_tokens // self.engine.block_size * self.engine.num_groups
        if self.engine.side_windows:
            num_blocks += side_copy_blocks(self.engine.geometry, num_tokens=request.num_host_tokens)
        if request.prefixes:
            there = self.prefixes_there.intersection(request.prefixes)
            num_blocks = max(0, num_blocks - sum(map(self.prefix_blocks, there)))
        return num_blocks * self.engine.block_bytes / self.h2d_bytes_per_s

    def way_back_s(self, request: RunRequest) -> float:
        """Return how long a parked request is on its way before it decodes."""
        way_s = self.h2d_queue_s + self.load_s(request)
        if self.costs is not None and self.is_prompt(request):
            way_s += self.costs.prompt_s(request.num_left)
        return way_s


def _side_blocks(geometry: BlockGeometry, request: RunRequest, growth: int, num_left: int) -> int:
    """Return what groups take that never leave: by the tokens that are in flight together."""
    return side_blocks(
        geometry,
        num_tokens=request.num_tokens + growth + geometry.max_ahead_tokens,
        num_new_tokens=num_left + 1 + AHEAD_TOKENS + geometry.max_ahead_tokens,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RunDecision:
    """What may be part of the next steps. A request not named in `run` is not admitted."""

    run: tuple[RequestId, ...]  # in order of admission
    park: frozenset[RequestId] = frozenset()  # that give their blocks up, of those that run
    chunk_tokens: int | None = None  # of prompts, per step; None: what the step has room for
    offloads: bool = False  # layers leave the pool: the placement policy is asked where
    ways: frozenset[ResumeWay] | None = None  # for parked ones to come back; None: as it pays
    # Leading full blocks per layer group that are not kept: computed anew in each step.
    uncached_blocks: Mapping[RequestId, int] = field(default_factory=dict)
    valid_for_s: float = 0.0  # ask again then, or when a request comes, begins to decode, leaves
    reasons: Mapping[RequestId, Reason] = field(default_factory=dict)  # where the policy gives them

    def reason(self, request_id: RequestId) -> Reason:
        """Return why a request runs, waits, or leaves."""
        given = self.reasons.get(request_id)
        if given is not None:
            return given
        if request_id in self.park:
            return Reason.SENT
        return Reason.RUN if request_id in self.run else Reason.NOT_NAMED

    @property
    def allowed_ways(self) -> frozenset[ResumeWay]:
        """The ways from which the cheapest is taken: with layers on the host if some are there."""
        return self.ways or (ALL_WAYS if self.offloads else WHOLE)


IDLE = RunDecision(run=(), valid_for_s=math.inf)
