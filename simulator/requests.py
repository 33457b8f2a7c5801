"""A live request: progress and reader."""

from dataclasses import dataclass, field

from services.control.capacity_guard import Need
from services.pacing.deposit import ReaderModel, next_due_s, release_interval_s
from services.placement.blocks import BlockGeometry
from services.placement.types import RequestId, RequestPhase
from simulator.kv import KVState
from simulator.workload import ArrivingRequest


@dataclass(slots=True, kw_only=True, eq=False)
class LiveRequest:
    """One request from its arrival to its end: equal to itself only.

    Instants are of virtual time.
    """

    spec: ArrivingRequest
    kv: KVState
    reader: ReaderModel  # as the scheduler sees it
    interval_s: float  # at which the reader reads; 0: at once
    phase: RequestPhase = RequestPhase.WAITING
    num_output_tokens: int = 0
    num_computed_tokens: int = 0
    generated_s: list[float] = field(default_factory=list)
    due_s: list[float] = field(default_factory=list)  # of each token, at its reader
    num_told: int = 0  # tokens that the scheduler has heard to be at the reader
    paused_s: float | None = None  # beginning of the running pause
    resumed_s: float | None = None
    num_pauses: int = 0
    pause_endable_noted: bool = False
    pauses_s: list[tuple[float, float]] = field(default_factory=list)  # complete ones
    decode_steps_s: list[float] = field(default_factory=list)  # see `Outcome`
    preempted_s: float | None = None
    num_preemptions: int = 0
    last_scheduled_s: float | None = None
    num_deposited_told: int = 0  # tokens in its reader's hand, when the policy was last asked
    caught_up: bool = False  # its host copy was complete once since its prompt was

    @property
    def request_id(self) -> RequestId:
        return self.spec.request_id

    @property
    def num_tokens(self) -> int:
        """Tokens known: prompt and output."""
        return self.spec.num_prompt_tokens + self.num_output_tokens

    @property
    def num_left_tokens(self) -> int:
        """Tokens known and not computed: 1 for a request that decodes."""
        return self.num_tokens - self.num_computed_tokens

    @property
    def num_left_output_tokens(self) -> int:
        return self.spec.num_output_tokens - self.num_output_tokens

    @property
    def is_paused(self) -> bool:
        return self.phase is RequestPhase.PAUSED

    @property
    def is_finished(self) -> bool:
        return self.num_output_tokens >= self.spec.num_output_tokens

    def computed(self, num_tokens: int) -> None:
        """Take in that the step under way computes so many tokens."""
        self.num_computed_tokens += num_tokens
        left = self.num_left_tokens
        self.phase = RequestPhase.PREFILL if left else RequestPhase.DECODING

    def step_ended(self, now_s: float) -> bool:
        """Take in a step it was part of; return whether it brought a token."""
        if self.num_left_tokens:
            return False
        self.num_output_tokens += 1
        self.generated_s.append(now_s)
        previous_s = self.due_s[-1] if self.due_s else None
        self.due_s.append(next_due_s(previous_s, now_s, self.interval_s))
        self.reader.generated(now_s)
        return True

    def pause(self, now_s: float) -> None:
        self.phase, self.paused_s = RequestPhase.PAUSED, now_s
        self.num_pauses += 1
        self.pause_endable_noted = False

    def resume(self, now_s: float) -> None:
        assert self.paused_s is not None
        self.pauses_s.append((self.paused_s, now_s))
        self.paused_s, self.resumed_s = None, now_s
        decodes = self.num_left_tokens <= 1 and self.num_output_tokens > 0
        self.phase = RequestPhase.DECODING if decodes else RequestPhase.PREFILL

    def preempt(self, now_s: float) -> None:
        """Lose turn and blocks; what has a complete host copy is kept there."""
        if self.is_paused:
            self.resume(now_s)
        self.kv.cancel_copies()
        self.kv = self.kv.parked()
        self.phase, self.preempted_s = RequestPhase.PREEMPTED, now_s
        self.num_computed_tokens, self.caught_up = 0, False
        self.num_preemptions += 1


def need_of(request: LiveRequest) -> Need:
    """Return what the guard makes room for."""
    return Need(request_id=request.request_id, num_tokens=request.num_tokens)


def live_request(spec: ArrivingRequest, geometry: BlockGeometry) -> LiveRequest:
    """Return a request that has just arrived."""
    interval_s = release_interval_s(spec.level)
    return LiveRequest(
        spec=spec,
        kv=KVState(request_id=spec.request_id, geometry=geometry),
        reader=ReaderModel(interval_s),
        interval_s=interval_s,
    )
