"""Anchors: where a request may begin whose model has layers that keep a window of KV, or a state.

Columns of the prefix cache (`prefix_cache.py`) are one slot per layer group that keeps all KV. What
the other groups have belongs to one number of tokens; it is copied where turns end.
"""

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Container, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from services.control.counters import Counters


@dataclass(slots=True, eq=False, kw_only=True)
class Anchor:
    """Windows, states and open blocks on the host, behind a chain of columns.

    They belong to one number of tokens: those of the columns, and `tokens`.
    """

    key: Hashable  # of the last column before it
    tokens: tuple[int, ...]  # behind that column
    slots: tuple[int, ...]
    copy: Any  # which slots have what, as its maker knows it
    num_users: int = 0  # requests that have yet to take the step behind it
    num_uses: int = 0
    is_passed: bool = False  # a conversation has left another, further on, and began with that one
    prompt: "Anchor | None" = None  # that the same request left where its prompt ended


@dataclass(frozen=True, slots=True)
class ComingTurn:
    """A request that has ended, on its way to the host, with which another is to begin."""

    num_tokens: int  # that the other need not compute once it is there
    num_more: int  # of them, beyond what is there by now
    num_blocks: int  # of one layer group each, to be copied, and before them


@dataclass(frozen=True, slots=True)
class AnchorShare:
    """A part of an anchor, as large as a column, in the book of what is retained."""

    key: Hashable  # of the last column before the anchor
    number: int


class Anchors:
    """Anchors by the column before them; those that no request uses are as good as free."""

    def __init__(self, counters: Counters) -> None:
        self.num_idle_slots = 0
        self._counters = counters
        self._all: defaultdict[Hashable, list[Anchor]] = defaultdict(list)
        self._passed: OrderedDict[Anchor, None] = OrderedDict()  # of the idle ones, these go first
        self._idle: OrderedDict[Anchor, None] = OrderedDict()

    def __len__(self) -> int:
        return sum(map(len, self._all.values()))

    @property
    def num_passed_slots(self) -> int:
        """Return what `evict_passed` would take at most."""
        return sum(len(one.slots) for one in self._passed)

    def behind(self, key: Hashable) -> Sequence[Anchor]:
        """Return the anchors behind a column."""
        return self._all.get(key, ())

    def has(self, key: Hashable, tokens: tuple[int, ...]) -> bool:
        """Return whether there is one of these tokens behind a column."""
        return any(one.tokens == tokens for one in self.behind(key))

    def publish(self, anchor: Anchor) -> bool:
        """Let requests begin with an anchor; False if there is one of the same tokens."""
        if self.has(anchor.key, anchor.tokens):
            return False
        self._counters.num_published_anchors += 1
        self._all[anchor.key].append(anchor)
        self._rest(anchor)
        return True

    def use(self, anchor: Anchor) -> None:
        """Count one more user."""
        if not anchor.num_users:
            self._wake(anchor)
        if anchor.prompt is not None:
            self.passed(anchor.prompt)
        anchor.num_users += 1
        anchor.num_uses += 1
        self._counters.num_anchor_hits += 1

    def release(self, anchor: Anchor) -> list[int]:
        """Count one user less; return its slots if it is not found any more and has none left."""
        anchor.num_users -= 1
        if anchor.num_users:
            return []
        if anchor not in self.behind(anchor.key):
            return list(anchor.slots)
        self._rest(anchor)
        return []

    def passed(self, anchor: Anchor) -> None:
        """Take in that a request which began with it has left another one, further on.

        Where that was the only one the next turn begins further on, too. So it does where the next
        turn of the request that left it began further on.
        """
        if anchor.num_uses <= 1 and not anchor.num_users and anchor in self._idle:
            self._wake(anchor)
            anchor.is_passed = True
            self._rest(anchor)

    def _rest(self, anchor: Anchor) -> None:
        (self._passed if anchor.is_passed else self._idle)[anchor] = None
        self.num_idle_slots += len(anchor.slots)

    def _wake(self, anchor: Anchor) -> None:
        del (self._passed if anchor.is_passed else self._idle)[anchor]
        self.num_idle_slots -= len(anchor.slots)
        anchor.is_passed = False

    def evict_passed(self, num_slots: int) -> list[int]:
        """Take the slots of idle anchors that conversations have passed, as `evict` does."""
        return self._evict(self._passed, num_slots)

    def evict(self, num_slots: int) -> list[int]:
        """Take the slots of idle anchors, at least so many together, or all; return them."""
        return self._evict(self._idle, num_slots)

    def _evict(self, pile: OrderedDict[Anchor, None], num_slots: int) -> list[int]:
        slots: list[int] = []
        while len(slots) < num_slots and pile:
            self._counters.num_evicted_anchors += 1
            slots.extend(self._forget(next(iter(pile))))
        return slots

    def forget_behind(self, key: Hashable) -> list[int]:
        """Let the anchors behind a column go with it; return the slots of those not used."""
        self._counters.num_evicted_anchors += len(self.behind(key))
        return [slot for anchor in [*self.behind(key)] for slot in self._forget(anchor)]

    def forget(self, is_gone: Callable[[Anchor], bool]) -> list[int]:
        """Let some not be found any more; return the slots of those that no request uses."""
        gone = [one for anchors in self._all.values() for one in anchors if is_gone(one)]
        return [slot for anchor in gone for slot in self._forget(anchor)]

    def _forget(self, anchor: Anchor) -> Sequence[int]:
        self._all[anchor.key].remove(anchor)
        if not self._all[anchor.key]:
            del self._all[anchor.key]
        if anchor.num_users:
            return ()
        self._wake(anchor)
        return anchor.slots

    def check_integrity(self, used: Iterable[Anchor], columns: Container[Hashable]) -> list[int]:
        """Assert that users are what was counted, and columns there; return every slot."""
        num_users = Counter(used)
        known = [one for anchors in self._all.values() for one in anchors]
        everything = {*known, *num_users}
        assert all(one.num_users == num_users[one] for one in everything), "an anchor's users"
        assert all(key in columns for key in self._all), "an anchor without its columns"
        idle = {one for one in known if not one.num_users}
        assert idle == self._idle.keys() | self._passed.keys()
        assert self.num_idle_slots == sum(len(one.slots) for one in idle)
        return [slot for one in everything for slot in one.slots]
