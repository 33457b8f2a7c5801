"""What happens at an instant of virtual time."""

from dataclasses import dataclass
from typing import TypeAlias

from services.placement.types import RequestId
from simulator.workload import ArrivingRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrived:
    """A request reaches the engine."""

    time_s: float
    request: ArrivingRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEnded:
    """The step under way is over."""

    time_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanCame:
    """The question that is under way is answered."""

    time_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ReaderLeft:
    """A reader has the last token that it stays for."""

    time_s: float
    request_id: RequestId


@dataclass(frozen=True, slots=True, kw_only=True)
class Woke:
    """No request could run, and now one may: a copy has ended, or a pause."""

    time_s: float


Event: TypeAlias = Arrived | StepEnded | PlanCame | ReaderLeft | Woke
