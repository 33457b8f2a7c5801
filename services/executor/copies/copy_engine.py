"""The seam between what is copied and how: one queue in, one queue out.

Copies into the pool (H2D) run in the order in which layers need them, restores last; copies to the
host (D2H) run in the order in which they were submitted. A caller submits a copy when the blocks
it overwrites have had their last reader and the slots it reads their last writer; it waits on the
ticket before anybody reads what was written, or overwrites what was read.

"Had", "before": in the order of the layers. Where layers run as the host calls them, that is the
order of time. Where they run on a stream of a device, it is the order of that stream: a copy comes
after what the stream was given before the submission, and what the stream is given after a wait
comes after the copy, while the host goes on at once. A load also comes after saves submitted before
it that write its slots, so that a wait is enough for what was saved to be loaded.

A copy that goes wrong says so to what waits for it, and to nothing else: the engine goes on with
the other copies.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, ClassVar, Protocol

from services.executor.step_messages import FailureCause

BACKGROUND = math.inf  # urgency of a copy that no step waits for
FOR_EVER = math.inf  # patience of a caller that has no bound


class Direction(StrEnum):
    H2D = "h2d"  # host -> pool
    D2H = "d2h"  # pool -> host


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Which KV a copy moves."""

    request_id: str  # that it is for
    uids: Sequence[int]  # one per block, and no other KV's


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """One layer group's blocks, between pool blocks and host slots, pairwise."""

    direction: Direction
    group: int
    slots: Sequence[int]  # never changes, nor do the block ids: engines may keep them
    block_ids: Sequence[int]  # as long as `slots`
    urgency: float = 0.0  # H2D only: the layer group whose turn it must be ready for, or BACKGROUND
    # What the blocks are, in turn: of each as many as it has uids; empty: not asked for.
    identities: tuple[Identity, ...] = ()


class CopyError(Exception):
    """A copy did not do what it was submitted for."""

    cause: ClassVar[FailureCause]


class CopyFailedError(CopyError):
    """A copy has ended without moving every byte; it touches nothing more."""

    cause = FailureCause.FAILED


class CopyHungError(CopyError):
    """A copy has not ended in time; until its ticket is done it may still write its targets."""

    cause = FailureCause.HUNG


class Ticket(Protocol):
    """A submitted copy."""

    @property
    def done(self) -> bool:
        """Whether the copy touches nothing more: every byte has arrived, or it was cancelled, or
        it failed, which `wait` tells.
        """

    @property
    def waits_for_layers(self) -> bool:
        """Whether layers have still to run before the copy may, however long they take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferTotals:
    """What an engine has copied since it was made."""

    h2d_bytes: int = 0
    d2h_bytes: int = 0
    h2d_busy_s: float = 0.0
    d2h_busy_s: float = 0.0
    num_checked_blocks: int = 0  # by the integrity guard, when they came back


class LateGuard(Protocol):
    """Looks at blocks that were not copied, and finds out after a wait what came back wrong."""

    def check(self, copy: Copy) -> None:
        """Check that blocks hold what was saved to the slots, as if this load had been made."""

    def take_wrong(self) -> Sequence[int]:
        """Return the uids of KV that is known by now to be wrong, each time that it came back once.

        Call once per step.
        """


class CopyEngine(Protocol):
    """Moves blocks between pool and host. Used by one thread, with tickets of its own only.

    ticket = engine.submit(Copy(direction=Direction.H2D, group=0, slots=[4], block_ids=[7]))
    ...  # other layers run
    engine.wait(ticket)  # the layers of group 0 may read block 7 from here on
    """

    def submit(self, copy: Copy) -> Any:
        """Queue a copy and return its `Ticket`. Never blocks, never raises `CopyError`."""

    def wait(self, ticket: Any, timeout_s: float = FOR_EVER) -> float:
        """Let the layers go on only once a copy is done.

        Return the seconds that this and earlier waits have held the layers up, as far as they are
        known and were not returned before: on a stream they become known later.

        Raises CopyFailedError if it failed, each time it is asked, and CopyHungError if it is not
        done after `timeout_s` (>= 0); where the host does not wait, only for a timeout of 0. A
        cancelled copy is done, not failed.
        """

    def cancel(self, ticket: Any) -> None:
        """Drop what has not begun of a copy; it is done soon after."""

    def totals(self) -> TransferTotals: ...

    def close(self) -> None:
        """Stop, dropping what is queued: those copies fail. Idempotent.

        Returns within a bound even if a copy hangs.
        """
