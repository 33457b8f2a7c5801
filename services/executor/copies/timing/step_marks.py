"""When a step's layers began and ended on one rank, by its device's clock.

A device may run behind the host: where its stream was at a point is asked once that point has
passed, one or two steps later, and nothing waits for it.
"""

from collections import deque
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


class StepMarks:
    """Marks each step in whose course layers run.

    A step is known when the next one's layers have begun on the device.
    """

    def __init__(self, engine: Marking) -> None:
        self._engine = engine
        self._unread: deque[_Marks] = deque()
        self.num_dropped = 0  # steps that passed unread

    def layers_begin(self, step: int) -> None:
        """Mark a step; its number grows from call to call."""
        self._unread.append(_Marks(step, self._engine.mark()))
        if len(self._unread) > MAX_UNREAD_STEPS:
            self._unread.popleft()
            self.num_dropped += 1

    def layers_end(self) -> None:
        if self._unread and self._unread[-1].end is None:
            self._unread[-1].end = self._engine.mark()

    def take(self) -> LayersTime:
        """Return the newest step that is known and was not returned before."""
        found = LayersTime()
        while len(self._unread) > 1 and self._engine.has_passed(self._unread[1].begin):
            found = _time_between(self._unread.popleft(), self._unread[0])
        return found


def _time_between(step: _Marks, next_one: _Marks) -> LayersTime:
    begin, end, after = step.begin, step.end, next_one.begin
    assert end is not None
    assert begin.stall_s is not None
    assert end.stall_s is not None
    assert after.stall_s is not None
    return LayersTime(
        step=step.step,
        layers_s=max(0.0, begin.event.elapsed_s(end.event) - (end.stall_s - begin.stall_s)),
        stall_s=after.stall_s - begin.stall_s,
        # Steps without layers lie between others.
        period_s=begin.event.elapsed_s(after.event) if next_one.step == step.step + 1 else None,
    )
