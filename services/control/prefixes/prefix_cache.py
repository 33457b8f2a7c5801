"""Prefix caching on the host: the KV of a full block is found again by the hash of its tokens.

A *column* is one full block of a request in every layer group, on the host on every rank. Its key,
in the executor vLLM's block hash, stands for its tokens, all those before them, and the salt. Until
its copies are complete, a column is there only for those that share its blocks in the pool: always,
where the host has no room.
Live requests use columns; a column that none uses stays until its room is wanted, the one that
was used longest ago going first. Those that are kept (`retention.py`) go after all others: first
those of turns that wait for their tools, then those that clients asked for. One that is not on the
host stays while free blocks of the pool hold it.

Where layers keep a window or a state, columns bring no request back by themselves. An *anchor* is
what its next token attends to there; a request begins with the columns before one.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice, takewhile
from typing import Any

from services.control.counters import Counters
from services.control.prefixes.anchors import Anchor, Anchors
from services.control.prefixes.retention import Retention, RetentionBudget

NO_SLOT = -1  # stands for the slot of a block that has no room on the host


@dataclass(slots=True, eq=False)
class Column:
    """One block position of a request, on the host or in the pool only."""

    key: Hashable
    slots: tuple[int, ...]  # one per layer group; none: without room on the host
    uid: int  # of its KV, see `RequestKV.uid`
    num_users: int = 1  # live requests whose KV this is
    # What has it in the pool or on its way there: a request or a trunk; None: nothing, or one whose
    # steps compute it.
    holder: Any = None
    is_complete: bool = True  # on the host
    is_left: bool = False  # in the pool, in free blocks that still hold it in every layer group
    author: str = ""  # the request whose steps computed it; unset where that does not matter

    @property
    def is_in_pool(self) -> bool:
        """Whether live requests or free blocks have it there; live ones not in every layer."""
        return self.is_left or self.holder is not None

    def slot(self, group: int) -> int:
        """Return a layer group's slot, or what stands for none."""
        return self.slots[group] if self.slots else NO_SLOT


@dataclass(slots=True, eq=False)
class FoundPrefix:
    """What one request's leading blocks were found to be when it last asked."""

    columns: tuple[Column, ...] = ()
    num_complete: int = 0  # of these, leading ones that are on the host
    num_keys: int = 0  # that were asked for
    generation: int = 0  # of the cache then


