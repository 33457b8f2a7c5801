"""A live request: progress and reader."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from services.control.requests.life import Hold
from services.control.requests.request_record import RequestRecord
from services.pacing.deposit import next_due_s
from services.pacing.request_buffer import RequestBuffer
from services.placement.blocks import BlockGeometry
from services.placement.types import RequestId
from simulator.memory.kv import KVState
from simulator.workload import ArrivingRequest


@dataclass(slots=True, kw_only=True, eq=False)
class SimulatedRequest:
    """One request from its arrival to its end: equal to itself only.

    Instants are of virtual time.
    """

    spec: ArrivingRequest
    record: RequestRecord[KVState]
    nothing: KVState  # its KV while it has none
    num_output_tokens: int = 0
    num_computed_tokens: int = 0
    is_right: Sequence[bool] = ()  # which tokens of its answer are drafted right; (): none
    num_drafts_per_step: int = 0  # that a step which brings it tokens leaves for its next one
    num_drafts: int = 0  # that there are for the next one
    generated_s: list[float] = field(default_factory=list)
    due_s: list[float] = field(default_factory=list)  # of each token, at its reader
    num_told: int = 0  # tokens that the scheduler has heard to be at the reader
    pauses_s: list[tuple[float, float]] = field(default_factory=list)  # complete ones
    decode_steps_s: list[float] = field(default_factory=list)  # see `Outcome`
    num_preemptions: int = 0
    num_cached_tokens: int = 0  # see `Outcome`
    _paused_s: float | None = None  # since when, as seen last

    @property
    def request_id(self) -> RequestId:
        return self.spec.request_id

    @property
    def kv(self) -> KVState:
        return self.record.kv or self.nothing

    @property
    def reader(self) -> RequestBuffer:
        """Return its reader as the scheduler sees it."""
        return self.record.buffer

    @property
    def num_prompt_tokens(self) -> int:
        return self.spec.num_prompt_tokens

    @property
    def max_tokens(self) -> int:
        return self.spec.num_output_tokens

    @property
    def arrival_time(self) -> float:
        return self.spec.arrival_s

    @property
    def num_tokens(self) -> int:
        """Tokens known: prompt and output."""
        return self.spec.num_prompt_tokens + self.num_output_tokens

    @property
    def num_left_tokens(self) -> int:
        """Tokens known and not computed: 1 for a request that decodes."""
        return self.num_tokens - self.num_computed_tokens

    @property
    def is_paused(self) -> bool:
        return self.record.is_held

    @property
    def is_finished(self) -> bool:
        return self.num_output_tokens >= self.spec.num_output_tokens

    def computed(self, num_tokens: int) -> None:
        """Take in that the step under way computes so many tokens."""
        self.num_computed_tokens += num_tokens

    def step_ended(self, now_s: float, num_drafts: int = 0) -> int:
        """Take in a step it was part of; return how many tokens it brought.

        Of `num_drafts` those before the first wrong one, and one more, as far as the answer goes.
        """
        if self.num_left_tokens:
            return 0
        before = self.num_output_tokens
        drafted = self.is_right[before : before + num_drafts]
        num_right = drafted.index(False) if False in drafted else len(drafted)
        num_new = min(1 + num_right, self.max_tokens - before)
        self.num_output_tokens += num_new
        self.num_computed_tokens += num_new - 1
        self.num_drafts = self.num_drafts_per_step
        for _ in range(num_new):
            self.generated_s.append(now_s)
            previous_s = self.due_s[-1] if self.due_s else None
            self.due_s.append(next_due_s(previous_s, now_s, self.reader.interval_s))
        self.reader.generated(self.num_output_tokens, now_s)
        return num_new

    def left_s(self, num_new: int) -> float | None:
        """Return when its reader leaves, if with one of the newest tokens; None: it stays."""
        last = self.spec.leaves_after
        if last is None or not 0 <= self.num_output_tokens - last < num_new:
            return None
        return self.due_s[last - 1]

    def note_pause(self, now_s: float) -> None:
        """Take in whether a pause has begun or ended since this was last called."""
        since_s, self._paused_s = self._paused_s, self.record.held_since_s
        if since_s is not None and since_s != self._paused_s:
            self.pauses_s.append((since_s, now_s))

    def preempt(self, now_s: float) -> None:
        """Lose its turn. A pause ends."""
        self.record.release(Hold.PLAN, now_s)
        self.note_pause(now_s)
        self.record.preempted()
        self.num_computed_tokens = 0
        self.num_drafts = 0
        self.num_preemptions += 1


def live_request(spec: ArrivingRequest, geometry: BlockGeometry) -> SimulatedRequest:
    """Return a request that has just arrived."""
    record: RequestRecord[KVState] = RequestRecord(
        request_id=spec.request_id,
        buffer=RequestBuffer(spec.level),
        arrival_s=spec.arrival_s,
        priority=spec.priority,
        fairness_id=spec.fairness_id,
    )
    nothing = KVState(request_id=spec.request_id, geometry=geometry)
    return SimulatedRequest(spec=spec, record=record, nothing=nothing)
