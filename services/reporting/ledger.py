"""What one sender still has to tell the tracker: the newest absolute counts of its requests.

Pure bookkeeping with the time as an argument; `services.reporting.reporter` does the calls.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from evenflow.tracker.v1 import tracker_pb2 as pb

NOW = float("-inf")  # due time of an entry that should go with the next message


class RequestRef(NamedTuple):
    """Names one routing of one request."""

    executor_id: str
    request_id: str
    generation: int  # greater for every later routing of the same id, >= 1


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerLimits:
    """How long things are kept and how often they are repeated. Seconds."""

    heartbeat_s: float = 10.0  # a request without news is reported again after this
    first_repeat_s: float = 0.05  # an unknown request is repeated after this, then twice this, ...
    last_repeat_s: float = 2.0  # ... up to this
    linger_s: float = 60.0  # an ended, acknowledged request is kept so long to rebuild a lost store
    unknown_s: float = 60.0  # an ended request that stays unknown so long is given up
    unsent_s: float = 600.0  # an ended request is given up after this without any tracker


@dataclass(slots=True, kw_only=True, eq=False)
class Entry:
    """The newest that is known of one request. Owned by the ledger."""

    ref: RequestRef
    registration: pb.Registration | None = None
    needs_registering: bool = False
    num_generated: int | None = None  # None: this sender does not report it
    num_delivered: int | None = None  # None: this sender does not report it
    state: "pb.RequestState.ValueType" = pb.REQUEST_STATE_UNSPECIFIED
    ended_at_s: float | None = None
    version: int = 1  # grows with every change
    acknowledged: int = 0  # the newest version that the tracker applied
    times_unknown: int = 0  # answers "unknown" in a row
    unknown_since_s: float = NOW  # the first of them
    due_s: float = NOW

    @property
    def key(self) -> tuple[str, str]:
        return self.ref.executor_id, self.ref.request_id

    @property
    def has_news(self) -> bool:
        return self.version > self.acknowledged

    def to_progress(self) -> pb.Progress:
        return pb.Progress(
            executor_id=self.ref.executor_id,
            request_id=self.ref.request_id,
            generation=self.ref.generation,
            num_generated_tokens=self.num_generated,
            num_delivered_tokens=self.num_delivered,
            state=self.state,
        )


class Sent(NamedTuple):
    """One entry as it was when a message was made."""

    entry: Entry
    version: int


class ProgressLedger:
    """Entries by request, merged by maximum, forgotten only when the tracker has their end.

    A greater generation of a request replaces the entry; a smaller one is ignored.
    """

    def __init__(self, limits: LedgerLimits) -> None:
        self._limits = limits
        self._entries: dict[tuple[str, str], Entry] = {}

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def num_pending(self) -> int:
        """Return how many entries hold something that the tracker has not applied."""
        return sum(e.has_news or e.needs_registering for e in self._entries.values())

    def next_due_s(self) -> float:
        """Return when the next entry should be sent; infinity if there is none."""
        return min((entry.due_s for entry in self._entries.values()), default=float("inf"))

    def register(self, registration: pb.Registration) -> None:
        """Note a routed request. Repeating it keeps what is known of the same generation."""
        ref = RequestRef(registration.executor_id, registration.request_id, registration.generation)
        entry = self.entry(ref)
        if entry is not None:
            entry.registration = registration
            entry.needs_registering = True
            entry.due_s = NOW

    def entry(self, ref: RequestRef) -> Entry | None:
        """Return the entry to write to, made if needed; None if a newer generation is known."""
        key = (ref.executor_id, ref.request_id)
        entry = self._entries.get(key)
        if entry is None or entry.ref.generation < ref.generation:
            entry = self._entries[key] = Entry(ref=ref)
        return entry if entry.ref.generation == ref.generation else None

    def take_due(self, now_s: float, *, limit: int) -> list[Sent]:
        """Return up to `limit` entries to send, those that waited longest first.

        Ended entries whose time is over are forgotten here.
        """
        for key in [key for key, e in self._entries.items() if self._is_over(e, now_s)]:
            del self._entries[key]
        due = [(key, e) for key, e in self._entries.items() if e.due_s <= now_s][:limit]
        for key, _ in due:  # to the end of the order, so that a full message starves none
            self._entries[key] = self._entries.pop(key)
        return [Sent(entry, entry.version) for _, entry in due]

    def mark_registered(self, sent: Iterable[Sent]) -> None:
        """Note that the tracker has the registrations of `sent`; they are still to be reported."""
        for entry, _ in sent:
            entry.needs_registering = False

    def mark_applied(self, sent: Iterable[Sent], now_s: float) -> None:
        """Note that the tracker applied `sent`; what changed since is still due."""
        for entry, version in sent:
            entry.acknowledged = max(entry.acknowledged, version)
            entry.times_unknown = 0
            entry.due_s = NOW if entry.has_news else now_s + self._limits.heartbeat_s

    def mark_unknown(self, sent: Iterable[Sent], now_s: float) -> None:
        """Note that the tracker does not know `sent`: register if possible, and repeat.

        If it has known one of them before, it has lost its store: everything is due again.
        """
        lost = False
        for entry, _ in sent:
            lost = lost or entry.acknowledged > 0
            entry.acknowledged = 0
            entry.needs_registering = entry.registration is not None
            if not entry.times_unknown:
                entry.unknown_since_s = now_s
            wait_s = self._limits.first_repeat_s * 2.0 ** min(entry.times_unknown, 30)
            entry.due_s = now_s + min(wait_s, self._limits.last_repeat_s)
            entry.times_unknown += 1
        if lost:
            self.mark_lost()

    def mark_lost(self) -> None:
        """Send everything that is known as soon as possible: the tracker may know nothing."""
        for entry in self._entries.values():
            if not entry.times_unknown:
                entry.due_s = NOW

    def forget(self, sent: Iterable[Sent]) -> None:
        """Drop entries that a newer writer owns."""
        for entry, _ in sent:
            if self._entries.get(entry.key) is entry:
                del self._entries[entry.key]

    def _is_over(self, entry: Entry, now_s: float) -> bool:
        if entry.ended_at_s is None:
            return False
        if entry.times_unknown:
            since_s = max(entry.ended_at_s, entry.unknown_since_s)
            return now_s - since_s >= self._limits.unknown_s
        if entry.has_news or entry.needs_registering:
            limit_s = self._limits.unsent_s
        else:
            limit_s = self._limits.linger_s
        return now_s - entry.ended_at_s >= limit_s
