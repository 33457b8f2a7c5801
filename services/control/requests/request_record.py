"""One live request: what is kept of it beside the scheduler's own."""

from dataclasses import dataclass, field
from enum import Enum
from typing import Generic

from services.control.kv import KVT
from services.control.prefix_cache import FoundPrefix
from services.pacing.request_buffer import RequestBuffer
from services.placement.layer_placement import LayerPlacement
from services.placement.run.resume import ResumeWay


class HoldKind(Enum):
    PAUSE = "pause"  # keeps its place and its blocks, which others may reclaim
    # Gives its blocks up as soon as their copies are complete, and waits in the queue.
    PARK = "park"
    LEAVE = "leave"  # the same at once: what is not copied yet is computed again


@dataclass(frozen=True, slots=True)
class Hold:
    """Keeps a request from running."""

    kind: HoldKind
    since_s: float


class Stage(Enum):
    """How far a request is since it was admitted."""

    WAITS = "waits"  # never admitted, or preempted since
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
    stage: Stage = Stage.WAITS
    first_token_s: float | None = None
    run_since_s: float | None = None  # admitted, or back; None: it never ran
    preempted_s: float | None = None  # beginning of the running preemption
    num_parks: int = 0  # by a run policy
    # Pauses, as the controller has ordered them.
    paused_s: float | None = None  # beginning of the running pause
    resumed_s: float | None = None  # end of the last pause
    pause_endable_noted: bool = False  # the running pause was reported to have lasted long enough
    reader_stopped: bool = False  # no plan lets it run
    # Whether it runs.
    hold: Hold | None = None
    skipped: bool = False  # the scheduler was told to pass over it
    way: ResumeWay | None = None  # in which it is being brought back
    # Where its KV is.
    prefix: FoundPrefix = field(default_factory=FoundPrefix)  # cached, while it has no KV
    kv: KVT | None = None  # None: nowhere, neither in the pool nor on the host
    floor: LayerPlacement | None = None  # by somebody's order; None: all may be in the pool
    num_deposited_tokens: int = 0  # in its reader's hand, when the policy was last asked
    # Copies that went wrong.
    num_losses: int = 0  # of its KV
    num_failed_saves: int = 0  # steps with failed copies to the host

    @property
    def is_held(self) -> bool:
        return self.hold is not None

    def pause_began(self, now_s: float) -> None:
        """Record the beginning of a pause; during one this changes nothing."""
        if self.paused_s is None:
            self.paused_s, self.pause_endable_noted = now_s, False

    def pause_ended(self, now_s: float) -> None:
        """Record the end of a pause; without one this changes nothing."""
        if self.paused_s is not None:
            self.paused_s, self.resumed_s = None, now_s
