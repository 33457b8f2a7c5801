"""Copies of one rank under watch: how long each may take, which went wrong, and which may still
write.

A copy is late when the link, at its slowest believable speed, would have carried everything that
could go before it, since the layers that it comes after have run. A late copy counts as hung: it is
cancelled, nothing waits for it again, and the blocks and slots that it may still write are told to
the scheduler until it has ended.
"""

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import structlog

from services.executor.copies.copy_engine import Copy, CopyEngine, CopyError, Direction
from services.executor.kv_options import KVOptions
from services.executor.step_messages import FailureCause

log = structlog.get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long a copy may take."""

    least_s: float = 30.0  # >= 0, whatever the size
    s_per_block: float = 0.0  # >= 0, of one layer group's block, at the slowest believable speed

    @classmethod
    def of(cls, options: KVOptions, *, block_bytes: int) -> "Patience":
        modelled = [speed / 2 for speed in (options.h2d_bytes_per_s, options.d2h_bytes_per_s)]
        slowest = min([options.slowest_bytes_per_s, *(speed for speed in modelled if speed)])
        return cls(least_s=options.copy_timeout_s, s_per_block=block_bytes / slowest)


@dataclass(slots=True, eq=False)
class WatchedCopy:
    """A submitted copy and what has become of it."""

    copy: Copy
    ticket: Any
    due_s: float | None  # of the watch's clock, if the link had nothing to carry; None: not begun
    num_carried_before: int  # blocks in its direction that cannot delay it
    settled: bool = False  # `failure` is the last word
    failure: FailureCause | None = None

    @property
    def done(self) -> bool:
        return bool(self.ticket.done)


class CopyWatch:
    """Submits copies to an engine and finds out what they came to. Used by one thread."""

    def __init__(
        self,
        engine: CopyEngine,
        patience: Patience,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.engine = engine
        self.stall_s = 0.0  # waited, since the start
        self.failures: Counter[FailureCause] = Counter()  # copies, since the start
        self._patience = patience
        self._clock = clock
        self._num_submitted: Counter[Direction] = Counter()  # blocks
        self._num_carried: Counter[Direction] = Counter()  # blocks of copies known to be done
        self._open: list[WatchedCopy] = []
        self._hung: list[WatchedCopy] = []

    @property
    def is_idle(self) -> bool:
        """Whether nothing was under way at the last sweep, and nothing was submitted since."""
        return not self._open

    def submit(self, copy: Copy) -> WatchedCopy:
        ticket = self.engine.submit(copy)
        watched = WatchedCopy(
            copy,
            ticket,
            due_s=None if ticket.waits_for_layers else self._clock() + self._patience.least_s,
            num_carried_before=self._num_carried[copy.direction],
        )
        self._num_submitted[copy.direction] += len(copy.slots)
        self._open.append(watched)
        return watched

    def wait(self, watched: WatchedCopy) -> FailureCause | None:
        """Block until a copy is done or late; return what went wrong with it, if anything."""
        if watched.settled:
            return watched.failure
        watched.settled = True
        try:
            self.stall_s += self.engine.wait(watched.ticket, self._left_s(watched))
        except CopyError as error:
            self._note(watched, error)
        return watched.failure

    def poll(self, watched: WatchedCopy) -> bool:
        """Return whether `wait` would answer at once: the copy is done, or late."""
        return watched.settled or watched.done or self._left_s(watched) <= 0

    def cancel(self, watched: WatchedCopy) -> None:
        self.engine.cancel(watched.ticket)

    def sweep(self) -> None:
        """Forget copies that are done; call once in a while."""
        still_open = []
        for watched in self._open:
            if watched.done:
                self._num_carried[watched.copy.direction] += len(watched.copy.slots)
            else:
                still_open.append(watched)
        self._open = still_open

    def hung_targets(self) -> tuple[frozenset[int], frozenset[int]]:
        """Return the pool blocks and the host slots that hung copies may still write."""
        if not self._hung:
            return frozenset(), frozenset()
        self._hung = [watched for watched in self._hung if not watched.done]
        by_direction: dict[Direction, set[int]] = {d: set() for d in Direction}
        for watched in self._hung:
            copy = watched.copy
            is_load = copy.direction is Direction.H2D
            by_direction[copy.direction].update(copy.block_ids if is_load else copy.slots)
        return frozenset(by_direction[Direction.H2D]), frozenset(by_direction[Direction.D2H])

    def _left_s(self, watched: WatchedCopy) -> float:
        if watched.due_s is None:
            if watched.ticket.waits_for_layers:
                return self._patience.least_s
            watched.due_s = self._clock() + self._patience.least_s
        num_in_turn = self._num_submitted[watched.copy.direction] - watched.num_carried_before
        late_s = watched.due_s + num_in_turn * self._patience.s_per_block
        return max(0.0, late_s - self._clock())

    def _note(self, watched: WatchedCopy, error: CopyError) -> None:
        copy = watched.copy
        watched.failure = error.cause
        self.failures[error.cause] += 1
        if error.cause is FailureCause.HUNG:
            self.engine.cancel(watched.ticket)
            self._hung.append(watched)
        log.warning(
            "kv_copy_failed",
            direction=copy.direction.value,
            cause=error.cause.value,
            layer_group=copy.group,
            num_blocks=len(copy.slots),
            request_ids=[identity.request_id for identity in copy.identities],
            reason=str(error),
        )
