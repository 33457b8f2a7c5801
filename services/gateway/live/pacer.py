"""Releases the tokens of all streams when they are due: Token-Deposit at the gateway.

One timer serves every stream. It stands at the earliest due time; a heap holds the first waiting
token of each stream.
"""

import heapq
import math
from collections import deque
from collections.abc import Callable, Sequence
from itertools import count
from typing import Protocol, TypeAlias

from msgspec import Struct

from services.gateway.types import Token
from services.kit.clock import Clock
from services.pacing.deposit import next_due_s

MAX_TIMER_S = 3600.0  # event loops refuse longer ones; an early wake-up only arms the next


class TimerHandle(Protocol):
    def cancel(self) -> None: ...


# Calls back once after a delay in seconds. May be early: the pacer looks at its clock.
Timer: TypeAlias = Callable[[float, Callable[[], None]], TimerHandle]


class DueToken(Struct, frozen=True, gc=False):
    """A token and when it was due at the reader, in seconds on the pacer's clock."""

    token: Token
    due_s: float


Release: TypeAlias = Callable[[Sequence[DueToken]], None]


class Pacer:
    """Owns the one timer and the heap of stream heads.

    stream = pacer.open(0.08, release)  # a reader of 12.5 tokens a second
    stream.push(tokens)  # `release` gets the first at once, the others from the timer
    """

    def __init__(self, *, clock: Clock, timer: Timer) -> None:
        self.clock = clock
        self._timer = timer
        self._heads: list[tuple[float, int, PacedStream]] = []  # stale ones are skipped
        self._num_live_heads = 0
        self._tickets = count(1)
        self._armed: TimerHandle | None = None
        self._armed_for_s = float("inf")

    def open(
        self, interval_s: float, release: Release, *, max_held_s: float = math.inf
    ) -> "PacedStream":
        """Start a stream whose tokens are `interval_s` >= 0 apart, those that are read; 0 lets all
        pass at once. None is kept back for longer than `max_held_s` >= 0.

        `release` is called with tokens in order, from `push`, `flush` or the timer.
        """
        return PacedStream(self, interval_s, release, max_held_s)

    def check_integrity(self) -> None:
        """Assert that each stream with waiting tokens, and no other, has its head in the heap."""
        live = [(due_s, stream) for due_s, ticket, stream in self._heads if stream.ticket == ticket]
        assert len(live) == self._num_live_heads == len({id(stream) for _, stream in live})
        assert all(stream.next_due_s == due_s for due_s, stream in live)
        assert (self._armed is None) == (self._armed_for_s == float("inf"))
        if live:
            assert self._armed_for_s <= min(due_s for due_s, _ in live)

    def enqueue(self, stream: "PacedStream", due_s: float) -> int:
        """Queue a stream's head. Returns the ticket that tells it from the stream's older ones."""
        ticket = next(self._tickets)
        heapq.heappush(self._heads, (due_s, ticket, stream))
        self._num_live_heads += 1
        if due_s < self._armed_for_s:
            self._arm()
        return ticket

    def dequeue(self) -> None:
        """Note that a queued head has become stale."""
        self._num_live_heads -= 1
        if len(self._heads) > 2 * self._num_live_heads + 64:
            self._heads = [head for head in self._heads if head[2].ticket == head[1]]
            heapq.heapify(self._heads)

    def _arm(self) -> None:
        """Have the timer stand at the earliest head."""
        due_s = self._heads[0][0]
        if self._armed is not None:
            self._armed.cancel()
        now_s = self.clock()
        delay_s = min(max(0.0, due_s - now_s), MAX_TIMER_S)
        self._armed_for_s = min(due_s, now_s + delay_s)
        self._armed = self._timer(delay_s, self._wake)

    def _wake(self) -> None:
        """Release what is due in every stream, then arm the timer for the rest, also if one of
        them raises: the others must not stop with it.
        """
        self._armed, self._armed_for_s = None, float("-inf")  # `enqueue` need not arm meanwhile
        try:
            self._release_due(self.clock())
        finally:
            while self._heads and self._heads[0][2].ticket != self._heads[0][1]:
                heapq.heappop(self._heads)
            self._armed_for_s = float("inf")
            if self._heads:
                self._arm()

    def _release_due(self, now_s: float) -> None:
        while self._heads and self._heads[0][0] <= now_s:
            _, ticket, stream = heapq.heappop(self._heads)
            if stream.ticket == ticket:
                self._num_live_heads -= 1
                stream.release_due(now_s)


