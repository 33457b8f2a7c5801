"""Where one request's KV is: the simulator's counts beside the executor's block owner."""

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.v1.core.block_pool import BlockPool

from services.control.requests.life import State
from services.executor.blocks.block_owner import BlockOwner
from services.executor.blocks.host_pool import HostPool
from services.placement.blocks import BlockGeometry
from services.placement.layer_placement import LayerPlacement
from simulator.memory.kv import KVState
from tests.fuzz import examples
from tests.unit.records import make_record

GEOMETRY = BlockGeometry(num_groups=4, block_size=4)
NUM_BLOCKS = 1_000


class Pair:
    """One request in the executor's terms and in the simulator's, through the same life."""

    def __init__(
        self, offloaded: frozenset[int], num_buffers: int, max_ahead_tokens: int = 0
    ) -> None:
        geometry = replace(GEOMETRY, max_ahead_tokens=max_ahead_tokens)
        pool = BlockPool(NUM_BLOCKS + 1, enable_caching=False, hash_block_size=4)
        record = make_record("a")
        self.owner = BlockOwner(pool, HostPool(NUM_BLOCKS), geometry, {"a": record})
        placement = LayerPlacement(offloaded=offloaded, num_staging=num_buffers)
        self.real = self.owner.draft(record, placement, num_slots=200)
        self.owner.adopt(self.real)
        record.enter(State.RUNNING)
        self.ours = KVState(
            request_id="a", geometry=geometry, mirrored=True, wanted_buffers=num_buffers
        )
        self.ours.offload(sorted(offloaded), num_free=0)

    def grow(self, num_tokens: int) -> None:
        growth, ahead = self.owner.growth, self.owner.geometry.max_ahead_tokens
        room = {"num_tokens": num_tokens + ahead, "num_accepted": num_tokens}
        assert self.ours.num_new(num_tokens) == growth.num_new_blocks(self.real, **room)
        self.ours.grow(num_tokens)
        growth.grow(self.real, **room)
        self.real.num_tokens = num_tokens

    def save(self) -> None:
        """Let all full blocks be on the host."""
        num_full = self.ours.num_full_blocks
        self.ours.num_sent_blocks = self.ours.num_copied_blocks = num_full
        self.ours.seal()
        for group in self.real.groups:
            assert self.owner.prepare_save(self.real, group, num_full)
            group.num_saves_sent = group.num_host_blocks = num_full
        self.owner.seal(self.real)

    def offload(self, groups: list[int]) -> None:
        self.ours.offload(groups, num_free=NUM_BLOCKS)
        self.owner.offload(self.real, groups)

    def restore(self, group: int) -> None:
        if group in self.ours.offloaded and group not in self.ours.restoring:
            job = self.ours.begin_restore(group, 1)
            assert self.owner.restores.begin(self.real, group)
            if not job.num_bytes:  # there is nothing to copy: the group is back
                job.done_s = 0.0
                self.ours.take_in_restores()

    def restored(self) -> None:
        for job in self.ours.restoring.values():
            job.done_s = 0.0
        groups = list(self.ours.restoring)
        self.ours.take_in_restores()
        for group in groups:
            restore = self.real.groups[group].restore
            assert restore is not None
            self.owner.restores.arrive(self.real, group, set(restore.under_way))

    def sleep(self) -> None:
        self.ours.sleep()
        self.owner.staging.drop(self.real)

    def wake(self) -> None:
        assert self.ours.num_to_wake == self.owner.staging.num_to_wake(self.real)
        assert self.ours.wake(num_free=NUM_BLOCKS)
        assert self.owner.staging.take(self.real)

    def uncache(self, num_blocks: int) -> None:
        """Let so many leading blocks be uncached, and a step compute those that are kept again."""
        if self.ours.asleep:
            return
        self.ours.uncache(num_blocks, num_free=NUM_BLOCKS)
        num_known = self.real.num_tokens
        self.owner.uncached.set_length(self.real, num_blocks, num_known=num_known)
        if self.real.retiring:
            self.owner.uncached.settle(self.real)

    def check(self) -> None:
        self.ours.check_integrity()
        self.real.check_integrity()
        assert self.ours.num_uncached == len(self.real.uncached)
        assert self.ours.num_saved == self.real.num_saved
        if not self.ours.restoring:
            assert self.ours.num_owned_when_copied == self.real.num_owned_when_copied
        assert self.ours.offloaded == tuple(self.real.offloaded)
        assert self.ours.num_buffers == len(self.real.staging)
        assert self.ours.num_owned == len(self.real.owned_blocks())


