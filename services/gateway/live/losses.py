"""What losses of executors count against one request."""

from dataclasses import dataclass, field

from services.gateway.errors import EngineStalledError, LinkBrokenError
from services.gateway.executors.routing import Candidate
from services.kit.errors import ServiceError


@dataclass(frozen=True, slots=True)
class Life:
    """One start of an executor."""

    address: str
    epoch: int


def life_of(candidate: Candidate) -> Life | None:
    """Return which start of an executor this is; None: it does not say."""
    return Life(candidate.address, candidate.epoch) if candidate.epoch else None


def may_live(error: ServiceError, at: Candidate | None) -> Life | None:
    """Return which executor may be found alive though `error` says that it is lost; None: none."""
    is_link = isinstance(error, LinkBrokenError) and not isinstance(error, EngineStalledError)
    return life_of(at) if is_link and at is not None else None


@dataclass(slots=True)
class Losses:
    """Losses while a request was on trial. One that was of the connection alone counts until the
    executor is found alive.
    """

    _sure: float = 0.0
    _unsure: dict[Life, float] = field(default_factory=dict)

    @property
    def total(self) -> float:
        return self._sure + sum(self._unsure.values())

    @property
    def is_sure(self) -> bool:
        """Say whether nothing of it may be taken back."""
        return not self._unsure

    def add(self, count: float, life: Life | None) -> None:
        """Count a loss; `life`: of the executor, if it may be found alive."""
        if life is None:
            self._sure += count
        else:
            self._unsure[life] = self._unsure.get(life, 0.0) + count

    def clear(self) -> None:
        self._sure = 0.0
        self._unsure.clear()

    def found_alive(self, life: Life) -> None:
        """Take back what the loss of an executor counted that lives."""
        self._unsure.pop(life, None)
