"""What the parts of the step loop say to each other."""

from dataclasses import dataclass
from enum import Enum

from services.placement.types import Link


class Trigger(Enum):
    """Why the planner is asked."""

    ADMITTED = "admitted"  # a request got its first blocks
    PREFILLED = "prefilled"  # its prompt is complete: it decodes from now on
    MIRRORED = "mirrored"  # its host copy has caught up: it may be offloaded
    FINISHED = "finished"
    ABORTED = "aborted"
    PREEMPTED = "preempted"
    HELD = "held"  # its reader has stopped: it does not run
    RESUMED = "resumed"  # a pause has ended
    PAUSE_ENDABLE = "pause_endable"  # a pause has lasted `min_pause_s`
    MISMATCH = "mismatch"  # steps take another time than predicted
    WINDOW_END = "window_end"  # the plan has held as long as it was meant to
    EXPIRED = "expired"  # the plan breaks the pool's size or the SLO from now on
    CALIBRATED = "calibrated"  # the first profile is complete
    LAYERS_LEAVE = "layers_leave"  # the run policy lets more run than the pool holds
    STEP = "step"  # the policy decides every step
    RETRY = "retry"  # the last question got no answer


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduledStep:
    """One step as it leaves the scheduler."""

    request_ids: tuple[str, ...] = ()
    number: int = 0  # as ranks count steps, from 1; 0: they do not
    scheduled_s: float
    num_tokens: int
    num_context_tokens: int
    num_prefill_tokens: int
    num_prefill_pairs: int  # of a prompt's token and a token that it attends to
    same_batch: bool  # as the step before: requests and placements
    undisturbed: bool  # no copy but those that layers wait for


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSample:
    """One step as it was measured."""

    step_s: float  # from the end of the step before, or from its own beginning after a rest
    layer_s: float  # compute of one layer, mean, of the slowest rank; 0: unknown
    stall_s: float  # in which layers waited for copies
    num_tokens: int  # computed
    num_context_tokens: int  # KV tokens read, over all requests
    num_prefill_tokens: int  # of `num_tokens`; 0: a decode step
    num_prefill_pairs: int  # of a prompt's token and a token that it attends to
    num_requests: int = 0  # that are part of it; 0: unknown


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """Both directions; None: not measured yet."""

    h2d: Link | None
    d2h: Link | None