class PrefixCache:
    """Columns by hash. Those of live requests that came second with a hash are not in it."""

    def __init__(self, counters: Counters) -> None:
        self.num_idle_slots = 0  # of columns that no request uses
        self.generation = 0  # another one whenever a column is published, evicted or forgotten
        self._last_loss = 0  # the generation since which every column that was found is still here
        self._columns: dict[Hashable, Column] = {}
        self._idle: OrderedDict[Hashable, Column] = OrderedDict()  # in the order in which they go
        # Idle ones whose turn to go it was, and that are kept: in the same order.
        self._awaited: OrderedDict[Hashable, Column] = OrderedDict()
        self._kept: OrderedDict[Hashable, Column] = OrderedDict()
        self._piles = (self._idle, self._awaited, self._kept)  # the first ones go first
        self.awaited = Retention(self._not_kept)  # for turns that wait for their tools
        self.retention = Retention(self._not_kept)  # for clients that asked for it
        self.anchors = Anchors(counters)
        self.needs_anchors = False  # what has none behind it is of no use
        self._counters = counters

    @property
    def num_columns(self) -> int:
        return len(self._columns)

    def find(self, keys: Iterable[Hashable]) -> list[Column]:
        """Return the columns of a request's leading blocks, up to the first that is not here."""
        found = []
        for key in keys:
            column = self._columns.get(key)
            if column is None:
                break
            found.append(column)
        return found

    def get(self, key: Hashable) -> Column | None:
        """Return the column of one block, if it is here."""
        return self._columns.get(key)

    def find_again(
        self, found: FoundPrefix, keys: Iterable[Hashable], num_keys: int
    ) -> Sequence[Column]:
        """Return what `find` does of the first `num_keys`, and remember it in `found`.

        While nothing has changed no key is looked up; while only more is cached, none of those
        that were found.
        """
        is_void = found.num_keys != num_keys or found.generation < self._last_loss
        if is_void:
            found.columns, found.num_complete = (), 0
        if is_void or found.generation != self.generation:
            found.columns += tuple(self.find(islice(keys, len(found.columns), num_keys)))
            found.num_keys, found.generation = num_keys, self.generation
        found.num_complete += num_complete(found.columns, first=found.num_complete)
        return found.columns

    def publish(self, column: Column) -> None:
        """Let a column be found, unless its hash has one that is used, or on the host."""
        known = self._columns.get(column.key)
        if known is None or not (known.num_users or known.is_complete):
            self._columns[column.key] = column
            self._counters.num_published_columns += 1
            self.generation += 1
            if known is not None:
                self._lost_some()

    def share(self, columns: Sequence[Column]) -> None:
        """Count one more user of each."""
        for column in columns:
            column.num_users += 1
            for pile in self._piles:
                if pile.get(column.key) is column:
                    del pile[column.key]
                    self.num_idle_slots -= len(column.slots)

    def release(self, columns: Sequence[Column]) -> list[int]:
        """Count one user less of each, and return the slots of those that have none now.

        The last ones go first when room is wanted: without what is before it a block is not found.
        Before all others those go without an anchor behind them, where that is needed.
        """
        slots: list[int] = []
        is_of_use = not self.needs_anchors
        for column in reversed(columns):
            column.num_users -= 1
            is_of_use = is_of_use or bool(self.anchors.behind(column.key))
            if column.num_users:
                continue
            known = self._columns.get(column.key)
            if known is column and column.is_complete:
                self._idle[column.key] = column
                self._idle.move_to_end(column.key, last=is_of_use)
                self.num_idle_slots += len(column.slots)
                continue
            slots.extend(column.slots)
            if known is column and column.is_left:
                column.slots = ()
            elif known is column:
                del self._columns[column.key]
                self._lost_some()
            elif known is not None and not known.num_users and known.is_complete:
                for pile in self._piles:
                    pile.pop(column.key, None)  # its twin was used until now
                self._idle[column.key] = known
        return slots

    def evict(self, num_slots: int) -> list[int]:
        """Take the slots of idle columns, at least so many together, or all; return them.

        Of those that are kept none goes while there are others. A column that free blocks of
        the pool still hold is found there from then on. With a column go the anchors behind it;
        those that were passed go before any column, and those behind columns in use after all.
        """
        slots = self.anchors.evict_passed(num_slots)
        num_columns = 0
        while len(slots) < num_slots and any(self._piles):
            key, column = self._take_next()
            num_columns += 1
            self.num_idle_slots -= len(column.slots)
            slots.extend(column.slots)
            slots.extend(self.anchors.forget_behind(key))
            column.slots, column.is_complete = (), False
            if not column.is_left:
                del self._columns[key]
            self._counters.num_evicted_columns += 1
        if num_columns:
            self._lost_some()
        return [*slots, *self.anchors.evict(num_slots - len(slots))]

    def can_evict(self, num_slots: int) -> bool:
        """Return whether `evict` would take so many slots before anything that is kept."""
        num_found = self.anchors.num_passed_slots
        for key, column in self._idle.items():
            if num_found >= num_slots:
                break
            if not self.is_kept(key):
                behind = self.anchors.behind(key)
                idle = (one for one in behind if not one.num_users and not one.is_passed)
                num_found += len(column.slots) + sum(len(one.slots) for one in idle)
        return num_found >= num_slots

    def _take_next(self) -> tuple[Hashable, Column]:
        """Return the idle column that goes next, which is none of the idle ones any more."""
        for pile in self._piles:
            while pile:
                key, column = pile.popitem(last=False)
                its_own = self._pile(key)
                if its_own is pile:
                    self._counters.num_evicted_awaited_columns += pile is self._awaited
                    self._counters.num_evicted_retained_columns += pile is self._kept
                    return key, column
                its_own[key] = column
        raise AssertionError("no column is idle")

    def is_kept(self, key: Hashable) -> bool:
        """Return whether a column goes after those that nothing keeps."""
        return key in self.retention or key in self.awaited

    def _pile(self, key: Hashable) -> OrderedDict[Hashable, Column]:
        if key in self.retention:
            return self._kept
        return self._awaited if key in self.awaited else self._idle

    def retain(
        self,
        account: str,
        session: str,
        columns: Sequence[tuple[Hashable, float]],
        budget: RetentionBudget,
    ) -> int:
        """Keep columns that a client asked for, as `Retention.hold` does; what the account has kept
        for turns that wait for their tools makes room in its budget.
        """
        num_held = self.retention.hold(account, session, columns, budget)
        self.awaited.fit(account, budget - self.retention.used(account))
        return num_held

    def retain_awaited(
        self,
        account: str,
        session: str,
        columns: Sequence[tuple[Hashable, float]],
        budget: RetentionBudget,
    ) -> int:
        """Keep columns of a turn that waits for its tool, as `Retention.hold` does, as far as the
        budget goes beside what the account asked for.
        """
        left = budget - self.retention.used(account)
        return self.awaited.hold(account, session, columns, left)

    def _not_kept(self, key: Hashable) -> None:
        """Let a column go before those that were used after it, where nothing else keeps it."""
        its_own = self._pile(key)
        for pile in (self._awaited, self._kept):
            if pile is not its_own and (column := pile.pop(key, None)) is not None:
                self._idle[key] = column
                self._idle.move_to_end(key, last=False)

    @property
    def num_awaited_columns(self) -> int:
        """Return how many columns are kept for turns that wait for their tools, on the host or
        not.
        """
        return len(self.awaited)

    @property
    def num_retained_columns(self) -> int:
        """Return how many columns are retained, on the host or not."""
        return len(self.retention)

    def forget(self, is_gone: Callable[[Column], bool]) -> list[int]:
        """Let columns not be found any more; return the slots of those that no request uses."""
        slots: list[int] = []
        for column in [column for column in self._columns.values() if is_gone(column)]:
            del self._columns[column.key]
            for pile in self._piles:
                if pile.pop(column.key, None) is not None:
                    self.num_idle_slots -= len(column.slots)
                    slots.extend(column.slots)
            slots.extend(self.anchors.forget_behind(column.key))
        self._lost_some()
        return slots

    def lose(self, column: Column) -> None:
        """Take in that free blocks do not hold a column any more."""
        is_elsewhere = column.num_users or column.is_complete
        if not is_elsewhere and self._columns.get(column.key) is column:
            del self._columns[column.key]
            self._lost_some()

    def _lost_some(self) -> None:
        self.generation += 1
        self._last_loss = self.generation

    def check_integrity(
        self, used: Iterable[Sequence[Column]], anchors: Iterable[Anchor] = ()
    ) -> list[int]:
        """Assert that what each live request uses is what was counted; return every slot."""
        num_users = Counter(column for columns in used for column in columns)
        everything = {*self._columns.values(), *num_users}
        for column in everything:
            assert column.num_users == num_users[column], "a column has other users than counted"
        idle = [column for column in everything if not column.num_users]
        on_host = {column for column in idle if column.is_complete}
        unused = [column for pile in self._piles for column in pile.values()]
        assert len(unused) == len({*unused}), "an unused column has two places"
        assert on_host == {*unused}, "an unused column is lost, or used"
        assert all(key in self.retention for key in self._kept), "a column is kept for nothing"
        kept = (key in self.awaited or key in self.retention for key in self._awaited)
        assert all(kept), "a column waits for nothing"
        self.awaited.check_integrity()
        self.retention.check_integrity()
        in_pool = [column for column in idle if not column.is_complete]
        assert all(one.is_left and not one.slots for one in in_pool), "a column is nowhere"
        slots = [slot for column in everything for slot in column.slots]
        assert self.num_idle_slots == sum(len(column.slots) for column in idle)
        return [*slots, *self.anchors.check_integrity(anchors, self._columns)]


def num_complete(columns: Sequence[Column], *, first: int = 0) -> int:
    """Return how many columns are on the host from the `first` one on, one behind the other."""
    return sum(
        1 for _ in takewhile(lambda column: column.is_complete, islice(columns, first, None))
    )


def num_alike(some: Sequence[Column], others: Sequence[Column]) -> int:
    """Return how many leading columns are the same objects."""
    length = min(len(some), len(others))
    if [*some[:length]] == [*others[:length]]:  # they are equal to themselves only
        return length
    pairs = zip(some, others, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] is pair[1], pairs))