def test_a_resident_request_owns_a_row_per_group() -> None:
    pair = Pair(frozenset(), 1)
    pair.grow(10)
    pair.check()

    assert pair.ours.num_owned == 4 * 3


def test_blocks_leave_as_their_copies_are_complete() -> None:
    pair = Pair(frozenset(), 2)
    pair.grow(18)  # 4 full blocks and an open one
    pair.offload([1, 3])
    pair.check()
    assert pair.ours.num_owned == 4 * 5  # nothing is on the host yet

    pair.save()
    pair.check()
    # Two rows of 5, an open block each of the others, two buffers of 4.
    assert pair.ours.num_owned == 2 * 5 + 2 * 1 + 2 * 4


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("grow"), st.integers(1, 9)),
        st.tuples(st.just("offload"), st.integers(0, 3)),
        st.tuples(st.just("restore"), st.integers(0, 3)),
        st.tuples(st.just("restored"), st.none()),
        st.tuples(st.just("nap"), st.none()),
        st.tuples(st.just("uncache"), st.integers(0, 12)),
    ),
    max_size=24,
)


@settings(max_examples=examples(50))
@given(
    st.frozensets(st.integers(0, 3)),
    st.integers(1, 2),
    st.sampled_from((0, 3, 5)),
    st.integers(1, 40),
    OPERATIONS,
)
def test_the_executors_block_owner_owns_as_many(
    offloaded, num_buffers, max_ahead_tokens, prompt, operations
) -> None:
    # Copies to the host are complete after every step, so that all groups are alike, and no other
    # group leaves while one is on its way back. With the simulator no group leaves whose request
    # has something uncached.
    pair = Pair(offloaded, num_buffers, max_ahead_tokens)
    pair.grow(prompt)
    pair.save()
    for name, value in operations:
        if name == "grow":
            pair.grow(pair.ours.num_tokens + value)
            pair.save()
        elif name == "offload":
            if value in pair.ours.restoring or not (pair.ours.restoring or pair.ours.num_uncached):
                pair.offload([value])
        elif name == "uncache":
            if not pair.ours.offloaded:
                pair.uncache(value)
        elif name == "restore":
            pair.restore(value)
        elif name == "restored":
            pair.restored()
        elif not pair.ours.restoring:
            pair.sleep()
            pair.wake()
        pair.check()


def test_uncached_positions_are_counted_as_the_executor_counts_them() -> None:
    pair = Pair(frozenset(), 1)
    pair.grow(22)  # 5 full blocks and an open one
    pair.save()
    for num_blocks, num_owned in ((3, 4 * 3 + 3), (9, 4 * 1 + 5), (1, 4 * 5 + 1), (0, 4 * 6)):
        pair.uncache(num_blocks)
        pair.check()
        assert pair.ours.num_owned == num_owned

    pair.uncache(5)
    pair.grow(25)
    pair.check()
    assert pair.ours.num_owned == 4 * 2 + 5


def test_of_a_preempted_request_with_uncached_positions_the_same_is_kept() -> None:
    pair = Pair(frozenset(), 1)
    pair.grow(18)
    pair.save()
    pair.uncache(3)
    pair.grow(27)

    pair.owner.pool.free_blocks(reversed(pair.owner.park(pair.real)))
    kept, parked = pair.owner.records["a"].kv, pair.ours.parked()

    assert kept is not None
    assert parked is not None
    assert (kept.num_recomputed, parked.num_uncached) == (0, 0)
    assert (kept.num_tokens, kept.num_owned) == (parked.num_tokens, parked.num_owned) == (16, 0)


def test_what_is_kept_of_a_preempted_request_is_what_the_executor_keeps() -> None:
    pair = Pair(frozenset({1, 3}), 1)
    pair.grow(18)
    pair.save()
    pair.grow(27)  # two more full blocks, not on the host

    pair.owner.pool.free_blocks(reversed(pair.owner.park(pair.real)))
    kept, parked = pair.owner.records["a"].kv, pair.ours.parked()

    assert kept is not None
    assert parked is not None
    assert (parked.num_tokens, parked.num_host_blocks) == (kept.num_tokens, kept.num_host_blocks)
    assert (parked.num_tokens, parked.num_owned, parked.is_parked) == (16, 0, True)
    assert parked.num_to_wake == pair.owner.staging.num_to_wake(kept) == 4
    room = {"num_tokens": 27, "num_accepted": 27}
    assert parked.num_new(27) == pair.owner.growth.num_new_blocks(kept, **room)
    parked.check_integrity()
