"""What is retained goes last, within budgets, until its time is over."""

import random
from collections.abc import Hashable
from dataclasses import dataclass, field
from math import ceil

import pytest

from services.control.prefixes.prefix_cache import Column
from services.control.prefixes.retention import MAX_SESSIONS, Retention, RetentionBudget
from services.executor.blocks.host_pool import HostPool, SlotPromise

NUM_GROUPS, NUM_SLOTS = 2, 24
BUDGET = RetentionBudget(num_columns=5, column_s=60.0)
LARGE = RetentionBudget(num_columns=8, column_s=400.0)  # two of them are more than the host has
NUM_STEPS = 40


def ends() -> tuple[Retention, list[Hashable]]:
    ended: list[Hashable] = []
    return Retention(ended.append), ended


def test_columns_are_retained_up_to_their_instant() -> None:
    book, ended = ends()
    assert book.hold("a", "s", [("x", 5.0), ("y", 3.0)], BUDGET) == 2
    book.advance(2.9)
    assert "y" in book
    book.advance(3.0)
    assert "y" not in book
    assert "x" in book
    assert ended == ["y"]


def test_the_later_of_two_sessions_instants_counts_and_each_is_released_by_name() -> None:
    book, ended = ends()
    book.hold("a", "s", [("x", 5.0)], BUDGET)
    book.hold("a", "t", [("x", 9.0)], BUDGET)
    assert book.used("a") == RetentionBudget(num_columns=1, column_s=9)
    assert book.release("a", "t") == 1
    assert book.used("a") == RetentionBudget(num_columns=1, column_s=5)
    assert book.release("b", "s") == 0  # another account's
    assert book.release("a", "s") == 1
    assert ended == ["x"]
    assert book.release("a", "s") == 0


def test_what_no_session_asked_for_is_released_by_none() -> None:
    book, _ = ends()
    book.hold("a", "", [("x", 5.0)], BUDGET)
    assert book.release("a", "") == 0
    assert "x" in book


def test_sessions_are_told_by_what_they_retain_most_first() -> None:
    book, _ = ends()
    book.hold("a", "s", [("x", 5.0), ("y", 3.0)], BUDGET)
    book.hold("a", "", [("x", 9.0)], BUDGET)
    book.hold("b", "s", [(n, 4.0) for n in range(3)], BUDGET)
    names = [(one.account, one.session, one.num_columns) for one in book.largest(2)]
    assert names == [("b", "s", 3), ("a", "s", 2)]
    assert len([*book.sessions]) == 3
    assert dict(book.columns("a", "s")) == {"x": 5, "y": 3}
    book.advance(4.0)
    assert [one.num_columns for one in book.largest(9)] == [1, 1]


@pytest.mark.parametrize(
    ("columns", "num_held"),
    [
        ([(n, 2.0) for n in range(9)], 5),  # five columns at most
        ([(n, 20.0) for n in range(9)], 3),  # 60 column seconds
        ([(0, 61.0)], 0),
        ([(0, 60.0)], 1),
        ([(0, 0.0)], 0),  # is over
    ],
)
def test_a_hint_is_clipped_to_its_accounts_budget(
    columns: list[tuple[Hashable, float]], num_held: int
) -> None:
    book, _ = ends()
    assert book.hold("a", "s", columns, BUDGET) == num_held
    assert len(book) == num_held
    book.check_integrity()


def test_a_budget_comes_back_as_time_goes_by_and_renewal_costs_the_difference() -> None:
    book, _ = ends()
    assert book.hold("a", "s", [("x", 60.0)], BUDGET) == 1
    assert book.hold("a", "s", [("x", 61.0)], BUDGET) == 0  # is retained for 60 s all the same
    book.advance(10.0)
    assert book.hold("a", "s", [("x", 70.0)], BUDGET) == 1
    assert book.used("a") == RetentionBudget(num_columns=1, column_s=60)
    assert book.hold("b", "s", [("y", 20.0)], BUDGET) == 1  # a budget of its own


