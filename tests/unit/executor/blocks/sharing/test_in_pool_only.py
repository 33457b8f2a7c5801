"""Requests share in the pool where the host has no room for copies, on simulated ranks."""

from collections.abc import Callable

import pytest

from services.control.prefixes.prefix_cache import num_complete
from services.control.requests.life import State
from services.control.room.resumes import num_host_tokens
from services.executor.blocks.pool_blocks import PoolBlocks
from services.executor.blocks.residency import RequestKV
from services.executor.blocks.transfers.losses import Losses
from services.executor.step_messages import FailureCause, StepFeedback
from services.placement.layer_placement import ALL_RESIDENT
from services.placement.run.resume import ResumeWay
from tests.unit.executor.blocks.sharing.test_trunks import (
    PROMPT,
    Agents,
    Seen,
    follower,
    run,
    sharing,
)
from tests.unit.executor.blocks.test_prefix_hits import (
    KINDS,
    assert_all_is_given_back,
    settled,
)
from tests.unit.executor.failing_copies import FailingSimulation, FaultRates
from tests.unit.executor.resumes import resumes_of
from tests.unit.executor.simulated_ranks import BLOCK_SIZE, Simulation, found_in, keys_of

pytestmark = pytest.mark.filterwarnings("default")

LENGTH = len(PROMPT) - 1  # blocks that are shared of it: its last token is always computed
LOAD = (ResumeWay.LOAD, ALL_RESIDENT)


class Pinned(Agents):
    """Agents, some of which share what never has room on the host."""

    num_pinned = 0  # trunks that several use, over steps

    def step(self) -> None:
        super().step()
        pinned = [trunk for trunk in self.trunks.all if not trunk.is_copied]
        assert not any(trunk.offloaded or trunk.asleep for trunk in pinned)
        self.num_pinned += sum(len(trunk.users) > 1 for trunk in pinned)


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("num_slots", [0, 24])
def test_whoever_shares_without_copies_reads_its_own_tokens(depth: int, num_slots: int) -> None:
    num_pinned = num_splits = num_found = 0
    for seed in range(4):
        sim = Simulation(seed=seed, depth=depth, num_slots=num_slots, num_blocks=80)
        drill = Pinned(sim, Seen())
        for _ in range(150):
            drill.step()
        drill.end_all()
        sim.drain()
        assert_all_is_given_back(sim)
        assert not drill.trunks.all
        num_pinned += drill.num_pinned
        num_splits += sim.owner.counters.num_trunk_splits
        num_found += sim.owner.counters.num_found_blocks

    assert num_pinned > 50
    assert num_splits > 10
    assert num_found > 10


@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_where_copies_go_wrong_what_is_in_the_pool_only_is_right(kind: str, depth: int) -> None:
    num_pinned = num_lost = 0
    for seed in range(4):
        sim = FailingSimulation(seed=seed, depth=depth, num_slots=48, rates=KINDS[kind])
        drill = Pinned(sim, Seen())
        for _ in range(150):
            drill.step()
        drill.end_all()
        sim.end_all()
        assert_all_is_given_back(sim)
        num_pinned += drill.num_pinned
        num_lost += sim.num_lost

    assert num_pinned > 5
    assert num_lost > 0


# -- one case at a time --------------------------------------------------------------------------


def unmirrored(sim: Simulation, prompt: tuple[str, ...] = PROMPT) -> RequestKV:
    """Return a request without room on the host, whose prompt a step has filled."""
    kv = sim.admit(ALL_RESIDENT, num_slots=sim.num_slots + 1, prompt=prompt)
    assert not kv.mirrored
    sim.step({kv.request_id: len(prompt) * BLOCK_SIZE + 1})
    return kv


def come(sim: Simulation, prompt: tuple[str, ...] = PROMPT, *, num_slots: int = 40) -> RequestKV:
    """Return a request that runs after it was brought in by what is there of its prompt."""
    record, keys, resumes = sim.arrive(prompt), keys_of(prompt), resumes_of(sim)
    sim.owner.adopt_prefix(record, sim.seek(record, keys), keys)
    while num_host_tokens(record) is None:
        resumes.prepare(record, lambda kv: LOAD, num_slots=num_slots, num_kept_free=0)
        settled(sim, num_steps=1)
    resumes.admitted(record)
    sim.come_back(record.request_id)
    return sim.kv(record.request_id)


