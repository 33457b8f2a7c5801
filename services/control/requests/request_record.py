"""One live request: what is kept of it beside the scheduler's own."""

from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType
from typing import Generic

from services.control.kv import KVT
from services.control.prefixes.prefix_cache import FoundPrefix
from services.control.requests.life import EDGES, OF_READERS, Hold, State
from services.pacing.request_buffer import RequestBuffer
from services.placement.layer_placement import LayerPlacement
from services.placement.run.reason import Reason
from services.placement.run.resume import ResumeWay

# What a held request waits for, the first that holds.
_REASONS = MappingProxyType(
    {Hold.READER: Reason.READER, Hold.REST: Reason.IN_HAND, Hold.PLAN: Reason.PLAN}
)


class Stage(Enum):
    """How far a request is since it was admitted."""

    PREFILL = "prefill"
    DECODES = "decodes"  # and its host copy is not complete yet
    MIRRORED = "mirrored"  # its host copy was complete once, or it has none


@dataclass(slots=True, kw_only=True, eq=False)
class RequestRecord(Generic[KVT]):
    """Made when the request arrives, forgotten when it ends. Equal to itself only.

    Instants are seconds of the engine's monotonic clock.
    """

    request_id: str
    buffer: RequestBuffer  # its reader's
    arrival_s: float
    priority: int = 0  # lower is served first
    fairness_id: str = ""  # among which the pool is shared, where it is
    first_token_s: float | None = None
    num_counted_tokens: int = 0  # of its answer, by the steps that have ended
    tokens_per_step: float | None = None  # mean of its decode steps; None: it had none
    # Whether it runs.
    state: State = State.WAITING  # changed by `enter` alone
    holds: dict[Hold, float] = field(default_factory=dict)  # and since when
    has_run: bool = False
    run_since_s: float | None = None  # of the first step since it was admitted; None: not yet
    last_step_s: float | None = None  # that it was part of; None: of none yet
    waited_s: float = 0.0  # before it last came in
    resumed_s: float | None = None  # end of its last hold
    reason: Reason | None = None  # of the run policy's decision in force; None: it did not see it
    num_computed_before: int = 0  # tokens whose KV there was when it was last preempted
    num_recomputed_tokens: int = 0  # computed once more, since their KV was lost
    num_parks: int = 0  # times that a run policy sent it to the queue
    stage: Stage = Stage.PREFILL
    way: ResumeWay | None = None  # in which it is being brought back
    # Where its KV is.
    prefix: FoundPrefix = field(default_factory=FoundPrefix)  # cached, while it has no KV
    num_begun: int = 0  # cached blocks that it was let begin with
    kv: KVT | None = None  # None: nowhere, neither in the pool nor on the host
    floor: LayerPlacement | None = None  # the plan's; None: all may be in the pool
    num_deposited_tokens: int = 0  # in its reader's hand, when the policy was last asked
    # Copies that went wrong.
    num_losses: int = 0  # of its KV
    num_failed_saves: int = 0  # steps with failed copies to the host

    def enter(self, state: State) -> None:
        """Go on to another state. AssertionError where no edge leads there."""
        assert state in EDGES[self.state], f"{self.request_id}: {self.state} to {state}"
        self.state = state
        if state is State.RUNNING:
            self.has_run = True

    def put_back(self) -> None:
        """Lose what was prepared, if anything was."""
        if self.is_prepared:
            self.enter(State.WAITING)

    def preempted(self, num_computed_tokens: int = 0) -> None:
        """Go back to the queue, with the KV of so many tokens."""
        self.enter(State.WAITING)
        self.num_computed_before = num_computed_tokens
        self.stage, self.run_since_s = Stage.PREFILL, None

    def came_back(self, num_computed_tokens: int) -> None:
        """Go on where KV is for so many tokens."""
        self.num_recomputed_tokens += max(0, self.num_computed_before - num_computed_tokens)

    def hold(self, reason: Hold, now_s: float) -> None:
        """Keep it from running from the next step on; once more for a reason changes nothing."""
        self.holds.setdefault(reason, now_s)

    def release(self, reason: Hold, now_s: float) -> None:
        """End a hold; without one this changes nothing."""
        if self.holds.pop(reason, None) is not None and not self.holds:
            self.resumed_s = now_s

    def forget_floor(self) -> None:
        """Let all of its KV be in the pool, that of its trunks, too: no plan says where it is."""
        self.floor = None
        for trunk in () if self.kv is None else self.kv.trunks:
            trunk.floor = None

    def scheduled(self, now_s: float) -> None:
        """Take in that it is part of a step."""
        if self.run_since_s is None:
            self.waited_s, self.run_since_s = self.away_s(now_s), now_s
        self.last_step_s = now_s

    def away_s(self, now_s: float) -> float:
        """Return how long it has waited to be part of a step: a hold is no waiting."""
        since_s = self.arrival_s if self.last_step_s is None else self.last_step_s
        return now_s - max(since_s, self.resumed_s or since_s)

    @property
    def waits_for_reader(self) -> bool:
        """Whether its reader is what keeps it from running, whatever a plan says."""
        return not OF_READERS.isdisjoint(self.holds)

    @property
    def is_held(self) -> bool:
        """Whether it may not run now."""
        return bool(self.holds) or self.state is State.LEAVING

    @property
    def why(self) -> Reason:
        """Return why it runs or waits."""
        if self.holds:
            return next(reason for hold, reason in _REASONS.items() if hold in self.holds)
        if self.state is State.PAUSED:
            return Reason.WAKING
        if self.is_prepared:
            return Reason.LOADING
        return self.reason or Reason.QUEUE

    @property
    def held_since_s(self) -> float | None:
        """Return when the oldest hold began; None without one."""
        return min(self.holds.values(), default=None)

    @property
    def is_prepared(self) -> bool:
        """Whether its KV is in the pool, or on its way there, though it is in the queue."""
        return self.state is State.LOADING or self.state is State.READY

    @property
    def is_parked(self) -> bool:
        """Whether it is in the queue, or on its way there, after it has run."""
        return self.state is State.LEAVING or (self.has_run and self.state.is_queued)