def test_sessions_beyond_the_most_retain_for_all_without_a_name() -> None:
    book, _ = ends()
    for number in range(MAX_SESSIONS + 3):
        book.hold("a", f"s{number}", [("x", 5.0)], BUDGET)
        book.check_integrity()
    for number in range(MAX_SESSIONS + 3):
        assert book.release("a", f"s{number}") == (number < MAX_SESSIONS)
    assert "x" in book
    book.advance(5.0)
    assert "x" not in book


def test_the_sessions_that_have_been_there_longest_make_room_for_others() -> None:
    book, ended = ends()
    for number in range(4):
        book.hold("a", f"s{number}", [(number, 10.0)], BUDGET)
    book.hold("b", "s", [("y", 10.0)], BUDGET)
    book.fit("a", RetentionBudget(num_columns=3, column_s=25.0))
    assert ended == [0, 1]
    book.fit("a", RetentionBudget(num_columns=2, column_s=20.0))
    assert ended == [0, 1]
    book.fit("a", RetentionBudget(num_columns=0, column_s=0.0))
    assert ended == [0, 1, 2, 3]
    assert "y" in book


def test_what_is_left_of_a_budget_is_never_less_than_nothing() -> None:
    assert BUDGET - RetentionBudget(num_columns=2, column_s=9.5) == RetentionBudget(
        num_columns=3, column_s=50.5
    )
    nothing = RetentionBudget(num_columns=0, column_s=0.0)
    assert BUDGET - RetentionBudget(num_columns=6, column_s=61.0) == nothing


def test_what_waits_for_a_tool_goes_behind_what_is_unkept_and_ahead_of_what_was_asked_for() -> None:
    pool = HostPool(4 * NUM_GROUPS)
    cache = pool.cache
    columns = []
    for key in ("asked", "awaits", "both", "plain"):
        slots = pool.take(SlotPromise(), NUM_GROUPS)
        assert slots is not None
        column = Column(key, tuple(slots), uid=0)
        cache.publish(column)
        pool.release([column])
        columns.append(column)
    cache.awaited.hold("a", "s", [("awaits", 60.0), ("both", 9.0)], LARGE)
    cache.retention.hold("a", "s", [("asked", 9.0)], LARGE)
    cache.retention.hold("a", "t", [("both", 60.0)], LARGE)

    def evicted() -> str:
        before = {one.key for one in columns if one.slots}
        pool.give_back(cache.evict(NUM_GROUPS))
        pool.check_integrity([], [])
        (key,) = before - {one.key for one in columns if one.slots}
        return str(key)

    assert (evicted(), evicted()) == ("plain", "awaits")
    assert cache._counters.num_evicted_awaited_columns == 1
    cache.awaited.advance(9.0)  # what was asked for is so still
    cache.retention.advance(9.0)
    assert (evicted(), evicted()) == ("asked", "both")
    assert cache._counters.num_evicted_retained_columns == 1