@pytest.mark.parametrize("num_slots", [0, 8])
def test_those_that_the_host_has_no_room_for_share_and_stay_in_the_pool(num_slots: int) -> None:
    sim = Simulation(seed=1, depth=0, num_blocks=100, num_slots=num_slots)
    sharing(sim)
    first = unmirrored(sim)
    others = [come(sim), come(sim, (*PROMPT[:3], "x", "y"))]
    sim.step({one.request_id: BLOCK_SIZE for one in (first, *others)})

    assert [one.num_shared for one in others] == [LENGTH, 3]
    assert not any(one.mirrored for one in (first, *others, *sim.owner.trunks.all))
    assert not any(one.num_host_blocks for one in (first, *others))
    assert not any(one.view.num_host_blocks for one in sim.owner.holders())
    assert sim.transfers.num_duplicate_blocks() == sim.num_groups  # the last block of two
    assert sim.transfers.write_through.num_lagging_blocks() == 0


def test_one_that_has_room_behind_what_has_none_is_copied() -> None:
    sim = Simulation(seed=1, depth=0, num_blocks=100, num_slots=60)
    sharing(sim)
    unmirrored(sim)
    second = come(sim, num_slots=40)
    sim.step({second.request_id: 3 * BLOCK_SIZE})
    settled(sim)
    assert second.mirrored

    sim.owner.offload(second, [0, 1])
    settled(sim)

    assert second.num_host_blocks == 0, "what cannot be loaded is promised"
    sim.step({second.request_id: 1})
    assert sim.park(second.request_id) == 0


def test_what_the_last_user_leaves_in_the_pool_is_begun_with() -> None:
    sim = Simulation(seed=1, depth=0, num_blocks=100, num_slots=0)
    sharing(sim)
    first, second = unmirrored(sim), come(sim)
    for one in (first, second):
        sim.end(one.request_id)
    assert sim.pool.get_num_free_blocks() == 99

    third = come(sim)

    assert third.num_shared == LENGTH
    sim.step({third.request_id: 2 * BLOCK_SIZE})


def test_one_that_is_preempted_finds_its_own_blocks_until_others_have_them() -> None:
    sim = Simulation(seed=1, depth=0, num_blocks=100, num_slots=0)
    sharing(sim)
    first, keys = unmirrored(sim), keys_of(PROMPT)
    assert sim.park(first.request_id) == 0
    record = sim.records[first.request_id]
    assert len(sim.owner.trunks.find(record.prefix, keys, LENGTH)) == LENGTH

    sim.owner.blocks.release(sim.owner.blocks.take(sim.pool.get_num_free_blocks()))

    assert not sim.owner.trunks.find(record.prefix, keys, LENGTH)
    assert not found_in(sim.owner.host, keys)
    sim.owner.check_integrity()


def partly_copied(sim: Simulation) -> RequestKV:
    """Return a request of `PROMPT` that has some of its blocks on the host, and no more to come."""
    first = sim.admit(ALL_RESIDENT, prompt=PROMPT)
    sim.step({first.request_id: len(PROMPT) * BLOCK_SIZE + 1})
    sim.max_mirrored = 1
    while not first.num_host_blocks:
        settled(sim, num_steps=1)
    sim.max_mirrored = 0
    settled(sim)
    return first


def test_what_was_not_copied_is_found_in_the_pool_and_copied_then() -> None:
    sim = Simulation(seed=1, depth=0, num_blocks=100, max_mirrored=0)
    sharing(sim)
    first = partly_copied(sim)
    num_copied = first.num_host_blocks
    assert 0 < num_copied < LENGTH
    assert sim.park(first.request_id) == num_copied * BLOCK_SIZE

    second = come(sim)

    assert second.num_shared == LENGTH
    (trunk,) = second.trunks
    assert (trunk.num_copied_blocks, trunk.mirrored) == (num_copied, False)
    sim.max_mirrored = 1_000
    sim.step({second.request_id: BLOCK_SIZE + 1})
    settled(sim)
    assert trunk.mirrored
    sim.owner.offload(trunk, range(sim.num_groups))
    sim.step({second.request_id: 1})


@pytest.mark.parametrize(("least", "finds_all"), [(2, True), (LENGTH, False)])
def test_a_few_blocks_more_than_the_host_has_are_not_waited_for(
    least: int, finds_all: bool
) -> None:
    sim = Simulation(seed=1, depth=0, num_blocks=100, max_mirrored=0)
    sharing(sim).min_tokens = least * BLOCK_SIZE
    first = partly_copied(sim)
    num_copied = first.num_host_blocks
    assert 2 <= LENGTH - num_copied < LENGTH
    sim.park(first.request_id)

    kv = sim.kv(first.request_id)
    found = sim.owner.trunks.find(kv.record.prefix, kv.keys, LENGTH)

    assert len(found) == (LENGTH if finds_all else num_copied)
    assert bool(sim.owner.trunks.num_to_fit(kv)) == finds_all


