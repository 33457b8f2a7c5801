"""The seam between what is copied and how: one queue in, one queue out.

Copies into the pool (H2D) run in the order in which layers need them, restores last; copies to the
host (D2H) run in the order in which they were submitted. A caller submits a copy when the blocks
it overwrites have had their last reader and the slots it reads their last writer; it waits on the
ticket before anybody reads what was written, or overwrites what was read.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

BACKGROUND = math.inf  # urgency of a copy that no step waits for


class Direction(Enum):
    H2D = "h2d"  # host -> pool
    D2H = "d2h"  # pool -> host


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """One layer group's blocks, between pool blocks and host slots, pairwise."""

    direction: Direction
    group: int
    slots: Sequence[int]
    block_ids: Sequence[int]  # as long as `slots`
    urgency: float = 0.0  # H2D only: the layer group whose turn it must be ready for, or BACKGROUND


class Ticket(Protocol):
    """A submitted copy."""

    @property
    def done(self) -> bool:
        """Whether every byte has arrived, or the copy was cancelled and touches nothing more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferTotals:
    """What an engine has copied since it was made."""

    h2d_bytes: int = 0
    d2h_bytes: int = 0
    h2d_busy_s: float = 0.0
    d2h_busy_s: float = 0.0


class CopyEngine(Protocol):
    """Moves blocks between pool and host. Used by one thread, with tickets of its own only."""

    def submit(self, copy: Copy) -> Any:
        """Queue a copy and return its `Ticket`. Never blocks."""

    def wait(self, ticket: Any) -> float:
        """Block until a copy is done; return the seconds that took.

        Raises whatever made a copy fail.
        """

    def cancel(self, ticket: Any) -> None:
        """Drop what has not begun of a copy; it is done soon after."""

    def totals(self) -> TransferTotals: ...

    def close(self) -> None:
        """Stop, dropping what is queued. Idempotent."""