@dataclass
class History:
    """A host with requests that end, hints, evictions, sessions' ends, time and resets."""

    draw: random.Random
    pool: HostPool = field(default_factory=lambda: HostPool(NUM_SLOTS))
    now_s: float = 0.0
    # By account, session and column, as the book should have it.
    until_s: dict[tuple[str, str, Hashable], int] = field(default_factory=dict)

    def request(self) -> None:
        """A request has its columns on the host, and ends; what it hints at is retained."""
        keys = [f"{self.draw.choice('abc')}{n}" for n in range(self.draw.randint(1, 6))]
        columns = self._columns(keys)
        if self.draw.random() < 0.5:
            self._hint([column.key for column in columns])
        if self.draw.random() < 0.3:
            self._await_tool([column.key for column in columns])
        self.pool.release(columns)

    def _columns(self, keys: list[str]) -> list[Column]:
        cache, columns = self.pool.cache, []
        for key in keys:
            if found := cache.find([key]):
                cache.share(found)
                columns += found
                continue
            free_before, broken = self._ordinary(), self._num_broken()
            slots = self.pool.take(SlotPromise(), NUM_GROUPS)
            if slots is None:
                break
            asked, awaited = (
                now - before for now, before in zip(self._num_broken(), broken, strict=True)
            )
            assert not asked + awaited or free_before[0] < NUM_GROUPS, "room was there"
            assert not asked or free_before[1] < NUM_GROUPS, "what waits for a tool was there"
            column = Column(key, tuple(slots), uid=0)
            cache.publish(column)
            columns.append(column)
        return columns

    def _num_broken(self) -> tuple[int, int]:
        counters = self.pool.cache._counters
        return counters.num_evicted_retained_columns, counters.num_evicted_awaited_columns

    def _ordinary(self) -> tuple[int, int]:
        """Return the slots that are free, or of idle columns that are not kept; and the same with
        those that wait for a tool.
        """
        cache = self.pool.cache
        idle = [c for c in cache._columns.values() if not c.num_users]
        asked = sum(len(c.slots) for c in idle if self._is_retained(c.key))
        awaited = sum(
            len(c.slots) for c in idle if c.key in cache.awaited and not self._is_retained(c.key)
        )
        return self.pool.num_free - asked - awaited, self.pool.num_free - asked

    def _is_retained(self, key: Hashable) -> bool:
        return any(one == key for _, _, one in self.until_s)

    def _hint(self, keys: list[Hashable]) -> None:
        account, session = self.draw.choice("kl"), self.draw.choice(["", "s", "t"])
        until_s = self.now_s + self.draw.choice([3.0, 20.5, 300.0])
        columns = [(key, until_s) for key in keys]
        num_held = self.pool.cache.retain(account, session, columns, LARGE)
        for key in keys[:num_held]:
            place = (account, session, key)
            self.until_s[place] = max(ceil(until_s), self.until_s.get(place, 0))

    def _await_tool(self, keys: list[Hashable]) -> None:
        columns = [(key, self.now_s + self.draw.choice([3.0, 60.0])) for key in keys]
        session = self.draw.choice(["", "s", "t"])
        self.pool.cache.retain_awaited(self.draw.choice("kl"), session, columns, LARGE)

    def end_session(self) -> None:
        account, session = self.draw.choice("kl"), self.draw.choice("st")
        mine = [place for place in self.until_s if place[:2] == (account, session)]
        assert self.pool.cache.retention.release(account, session) == len(mine)
        self.pool.cache.awaited.release(account, session)
        for place in mine:
            del self.until_s[place]

    def pass_time(self) -> None:
        self.now_s += self.draw.choice([0.3, 4.0, 30.0])
        self.pool.cache.retention.advance(self.now_s)
        self.pool.cache.awaited.advance(self.now_s)
        self.until_s = {k: s for k, s in self.until_s.items() if s > int(self.now_s)}

    def reset(self) -> None:
        self.pool.forget_all()
        self.until_s.clear()

    def check(self) -> None:
        book, awaited = self.pool.cache.retention, self.pool.cache.awaited
        for account in "kl":
            both = [book.used(account), awaited.used(account)]
            assert sum(used.num_columns for used in both) <= LARGE.num_columns
            assert sum(used.column_s for used in both) <= LARGE.column_s
        assert len(book) == len({key for _, _, key in self.until_s})
        assert all(key in book for _, _, key in self.until_s)
        self.pool.check_integrity([], [])


def run_history(seed: int) -> tuple[int, int]:
    """Return how many columns had to go that clients asked for, and that waited for a tool."""
    history = History(random.Random(seed))
    for _ in range(NUM_STEPS):
        step = history.draw.choices(
            [history.request, history.end_session, history.pass_time, history.reset],
            [12, 2, 3, 0.2],
        )[0]
        step()
        history.check()
    return history._num_broken()


@pytest.mark.parametrize(
    "num_histories", [100, pytest.param(10_000, marks=pytest.mark.nightly)], ids=["100", "10000"]
)
def test_no_budget_is_exceeded_and_nothing_retained_goes_while_there_is_room(
    num_histories: int,
) -> None:
    asked, awaited = map(sum, zip(*map(run_history, range(num_histories)), strict=True))
    assert asked > 0  # for want of room: two accounts may retain more than the host has
    assert awaited > 0
