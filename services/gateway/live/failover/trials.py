"""What the loss of an executor counts against the requests that were tried there."""

from collections.abc import Iterable
from dataclasses import dataclass

from services.gateway.errors import EngineStalledError
from services.gateway.executors.routing import Candidate
from services.gateway.live.failover.rules import IS_SUSPECT, SHARED_COUNT, Trial
from services.gateway.live.losses import Life, may_live
from services.gateway.live.route import LiveRequest
from services.kit.errors import ServiceError


@dataclass(frozen=True, slots=True)
class Lost:
    """The loss of an executor."""

    error: ServiceError  # what ended a request there
    at: Candidate | None
    now_s: float

    @property
    def may_live(self) -> Life | None:
        """Return which executor may be found alive; None: none."""
        return may_live(self.error, self.at)

    def was_at(self, home: Candidate | None) -> bool:
        """Say whether it is the same start of an executor."""
        at = self.at
        return bool(at and home and (at.address, at.epoch) == (home.address, home.epoch))


def trial(live: LiveRequest, now_s: float) -> Trial:
    """Return how a request does where it is."""
    begun_s = live.generation.continuation.begun_s
    return Trial(
        num_tokens=max(0, live.generation.num_generated - live.num_at_start),
        since_taken_s=now_s - live.started_s,
        since_token_s=0.0 if begun_s is None else now_s - begun_s,
    )


def trial_until(live: LiveRequest, lost: Lost) -> Trial:
    """Return how it did until the loss. While an engine hangs no trial ends."""
    has_hung = isinstance(lost.error, EngineStalledError)
    return trial(live, live.started_s if has_hung else lost.now_s)


def shared(count: float, live: LiveRequest, others: Iterable[LiveRequest], lost: Lost) -> float:
    """Return what a loss counts against a request, of which another one may be the cause that was
    tried beside it.
    """
    is_shared = live.losses.total >= IS_SUSPECT and any(
        other.is_tried
        and other is not live
        and not other.generation.is_over
        and lost.was_at(other.home)
        and trial_until(other, lost).is_on
        for other in others
    )
    return min(count, SHARED_COUNT) if is_shared else count
