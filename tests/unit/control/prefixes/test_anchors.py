"""Anchors: found behind their columns, counted as free while idle, gone in the right order."""

import pytest

from services.control.counters import Counters
from services.control.prefixes.anchors import Anchor
from services.control.prefixes.prefix_cache import Column, PrefixCache

PER_COLUMN, PER_ANCHOR = 2, 3  # slots


class Cache:
    """A prefix cache with chains of columns, each released by its request."""

    def __init__(self) -> None:
        self.cache = PrefixCache(Counters())
        self.cache.needs_anchors = True
        self.num_slots = 0
        self.used: list[list[Column]] = []

    def slots(self, number: int) -> tuple[int, ...]:
        self.num_slots += number
        return tuple(range(self.num_slots - number, self.num_slots))

    def chain(self, name: str, length: int) -> list[Column]:
        columns = [Column(f"{name}{n}", self.slots(PER_COLUMN), uid=0) for n in range(length)]
        for column in columns:
            self.cache.publish(column)
        self.used.append(columns)
        return columns

    def anchor(self, column: Column, *tokens: int) -> Anchor:
        anchor = Anchor(
            key=column.key, tokens=tuple(tokens), slots=self.slots(PER_ANCHOR), copy=None
        )
        assert self.cache.anchors.publish(anchor)
        return anchor

    def end(self, columns: list[Column]) -> None:
        self.used.remove(columns)
        assert self.cache.release(columns) == []

    def check(self, *used: Anchor) -> None:
        self.cache.check_integrity(self.used, used)

    @property
    def num_idle(self) -> int:
        return self.cache.num_idle_slots + self.cache.anchors.num_idle_slots


@pytest.fixture
def cache() -> Cache:
    return Cache()


def test_an_anchor_of_the_same_tokens_is_no_second_one(cache: Cache) -> None:
    (column,) = cache.chain("a", 1)
    first, other = cache.anchor(column, 1, 2), cache.anchor(column, 1)

    again = Anchor(key=column.key, tokens=(1, 2), slots=cache.slots(PER_ANCHOR), copy=None)

    assert not cache.cache.anchors.publish(again)
    assert list(cache.cache.anchors.behind(column.key)) == [first, other]
    assert cache.cache.anchors.behind("else") == ()


def test_a_column_takes_the_anchors_behind_it_along(cache: Cache) -> None:
    columns = cache.chain("a", 2)
    cache.anchor(columns[0], 1)
    cache.anchor(columns[1])
    cache.end(columns)
    assert cache.num_idle == 2 * PER_COLUMN + 2 * PER_ANCHOR

    taken = cache.cache.evict(1)  # the last column goes first

    assert len(taken) == PER_COLUMN + PER_ANCHOR
    assert cache.num_idle == PER_COLUMN + PER_ANCHOR
    assert not cache.cache.anchors.behind("a1")
    assert cache.cache.anchors.behind("a0")
    cache.check()


def test_columns_without_an_anchor_behind_them_go_before_all_others(cache: Cache) -> None:
    anchored, bare = cache.chain("a", 2), cache.chain("b", 3)
    cache.anchor(anchored[1])
    cache.anchor(bare[0])
    cache.end(anchored)  # used longest ago
    cache.end(bare)

    expected = sorted([*bare[1].slots, *bare[2].slots])

    assert sorted(cache.cache.evict(2 * PER_COLUMN)) == expected

    assert len(cache.cache.anchors) == 2
    cache.check()


def test_an_anchor_that_its_only_conversation_has_passed_goes_first(cache: Cache) -> None:
    columns = cache.chain("a", 2)
    branch, turn = cache.anchor(columns[0], 1), cache.anchor(columns[0], 2)
    for _ in range(2):  # where two begin, a third may
        cache.cache.anchors.use(branch)
        assert cache.cache.anchors.release(branch) == []
    cache.cache.anchors.use(turn)
    assert cache.cache.anchors.release(turn) == []

    cache.cache.anchors.passed(branch)
    cache.cache.anchors.passed(turn)
    cache.end(columns)

    assert sorted(cache.cache.evict(1)) == sorted(turn.slots)
    assert list(cache.cache.anchors.behind("a0")) == [branch]
    assert cache.num_idle == 2 * PER_COLUMN + PER_ANCHOR
    cache.check()


def test_an_anchor_that_is_used_again_is_not_passed_any_more(cache: Cache) -> None:
    columns = cache.chain("a", 1)
    anchor = cache.anchor(columns[0])
    cache.cache.anchors.use(anchor)
    cache.cache.anchors.release(anchor)
    cache.cache.anchors.passed(anchor)

    cache.cache.anchors.use(anchor)

    assert cache.cache.evict(1) == []  # its column is used, too
    assert cache.cache.anchors.release(anchor) == []
    cache.check()


def test_all_that_is_idle_can_be_taken_while_columns_are_used(cache: Cache) -> None:
    columns = cache.chain("a", 2)
    idle, used = cache.anchor(columns[0]), cache.anchor(columns[1])
    cache.cache.anchors.use(used)
    assert cache.num_idle == PER_ANCHOR

    assert sorted(cache.cache.evict(100)) == sorted(idle.slots)

    assert cache.num_idle == 0
    cache.check(used)


def test_what_is_forgotten_while_it_is_used_ends_with_its_last_user(cache: Cache) -> None:
    columns = cache.chain("a", 1)
    anchor = cache.anchor(columns[0])
    cache.cache.anchors.use(anchor)
    cache.cache.anchors.use(anchor)

    assert cache.cache.forget(lambda column: True) == []
    assert not cache.cache.anchors.behind("a0")
    cache.check(anchor, anchor)

    assert cache.cache.anchors.release(anchor) == []
    assert cache.cache.anchors.release(anchor) == list(anchor.slots)


def test_idle_anchors_are_forgotten_by_their_slots(cache: Cache) -> None:
    columns = cache.chain("a", 1)
    gone, kept = cache.anchor(columns[0], 1), cache.anchor(columns[0], 2)

    assert cache.cache.anchors.forget(lambda one: gone.slots[0] in one.slots) == [*gone.slots]

    assert list(cache.cache.anchors.behind("a0")) == [kept]
    cache.check()