class PacedStream:
    """The waiting tokens of one reader. Made by `Pacer.open`."""

    def __init__(
        self, pacer: Pacer, interval_s: float, release: Release, max_held_s: float
    ) -> None:
        self._pacer = pacer
        self._clock = pacer.clock
        self._interval_s = interval_s
        self._max_held_s = max_held_s
        self._release: Release | None = release  # None: closed; its owner refers to it
        self._waiting: deque[DueToken] = deque()
        self._turn_s: float | None = None  # when the newest token that is read is due
        self.ticket = 0  # of the head in the pacer's heap; 0: none is queued

    @property
    def num_held(self) -> int:
        """Return the deposit: tokens that are generated and not yet due."""
        return len(self._waiting)

    @property
    def turn_s(self) -> float | None:
        """Return when the newest token that is read is due; None before the first."""
        return self._turn_s

    @property
    def next_due_s(self) -> float | None:
        return self._waiting[0].due_s if self._waiting else None

    def push(self, tokens: Sequence[Token], generated_s: float) -> int:
        """Take tokens generated at `generated_s`, neither in the future nor before those of earlier
        calls. One that no reader sees takes no turn: it waits for those before it only. Returns how
        many are held then.
        """
        if self._release is None:
            return 0
        waiting, latest_s = self._waiting, generated_s + self._max_held_s
        for token in tokens:
            if token.is_read:
                due_s = next_due_s(self._turn_s, generated_s, self._interval_s)
                if due_s > latest_s:
                    due_s = latest_s
                self._turn_s = due_s
            else:
                due_s = next_due_s(self._turn_s, generated_s, 0.0)
            waiting.append(DueToken(token, due_s))
        if not self.ticket:
            self.release_due(self._clock())
        return len(waiting)

    def release_due(self, now_s: float) -> None:
        """Release every token due by `now_s` and queue the next one."""
        self.ticket = 0
        waiting, due = self._waiting, []
        while waiting and waiting[0].due_s <= now_s:
            due.append(waiting.popleft())
        if waiting:
            self.ticket = self._pacer.enqueue(self, waiting[0].due_s)
        if due and self._release is not None:
            self._release(due)

    def repace(self, interval_s: float) -> None:
        """Have tokens be `interval_s` >= 0 apart from now on, those that wait too: the next one
        counts from the turn of the newest that was released.
        """
        now_s, waiting = self._clock(), list(self._waiting)
        read_s = next((held.due_s for held in waiting if held.token.is_read), None)
        turn_s = self._turn_s if read_s is None else read_s - self._interval_s
        self._forget()
        for token in (held.token for held in waiting):
            due_s = next_due_s(turn_s, now_s, interval_s if token.is_read else 0.0)
            due_s = min(due_s, now_s + self._max_held_s)
            turn_s = due_s if token.is_read else turn_s
            self._waiting.append(DueToken(token, due_s))
        self._interval_s, self._turn_s = interval_s, turn_s
        if waiting:
            self.release_due(now_s)

    def hasten(self, until_s: float) -> None:
        """Have all waiting tokens be due by `until_s`, generation having ended."""
        rest = [DueToken(held.token, min(held.due_s, until_s)) for held in self._waiting]
        self._forget()
        if rest:
            self._waiting.extend(rest)
            self.release_due(self._clock())

    def flush(self) -> None:
        """Release all waiting tokens now: they are due, generation having ended, or a call having
        begun.
        """
        now_s = self._clock()
        if self._turn_s is not None:
            self._turn_s = min(self._turn_s, now_s)
        rest = [DueToken(held.token, min(held.due_s, now_s)) for held in self._waiting]
        self._forget()
        if rest and self._release is not None:
            self._release(rest)

    def close(self) -> None:
        """Drop all waiting tokens and ignore later ones. May be called twice."""
        self._release = None
        self._forget()

    def _forget(self) -> None:
        self._waiting.clear()
        if self.ticket:
            self.ticket = 0
            self._pacer.dequeue()
