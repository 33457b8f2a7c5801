"""What a request leaves that ends, where groups keep windows or a state, and who begins with it."""

from collections.abc import Sequence

import pytest
from vllm.v1.core.kv_cache_utils import BlockHash

from services.control.prefixes.anchors import Anchor, ComingTurn
from services.control.requests.life import State
from services.control.requests.request_record import RequestRecord
from services.executor.blocks.residency import RequestKV, SideStage
from services.executor.blocks.transfers.losses import Losses
from services.executor.blocks.transfers.moves import BlockMoves
from services.executor.step_messages import FailureCause, StepFeedback
from services.placement.blocks import STATE
from services.placement.layer_placement import LayerPlacement
from tests.unit.executor.simulated_ranks import Simulation
from tests.unit.records import make_record

pytestmark = pytest.mark.filterwarnings("default")

SIZE, NUM_GROUPS = 4, 4
TOKENS = list(range(100, 140))


def keys(num_blocks: int) -> list[BlockHash]:
    return [BlockHash(bytes([n])) for n in range(num_blocks)]


class Rig:
    def __init__(self, *, num_slots: int = 400) -> None:
        self.sim = Simulation(
            seed=1, depth=0, windows=(5, 9, STATE), num_blocks=90, num_slots=num_slots
        )
        self.sim.owner.trunks.is_on = False
        self.ends = self.sim.transfers.turn_ends

    def begin(self, num_tokens: int) -> RequestKV:
        kv = self.sim.admit(LayerPlacement(), num_slots=60)
        kv.keys = keys(10)
        self.sim.step({kv.request_id: num_tokens})
        return kv

    def end(self, kv: RequestKV, token_ids: Sequence[int] = TOKENS) -> RequestRecord[RequestKV]:
        """End a request as the scheduler does."""
        name = kv.request_id
        record = self.sim.records.pop(name)
        del self.sim.lengths[name]
        self.ends.end(record, token_ids)
        if record.kv is not None:
            self.sim.owner.forget(record.kv)
        return record

    def settle(self) -> None:
        """Let all copies end."""
        for _ in range(4):
            self.sim.step({})
            for rank in self.sim.ranks:
                for _ in range(50):
                    rank.engine.progress()
            self.sim.settle()
            self.sim.owner.check_integrity()

    def left(self, num_tokens: int) -> Anchor:
        """Return the anchor of a request that has ended."""
        self.end(self.begin(num_tokens))
        assert self.ends.is_busy
        self.settle()
        assert not self.ends.is_busy
        key = keys(10)[num_tokens // SIZE - 1]
        (anchor,) = self.sim.owner.host.cache.anchors.behind(key)
        return anchor

    def find(self, token_ids: Sequence[int], *, num_keys: int = 10) -> tuple[int, Anchor | None]:
        columns = self.sim.owner.host.cache.find(keys(num_keys))
        return self.ends.find(columns, token_ids)


@pytest.mark.parametrize("num_tokens", [20, 21])
def test_who_ends_leaves_its_pool_and_an_anchor_behind_its_columns(num_tokens: int) -> None:
    rig = Rig()

    anchor = rig.left(num_tokens)

    assert anchor.tokens == tuple(TOKENS[20:num_tokens])
    assert rig.find(TOKENS) == (5, anchor)
    sim = rig.sim
    assert sim.pool.get_num_free_blocks() == sim.num_blocks - 1
    assert sim.owner.host.num_used == 0  # what none uses is free
    assert sim.owner.host.cache.anchors.num_idle_slots == len(anchor.slots) > 0
    assert not sim.owner.kvs


def test_it_is_found_by_its_own_tokens_if_one_more_is_to_be_computed() -> None:
    rig = Rig()
    anchor = rig.left(21)

    assert rig.find(TOKENS[:22]) == (5, anchor)
    assert rig.find(TOKENS[:21]) == (0, None)
    assert rig.find([*TOKENS[:20], 7, 7]) == (0, None)
    assert rig.find(TOKENS, num_keys=4) == (0, None)


def test_there_must_be_room_for_what_it_takes() -> None:
    rig = Rig()
    anchor = rig.left(21)
    host = rig.sim.owner.host
    num_taken = 5 * NUM_GROUPS + len(anchor.slots)
    promise = rig.sim.admit(LayerPlacement(), num_slots=host.num_unpromised - num_taken + 1).promise

    assert rig.find(TOKENS) == (0, None)
    host.withdraw(promise)
    assert rig.find(TOKENS) == (5, anchor)


def test_who_begins_with_it_is_as_one_that_was_parked_there() -> None:
    rig = Rig()
    anchor = rig.left(21)
    owner, record = rig.sim.owner, make_record("next")
    rig.sim.records["next"] = record
    owner.adopt_prefix(record, owner.host.cache.find(keys(5)), keys(10))
    assert record.kv is not None

    rig.ends.begin_with(record.kv, anchor)

    assert (record.kv.is_parked, record.kv.num_side_tokens) == (True, 21)
    assert record.kv.num_slots_of_its_own == owner.host.num_used == 20 + len(anchor.slots)
    owner.check_integrity()
    owner.forget(record.kv)
    assert (owner.host.num_used, anchor.num_users) == (0, 0)
    assert rig.find(TOKENS) == (5, anchor)
    owner.check_integrity()


def begins(rig: Rig, name: str, anchor: Anchor) -> RequestKV:
    """Let a request begin with five columns and an anchor, and bring back all that it can."""
    owner, record = rig.sim.owner, make_record(name)
    rig.sim.records[name] = record
    owner.adopt_prefix(record, owner.host.cache.find(keys(5)), keys(10))
    assert record.kv is not None
    rig.ends.begin_with(record.kv, anchor)
    return record.kv


def test_it_is_found_in_the_pool_with_all_columns_before_it() -> None:
    rig = Rig()
    anchor, owner = rig.left(21), rig.sim.owner
    moves = BlockMoves(owner, rig.sim.transfers)
    num_blocks = 5 * NUM_GROUPS + len(anchor.slots)
    assert owner.blocks.num_left == num_blocks
    first, second = begins(rig, "first", anchor), begins(rig, "second", anchor)
    assert moves.num_first_to_load(first) == 0

    first.record.enter(State.LOADING)
    moves.begin_load(first, range(NUM_GROUPS), num_buffers=1)
    loading = moves.load_on(first, 90)

    assert loading.is_complete  # in the same step
    assert (owner.counters.num_found_blocks, owner.counters.num_loaded_blocks) == (num_blocks, 0)
    assert moves.num_first_to_load(second) == len(anchor.slots)
    second.record.enter(State.LOADING)
    moves.begin_load(second, range(NUM_GROUPS), num_buffers=1)
    assert not moves.load_on(second, 90).is_complete
    assert owner.counters.num_loaded_blocks == num_blocks
    owner.check_integrity()


def test_who_is_put_back_tells_nobody_of_what_it_had_found() -> None:
    rig = Rig()
    anchor, owner = rig.left(21), rig.sim.owner
    kv = begins(rig, "next", anchor)
    assert owner.side_copies.bring_back(kv, max_blocks=90) == len(anchor.slots)

    owner.side_copies.put_back(kv)

    assert owner.orders.take(loading=[], saves=[]).found == []
    assert owner.pool.get_num_free_blocks() == rig.sim.num_blocks - 1
    assert owner.blocks.num_left_of(anchor) == 0
    owner.check_integrity()


def test_a_turn_on_its_way_to_the_host_is_coming_for_the_next() -> None:
    rig = Rig()
    kv = rig.begin(21)
    rig.end(kv)
    rig.ends.advance()
    assert kv.side_copy is not None
    lacking = sum(5 - group.num_host_blocks for group in kv.groups)
    everything = ComingTurn(21, 21, kv.side_copy.num_blocks + lacking)

    def coming(token_ids: Sequence[int], *, num_found: int = 0) -> ComingTurn | None:
        return rig.ends.coming(keys(10), token_ids, num_found=num_found)

    assert coming(TOKENS) == coming(TOKENS[:22]) == everything
    assert coming(TOKENS, num_found=20) == ComingTurn(21, 1, everything.num_blocks)
    assert coming(TOKENS, num_found=21) is None
    assert coming(TOKENS[:21]) is None  # one token is to be computed
    assert coming([*TOKENS[:20], 7, 7]) is None
    assert rig.ends.coming(keys(4), TOKENS, num_found=0) is None
    rig.settle()
    assert coming(TOKENS) is None
    assert rig.find(TOKENS)[0] == 5


def test_tokens_that_nobody_knows_leave_nothing() -> None:
    rig = Rig()

    record = rig.end(rig.begin(21), TOKENS[:20])

    assert record.kv is None
    assert not rig.ends.is_busy


def test_what_was_forgotten_meanwhile_is_not_found() -> None:
    rig = Rig()
    rig.end(rig.begin(21))
    rig.sim.owner.forget_prefixes()

    rig.settle()

    assert not rig.ends.is_busy
    assert rig.find(TOKENS) == (0, None)
    assert rig.sim.owner.host.num_free == rig.sim.num_slots


@pytest.mark.parametrize("cause", list(FailureCause))
def test_what_is_lost_on_its_way_is_not_found(cause: FailureCause) -> None:
    rig = Rig()
    kv = rig.begin(21)
    rig.end(kv)
    step = rig.sim.owner.orders.next_step
    feedback = StepFeedback(step=step, saved_step=0, lost_requests={kv.request_id: cause})

    Losses(rig.sim.owner, rig.sim.transfers).absorb(feedback)

    assert not rig.ends.is_busy
    rig.settle()
    assert rig.find(TOKENS) == (0, None)
    assert rig.sim.owner.host.num_free == rig.sim.num_slots


def test_another_request_of_that_name_takes_its_place() -> None:
    rig = Rig()
    kv = rig.begin(21)
    rig.end(kv)

    rig.ends.drop([kv.request_id, "nobody"])

    assert not rig.sim.owner.kvs
    rig.sim.owner.check_integrity()


def test_a_copy_without_room_leaves_nothing() -> None:
    rig = Rig(num_slots=62)
    kv = rig.begin(21)
    rig.settle()
    assert kv.num_host_blocks == 5
    host = rig.sim.owner.host
    host.withdraw(kv.promise)
    assert host.take(kv.promise, host.num_free - 3) is not None

    rig.end(kv)
    rig.ends.advance()

    assert not rig.ends.is_busy
    assert rig.find(TOKENS) == (0, None)


def test_a_passed_anchor_goes_before_the_one_further_on() -> None:
    rig = Rig()
    first = rig.left(21)
    cache = rig.sim.owner.host.cache
    cache.anchors.use(first)
    cache.anchors.release(first)
    kv = rig.begin(30)
    kv.began = first

    rig.end(kv)
    rig.settle()

    assert first.is_passed
    assert rig.find(TOKENS)[0] == 7
    assert kv.side_copy is None or kv.side_copy.stage is SideStage.KEPT
