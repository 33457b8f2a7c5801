"""Columns are found by the tokens that are in them, and end only when nobody uses them."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from vllm.v1.core.kv_cache_utils import BlockHash

from services.control.counters import Counters
from services.control.prefixes.prefix_cache import Column, FoundPrefix, PrefixCache
from services.executor.blocks.host_pool import HostPool, SlotPromise
from tests.unit.executor.simulated_ranks import found_in, keys_of

NUM_GROUPS = 2
NUM_SLOTS = 24
MAX_BLOCKS = 4
WAITING = (("a", "a", "b", "a"), ("b", "b", "a", "b"))  # prompts of requests that ask in each step

Blocks = tuple[str, ...]  # what is in the leading blocks of a request


def column(key: str, *slots: int) -> Column:
    return Column(keys_of((key,))[0], slots, uid=0)


@dataclass
class Holder:
    """A live request's copies on the host: columns, then slots of its own."""

    blocks: Blocks
    columns: list[Column] = field(default_factory=list)
    slots: list[tuple[int, ...]] = field(default_factory=list)  # of the blocks after the columns
    promise: SlotPromise = field(default_factory=SlotPromise)

    @property
    def num_blocks(self) -> int:
        return len(self.columns) + len(self.slots)


class CachedPrefixes(RuleBasedStateMachine):
    """Requests copy their blocks, publish some, begin with what others published, and end."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = HostPool(NUM_SLOTS, num_ready=NUM_SLOTS // 2)
        self.memory: dict[int, tuple[BlockHash, int] | None] = {}  # key and group, by slot
        self.holders: dict[str, Holder] = {}
        self.num_made = self.num_uids = 0
        self.waiting = {blocks: FoundPrefix() for blocks in WAITING}

    @rule(
        blocks=st.lists(st.sampled_from("ab"), min_size=1, max_size=MAX_BLOCKS),
        mirrored=st.booleans(),
    )
    def arrive(self, blocks: Sequence[str], mirrored: bool) -> None:
        holder = Holder(tuple(blocks), found_in(self.pool, keys_of(tuple(blocks))))
        found = len(holder.columns)
        assert [c.key for c in holder.columns] == keys_of(tuple(blocks))[:found]
        self.pool.cache.share(holder.columns)
        self.num_made += 1
        self.holders[f"r{self.num_made}"] = holder
        if mirrored:
            self.pool.reserve(holder.promise, NUM_GROUPS * (len(blocks) - found))

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def copy(self, data: st.DataObject) -> None:
        """A request's next block goes to the host, into slots that nobody needs."""
        name = data.draw(st.sampled_from(sorted(self.holders)))
        holder = self.holders[name]
        if holder.num_blocks == len(holder.blocks):
            return
        could = self.pool.can_take(holder.promise, NUM_GROUPS)
        slots = self.pool.take(holder.promise, NUM_GROUPS)
        assert (slots is not None) == could
        if slots is not None:
            key = keys_of(holder.blocks)[holder.num_blocks]
            self.memory |= {slot: (key, group) for group, slot in enumerate(slots)}
            holder.slots.append(tuple(slots))

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def publish(self, data: st.DataObject) -> None:
        holder = self.holders[data.draw(st.sampled_from(sorted(self.holders)))]
        if holder.slots:
            self.num_uids += 1
            key = keys_of(holder.blocks)[len(holder.columns)]
            made = Column(key, holder.slots.pop(0), uid=self.num_uids)
            self.pool.cache.publish(made)
            holder.columns.append(made)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.holders)))
        holder = self.holders.pop(name)
        self.pool.release(holder.columns)
        self.pool.give_back([slot for slots in holder.slots for slot in slots])
        self.pool.withdraw(holder.promise)

    @rule(num_ready=st.integers(0, NUM_SLOTS))
    def open_slots(self, num_ready: int) -> None:
        self.pool.open_slots(num_ready)

    @rule(slots=st.frozensets(st.integers(0, NUM_SLOTS // 2 - 1), max_size=2))
    def quarantine(self, slots: frozenset[int]) -> None:
        """Hung copies may write these: whoever has one loses its KV, and nobody finds it."""
        self.pool.quarantine(slots)
        self.memory |= dict.fromkeys(slots)
        for name, holder in list(self.holders.items()):
            mine = [*(c.slots for c in holder.columns), *holder.slots]
            if any(not slots.isdisjoint(some) for some in mine):
                self.holders.pop(name)
                self.pool.release(holder.columns)
                self.pool.give_back([slot for some in holder.slots for slot in some])
                self.pool.withdraw(holder.promise)

    @rule(letter=st.sampled_from("ab"))
    def forget(self, letter: str) -> None:
        self.pool.forget(lambda column: column.key.endswith(letter.encode()))
        assert not self.pool.cache.find(keys_of((letter,)))

    @invariant()
    def every_slot_is_one_thing(self) -> None:
        owned = [s for h in self.holders.values() for slots in h.slots for s in slots]
        holders = self.holders.values()
        self.pool.check_integrity(owned, [h.promise for h in holders], [h.columns for h in holders])

    @invariant()
    def whoever_finds_a_block_finds_its_tokens(self) -> None:
        for holder in self.holders.values():
            for columns in (holder.columns, self.pool.cache.find(keys_of(holder.blocks))):
                for column, key in zip(columns, keys_of(holder.blocks), strict=False):
                    expected = [(key, group) for group in range(NUM_GROUPS)]
                    assert [self.memory[slot] for slot in column.slots] == expected

    @invariant()
    def whoever_asks_again_finds_what_a_newcomer_does(self) -> None:
        for blocks, found in self.waiting.items():
            keys, cache = keys_of(blocks), self.pool.cache
            assert list(cache.find_again(found, keys, len(keys))) == cache.find(keys)


TestCachedPrefixes = CachedPrefixes.TestCase
TestCachedPrefixes.settings = settings(max_examples=15, stateful_step_count=30, deadline=None)


def test_a_longest_chain_from_the_front_is_found() -> None:
    cache, keys = PrefixCache(Counters()), keys_of(("a", "b", "c"))
    columns = [Column(key, (n,), uid=n) for n, key in enumerate(keys)]
    cache.publish(columns[0])
    cache.publish(columns[2])

    assert cache.find(keys) == columns[:1]
    cache.publish(columns[1])
    assert cache.find(keys) == columns
    assert cache.find(keys_of(("a", "c"))) == columns[:1]


class CountedKey:
    """Equal to itself only; counts how often it is looked up."""

    def __init__(self) -> None:
        self.num_lookups = 0

    def __hash__(self) -> int:
        self.num_lookups += 1
        return id(self)


def num_lookups(keys: Sequence[CountedKey]) -> int:
    """Return how often any of them was looked up since this was last asked."""
    total = sum(key.num_lookups for key in keys)
    for key in keys:
        key.num_lookups = 0
    return total


def test_a_request_that_asks_again_looks_up_only_what_may_have_changed() -> None:
    cache, found, keys = PrefixCache(Counters()), FoundPrefix(), [CountedKey() for _ in range(6)]
    columns = [Column(key, (n,), uid=n) for n, key in enumerate(keys)]
    for one in columns[:3]:
        cache.publish(one)
    num_lookups(keys)

    def ask() -> tuple[int, int]:
        """Return how many columns are found, and how many keys that took."""
        return len(cache.find_again(found, keys, len(keys))), num_lookups(keys)

    assert ask() == (3, 4)
    assert ask() == (3, 0)
    cache.publish(column("another's", 9))
    assert ask() == (3, 1)
    cache.publish(columns[3])
    num_lookups(keys)
    assert ask() == (4, 2)
    cache.release(columns[:4])
    cache.share(columns[:3])  # those in use stay
    cache.evict(1)
    num_lookups(keys)
    assert ask() == (3, 4)
    assert len(cache.find_again(found, keys, 2)) == 2
    assert ask()[0] == 3
    cache.forget(lambda one: one is columns[1])
    num_lookups(keys)
    assert ask() == (1, 2)
    assert ask() == (1, 0)


def test_what_was_used_longest_ago_goes_first_and_tails_before_heads() -> None:
    counters = Counters()
    cache = PrefixCache(counters)
    old = [column("old head", 0), column("old tail", 1)]
    new = [column("new head", 2), column("new tail", 3)]
    for one in (*old, *new):
        cache.publish(one)
    cache.release(new)
    cache.release(old)
    cache.share(new)
    cache.release(new)

    assert [cache.evict(1) for _ in range(4)] == [[1], [0], [3], [2]]
    assert cache.evict(1) == []
    assert counters.num_evicted_columns == 4


def test_the_second_to_publish_a_block_gets_its_slots_back_and_keeps_the_first_ones_young() -> None:
    counters = Counters()
    cache = PrefixCache(counters)
    first, twin, other = column("same", 0), column("same", 1), column("other", 2)
    for one in (first, twin, other):
        cache.publish(one)
    assert counters.num_published_columns == 2
    cache.release([first])
    cache.release([other])

    assert cache.release([twin]) == [1]
    assert cache.evict(1) == [2]


def test_a_column_in_use_is_not_evicted_and_a_forgotten_one_ends_with_its_last_user() -> None:
    cache, one = PrefixCache(Counters()), column("a", 0, 1)
    cache.publish(one)
    cache.share([one])

    assert cache.evict(2) == []
    assert cache.forget(lambda _: True) == []
    assert cache.find([one.key]) == []
    assert cache.release([one]) == []
    assert cache.release([one]) == [0, 1]


def test_integrity_notices_a_user_that_was_not_counted() -> None:
    cache, one = PrefixCache(Counters()), column("a", 0)
    cache.publish(one)

    cache.check_integrity([[one]])
    with pytest.raises(AssertionError, match="other users"):
        cache.check_integrity([[one], [one]])
    with pytest.raises(AssertionError, match="other users"):
        cache.check_integrity([])
