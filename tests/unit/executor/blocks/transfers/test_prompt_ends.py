"""What a request leaves where its prompt ends, and goes on: who may begin there, and when."""

import pytest

from services.control.prefixes.anchors import Anchor
from services.control.prefixes.prefix_cache import Column
from services.control.prefixes.retention import RetentionBudget
from services.executor.blocks.host_pool import SlotPromise
from services.executor.blocks.residency import RequestKV, SideStage
from services.executor.blocks.transfers.losses import Losses
from services.executor.step_messages import FailureCause, StepFeedback
from tests.unit.executor.blocks.transfers.test_turn_ends import NUM_GROUPS, TOKENS, Rig, keys
from tests.unit.executor.simulated_ranks import LateEngine

pytestmark = pytest.mark.filterwarnings("default")


class PromptRig(Rig):
    def stands(self, kv: RequestKV, num_tokens: int = 21, *, is_drained: bool = True) -> bool:
        ends = self.sim.transfers.prompt_ends
        return ends.stands(kv, TOKENS[:num_tokens], is_drained=is_drained)

    def stood(self, num_tokens: int = 21) -> RequestKV:
        """Return a request that has left an anchor where its prompt ended."""
        kv = self.begin(num_tokens)
        assert self.stands(kv, num_tokens)
        self.settle()
        assert not self.stands(kv, num_tokens)
        return kv

    def states(self) -> list[int]:
        """Return the tokens that the state of each anchor belongs to, of a rank's host memory."""
        contents = [self.sim.ranks[0].engine.host[a.copy.slots[-1][0]] for a in self.anchors()]
        return [content[2] for content in contents if content is not None]

    def anchors(self, num_tokens: int = 21) -> list[Anchor]:
        cache = self.sim.owner.host.cache
        return [*cache.anchors.behind(keys(10)[num_tokens // 4 - 1])]


@pytest.mark.parametrize("num_tokens", [20, 21])
def test_others_begin_where_a_prompt_ended_while_its_request_goes_on(num_tokens: int) -> None:
    rig = PromptRig()

    kv = rig.stood(num_tokens)

    (anchor,) = rig.anchors()
    assert anchor.tokens == tuple(TOKENS[20:num_tokens])
    assert rig.find(TOKENS) == (5, anchor)
    rig.sim.step({kv.request_id: 1})
    rig.sim.owner.check_integrity()
    assert rig.find(TOKENS) == (5, anchor)
    assert anchor.copy.num_tokens == num_tokens  # as it was, whatever has been computed since
    assert rig.sim.owner.counters.num_published_anchors == 1


def test_the_state_is_that_of_the_prompts_end_because_its_request_stands_still(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig, hurried = PromptRig(), PromptRig()
    rig.stood()
    kv = hurried.begin(21)
    assert hurried.stands(kv)

    with monkeypatch.context() as late:  # the copy, behind the step that it begins with
        late.setattr(LateEngine, "progress", lambda self: None)
        hurried.sim.step({kv.request_id: 1})  # all the same

    assert rig.states() == [21]
    hurried.settle()
    assert hurried.states() == [22]


def test_it_stands_still_from_the_step_that_ends_its_prompt_on() -> None:
    rig = PromptRig()
    kv = rig.begin(21)

    assert rig.stands(kv, is_drained=False)
    assert kv.prompt_copy is None  # a step in flight may still write to its blocks
    assert rig.stands(kv)
    assert rig.stands(kv)


def test_nothing_is_copied_that_is_there() -> None:
    rig = PromptRig()
    rig.end(rig.stood())
    rig.settle()

    kv = rig.begin(21)

    assert not rig.stands(kv)
    assert kv.prompt_copy is None
    assert len(rig.anchors()) == 1


def test_of_two_that_end_the_same_prompt_at_once_one_leaves_an_anchor() -> None:
    rig = PromptRig()
    both = [rig.begin(21), rig.begin(21)]
    assert all(rig.stands(kv) for kv in both)

    rig.settle()

    (anchor,) = rig.anchors()
    assert sorted(len(kv.side_slots) for kv in both) == [0, 0]
    for kv in both:
        assert not rig.stands(kv)
        rig.sim.end(kv.request_id)
    rig.settle()
    assert rig.sim.owner.host.num_used == 0
    assert rig.find(TOKENS) == (5, anchor)


@pytest.mark.parametrize("num_tokens", [3, 21])
def test_it_goes_on_at_once_without_a_full_block_or_without_room(num_tokens: int) -> None:
    rig = PromptRig()
    kv = rig.begin(num_tokens)
    rig.settle()
    host = rig.sim.owner.host
    host.withdraw(kv.promise)
    assert host.reserve(kv.promise, host.num_unpromised - 3)

    assert not rig.stands(kv, num_tokens)
    assert not rig.stands(kv, num_tokens)
    rig.sim.owner.check_integrity()


def test_nothing_that_is_kept_goes_for_an_anchor() -> None:
    rig = PromptRig(num_slots=110)  # 60 are promised; of what is left columns have 44
    kv = rig.begin(21)
    host, cache = rig.sim.owner.host, rig.sim.owner.host.cache
    columns = [
        Column(f"kept{n}", tuple(host.take(SlotPromise(), NUM_GROUPS) or ()), uid=0)
        for n in range(11)
    ]
    for column in columns:
        cache.publish(column)
    host.release(columns)
    budget = RetentionBudget(num_columns=99, column_s=9e9)
    cache.retain("alice", "s", [(column.key, 600.0) for column in columns], budget)

    assert not rig.stands(kv)

    assert cache.num_columns >= len(columns)
    cache.retention.release("alice", "s")
    kv.prompt_copy = None
    assert rig.stands(kv)


def test_what_was_promised_to_a_request_is_not_taken_for_its_anchor() -> None:
    rig = PromptRig()
    kv = rig.begin(21)
    num_promised = kv.promise.num_slots

    assert rig.stands(kv)

    assert kv.promise.num_slots == num_promised
    assert len(kv.side_slots) == 10


def test_a_copy_that_fails_lets_its_request_go_on_and_leaves_nothing() -> None:
    rig = PromptRig()
    kv = rig.begin(21)
    rig.settle()
    num_used = rig.sim.owner.host.num_used
    assert rig.stands(kv)
    step = rig.sim.owner.orders.next_step
    rig.sim.transfers.plan_step({})
    failed = {(step, kv.request_id, 5): FailureCause.FAILED}

    losses = Losses(rig.sim.owner, rig.sim.transfers)
    assert not losses.absorb(StepFeedback(step=step, saved_step=step, failed_saves=failed))

    assert not rig.stands(kv)
    assert rig.anchors() == []
    assert rig.sim.owner.host.num_used == num_used
    rig.sim.owner.check_integrity()


def test_one_that_ends_before_it_is_copied_leaves_nothing() -> None:
    rig = PromptRig()
    kv = rig.begin(21)
    assert rig.stands(kv)

    rig.sim.end(kv.request_id)
    rig.settle()

    assert rig.anchors() == []
    assert rig.sim.owner.host.num_free == rig.sim.num_slots


def test_what_was_forgotten_meanwhile_is_not_found() -> None:
    rig = PromptRig()
    kv = rig.begin(21)
    assert rig.stands(kv)
    rig.sim.owner.forget_prefixes()

    rig.settle()

    assert not rig.stands(kv)
    assert rig.anchors() == []
    rig.sim.end(kv.request_id)
    rig.settle()
    assert rig.sim.owner.host.num_free == rig.sim.num_slots


def leave(rig: PromptRig, kv: RequestKV) -> None:
    """Have a request parked."""
    assert not rig.sim.transfers.may_leave(kv)
    rig.settle()
    assert rig.sim.transfers.may_leave(kv)
    rig.sim.park(kv.request_id)


def test_one_that_is_parked_leaves_its_anchor_once_all_of_it_is_on_the_host() -> None:
    rig = PromptRig()
    rig.sim.transfers.write_through._budget = lambda num_under_way: 0
    kv = rig.begin(21)
    assert rig.stands(kv)
    rig.settle()
    assert not rig.stands(kv)
    assert rig.anchors() == []  # its full blocks are in the pool only

    leave(rig, kv)
    rig.settle()

    assert rig.sim.kv(kv.request_id).is_parked
    assert len(rig.anchors()) == 1


def test_one_that_is_parked_with_its_copy_under_way_leaves_no_anchor() -> None:
    rig = PromptRig()
    kv = rig.begin(21)
    assert not rig.sim.transfers.may_leave(kv)
    rig.settle()
    assert rig.stands(kv)

    rig.sim.park(kv.request_id)
    rig.settle()

    parked = rig.sim.kv(kv.request_id)
    assert (parked.is_parked, parked.prompt_copy) == (True, None)
    assert rig.anchors() == []
    rig.sim.owner.check_integrity()


def test_where_the_next_turn_begins_further_on_it_goes_first() -> None:
    """The answer came back as the model wrote it."""
    rig = PromptRig()
    kv = rig.stood()
    (first,) = rig.anchors()
    rig.sim.step({kv.request_id: 9})
    rig.end(kv)
    rig.settle()
    (last,) = rig.anchors(30)
    assert not first.is_passed
    anchors = rig.sim.owner.host.cache.anchors

    anchors.use(last)

    assert first.is_passed
    assert anchors.evict_passed(1) == list(first.slots)
    assert rig.sim.owner.counters.num_evicted_anchors == 1


def test_an_anchor_of_the_prompt_is_used_as_any_is() -> None:
    rig = PromptRig()
    rig.stood()
    (anchor,) = rig.anchors()

    assert anchor.copy.stage is SideStage.KEPT
    assert not anchor.copy.targets
    assert anchor.prompt is None