def test_columns_that_lose_their_slots_are_found_in_the_pool() -> None:
    sim = Simulation(seed=1, depth=0, num_blocks=100, num_slots=4 * len(PROMPT))
    sharing(sim)
    first = sim.admit(ALL_RESIDENT, num_slots=4 * len(PROMPT), prompt=PROMPT)
    sim.step({first.request_id: len(PROMPT) * BLOCK_SIZE})
    settled(sim)
    sim.end(first.request_id)
    assert num_complete(found_in(sim.owner.host, keys_of(PROMPT))) == len(PROMPT)

    other = sim.admit(ALL_RESIDENT, num_slots=4 * 5)
    sim.step({other.request_id: 5 * BLOCK_SIZE})

    assert num_complete(found_in(sim.owner.host, keys_of(PROMPT))) == 1
    assert come(sim).num_shared == LENGTH


def test_one_that_is_refused_room_begins_with_what_the_pool_still_has() -> None:
    sim = Simulation(seed=1, depth=0, num_blocks=100, num_slots=4 * len(PROMPT))
    sharing(sim)
    first = sim.admit(ALL_RESIDENT, num_slots=4 * len(PROMPT), prompt=PROMPT)
    sim.step({first.request_id: len(PROMPT) * BLOCK_SIZE})
    settled(sim)
    sim.end(first.request_id)

    second = come(sim, num_slots=1_000)

    assert not second.mirrored
    assert second.num_shared == LENGTH
    sim.step({second.request_id: 2 * BLOCK_SIZE})


def test_one_that_waits_without_room_on_the_host_is_put_back_and_comes_again() -> None:
    sim = Simulation(seed=1, depth=0, num_blocks=100, num_slots=0)
    sharing(sim)
    first, keys, resumes = unmirrored(sim), keys_of(PROMPT), resumes_of(sim)
    record = sim.arrive(PROMPT)
    sim.owner.adopt_prefix(record, sim.seek(record, keys), keys)
    resumes.prepare(record, lambda kv: LOAD, num_slots=40, num_kept_free=0)
    assert record.state is State.READY

    assert resumes.put_back(record)

    assert record.state is State.WAITING
    assert record.kv is None
    (trunk,) = sim.owner.trunks.all
    assert [*trunk.users] == [first]
    sim.owner.check_integrity()


def test_what_a_lost_request_left_in_the_pool_only_is_nobodys_to_find() -> None:
    sim = FailingSimulation(seed=1, depth=0, num_ranks=1, num_slots=0, rates=FaultRates())
    sharing(sim)
    first = unmirrored(sim)
    sim.end(first.request_id)
    assert found_in(sim.owner.host, keys_of(PROMPT))

    Losses(sim.owner, sim.transfers).absorb(
        StepFeedback(step=1, saved_step=0, lost_requests={first.request_id: FailureCause.FAILED})
    )

    assert not found_in(sim.owner.host, keys_of(PROMPT))
    sim.owner.check_integrity()


def test_the_last_user_of_what_is_lost_leaves_none_of_it() -> None:
    sim = FailingSimulation(seed=1, depth=0, num_ranks=1, num_slots=0, rates=FaultRates())
    sharing(sim)
    first = unmirrored(sim)
    second = follower(sim)
    run(sim, second)
    for one in (first, second):
        one.keys = ()  # as recovery leaves it
        sim.end(one.request_id)

    assert not found_in(sim.owner.host, keys_of(PROMPT))
    sim.owner.check_integrity()


# -- negative controls ---------------------------------------------------------------------------


def found_although_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let blocks be found that others have had."""
    monkeypatch.setattr(PoolBlocks, "_on_reuse", lambda *_: None)


def shares_without_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Show users of a trunk its first block in place of its last."""
    shown = RequestKV.shown_rows

    def wrongly(self: RequestKV) -> tuple[list[object], ...]:
        rows = shown(self)
        last = self.num_shared - 1
        return tuple([*row[:last], row[0], *row[last + 1 :]] for row in rows)

    monkeypatch.setattr(RequestKV, "shown_rows", wrongly)


@pytest.mark.parametrize("breaks", [found_although_taken, shares_without_its_own])
def test_what_is_wrong_in_the_pool_is_noticed(
    breaks: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    breaks(monkeypatch)
    drill = Pinned(Simulation(seed=1, depth=0, num_slots=0, num_blocks=80), Seen())

    def go_on() -> None:
        for _ in range(150):
            drill.step()

    with pytest.raises(AssertionError):
        go_on()
