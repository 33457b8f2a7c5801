"""When a step's layers began and ended on one rank: by the host's clock, or by a device's.

Layers on a CPU have run when the hooks return. A device runs behind the host: where its stream was
at a point is asked once that point has passed, one or two steps later, and nothing waits for it.
"""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from services.executor.copies.streams import Event

MAX_UNREAD_STEPS = 16  # of a device; older ones are forgotten


@dataclass(frozen=True, slots=True, kw_only=True)
class LayersTime:
    """What one step's layers took."""

    step: int = 0  # its number; 0: nothing new is known
    layers_s: float = 0.0  # of all layers, stalls left out
    stall_s: float = 0.0  # in which layers waited for copies
    period_s: float | None = None  # to the next step's beginning; None: the host's clock will do


class StepMarks(Protocol):
    """Marks each step in whose course layers run."""

    def layers_begin(self, step: int) -> None: ...

    def layers_end(self) -> None: ...

    def take(self) -> LayersTime:
        """Return the newest step that is known and was not returned before."""


class HostMarks:
    """By the host's clock, where layers run as the host calls them."""

    def __init__(
        self, stall_s: Callable[[], float], *, now_s: Callable[[], float] = time.perf_counter
    ) -> None:
        """`stall_s` returns what layers have waited since the start."""
        self._stall_s, self._now_s = stall_s, now_s
        self._step = 0
        self._begin: tuple[float, float] | None = None  # time, and stalls before it
        self._layers_s = 0.0
        self._taken_stall_s = stall_s()

    def layers_begin(self, step: int) -> None:
        self._step = step
        self._begin = self._now_s(), self._stall_s()

    def layers_end(self) -> None:
        if self._begin is not None:
            begin_s, stall_before_s = self._begin
            stalled_s = self._stall_s() - stall_before_s
            self._layers_s = max(0.0, self._now_s() - begin_s - stalled_s)
            self._begin = None

    def take(self) -> LayersTime:
        stall_s = self._stall_s()
        found = LayersTime(
            step=self._step, layers_s=self._layers_s, stall_s=stall_s - self._taken_stall_s
        )
        self._step, self._layers_s, self._taken_stall_s = 0, 0.0, stall_s
        return found


@dataclass(slots=True, eq=False)
class Mark:
    """A point of the compute stream."""

    event: Event  # with timing
    stall_s: float | None = None  # waited before it, since the start; None: not passed yet


class Marking(Protocol):
    """An engine whose compute stream can be marked."""

    def mark(self) -> Mark: ...

    def has_passed(self, mark: Mark) -> bool:
        """Return whether the stream is past a mark, as the host knows it."""


@dataclass(slots=True, eq=False)
class _Marks:
    step: int
    begin: Mark
    end: Mark | None = None


class DeviceMarks:
    """By a device's clock. A step is known when the next one's layers have begun there."""

    def __init__(self, engine: Marking) -> None:
        self._engine = engine
        self._unread: deque[_Marks] = deque()
        self.num_dropped = 0  # steps that passed unread

    def layers_begin(self, step: int) -> None:
        self._unread.append(_Marks(step, self._engine.mark()))
        if len(self._unread) > MAX_UNREAD_STEPS:
            self._unread.popleft()
            self.num_dropped += 1

    def layers_end(self) -> None:
        if self._unread and self._unread[-1].end is None:
            self._unread[-1].end = self._engine.mark()

    def take(self) -> LayersTime:
        found = LayersTime()
        while len(self._unread) > 1 and self._engine.has_passed(self._unread[1].begin):
            found = _time_between(self._unread.popleft(), self._unread[0].begin)
        return found


def _time_between(step: _Marks, after: Mark) -> LayersTime:
    begin, end = step.begin, step.end
    assert end is not None
    assert begin.stall_s is not None
    assert end.stall_s is not None
    assert after.stall_s is not None
    return LayersTime(
        step=step.step,
        layers_s=max(0.0, begin.event.elapsed_s(end.event) - (end.stall_s - begin.stall_s)),
        stall_s=after.stall_s - begin.stall_s,
        period_s=begin.event.elapsed_s(after.event),
    )
