"""What turns begin with that wait for their tools comes back to the pool, on simulated ranks."""

import pytest

from services.control.prefixes.retention import RetentionBudget
from services.executor.blocks.kept import returns
from services.executor.blocks.kept.returns import NAMES
from services.executor.blocks.transfers.losses import Losses
from services.executor.step_messages import FailureCause, StepFeedback
from services.placement.layer_placement import ALL_RESIDENT
from tests.unit.executor.blocks import test_prefix_hits
from tests.unit.executor.blocks.test_prefix_hits import Conversations, assert_all_is_given_back
from tests.unit.executor.failing_copies import FailingSimulation, FaultRates
from tests.unit.executor.simulated_ranks import BLOCK_SIZE, Simulation, found_in, keys_of

pytestmark = pytest.mark.filterwarnings("default")

AMPLE = RetentionBudget(num_columns=1_000, column_s=1e9)
PROMPT = ("a", "b", "c", "d")


def await_turn(sim: Simulation, name: str, prompt: tuple[str, ...]) -> None:
    """Keep what a request has left that called a tool, for its next turn."""
    keys = keys_of(prompt)
    columns = [(key, 60.0) for key in keys]
    if keys and sim.owner.host.cache.retain_awaited("", name, columns, AMPLE) == len(keys):
        sim.owner.returns.await_turn(name, keys)


def settled(sim: Simulation) -> None:
    """Let all copies end."""
    test_prefix_hits.settled(sim, num_steps=30)


def advance(sim: Simulation, *, is_wanted: bool = False) -> None:
    sim.owner.returns.advance(is_wanted=is_wanted, link_is_idle=lambda: True)


class Agents(Conversations):
    """Conversations whose prompts are awaited when they have ended, and brought back at random."""

    def step(self) -> None:
        advance(self.sim, is_wanted=self.sim.rng.random() < 0.2)
        super().step()

    def ended(self, name: str) -> None:
        self.sim.owner.returns.look_again()
        if self.sim.rng.random() < 0.7:
            await_turn(self.sim, name, self.sim.prompts[name])


def end_of(drill: Agents) -> None:
    drill.end_all()
    drill.sim.owner.host.cache.awaited.clear()
    drill.sim.owner.returns.forget_all()
    drill.sim.owner.check_integrity()


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_whoever_finds_what_came_back_ahead_of_it_reads_its_own_tokens(
    depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(returns, "MAX_BLOCKS", 8)  # two columns at once
    num_returned = num_found = 0
    for seed in range(3):
        sim = Simulation(seed=seed, depth=depth, num_slots=300, num_blocks=90)
        drill = Agents(sim)
        for _ in range(150):
            drill.step()
        end_of(drill)
        sim.drain()
        assert_all_is_given_back(sim)
        num_returned += sim.owner.counters.num_returned_blocks
        num_found += sim.owner.counters.num_found_blocks

    assert num_returned > 30
    assert num_found > 15


@pytest.mark.parametrize("depth", [0, 2])
def test_copies_that_go_wrong_ahead_of_time_bring_no_wrong_token(depth: int) -> None:
    rates = FaultRates(fails=0.02, hangs=0.005, changes=0.01)
    num_returned = 0
    for seed in range(2):
        sim = FailingSimulation(seed=seed, depth=depth, num_slots=300, num_blocks=90, rates=rates)
        drill = Agents(sim)
        for _ in range(120):
            drill.step()
        end_of(drill)
        sim.end_all()
        assert_all_is_given_back(sim)
        num_returned += sim.owner.counters.num_returned_blocks

    assert num_returned > 10


def left(sim: Simulation, name: str = "one", prompt: tuple[str, ...] = PROMPT) -> None:
    """Have a request leave a prompt on the host, and nothing of it in the pool."""
    one = sim.admit(ALL_RESIDENT, prompt=prompt, num_slots=20)
    sim.step({one.request_id: len(prompt) * BLOCK_SIZE})
    settled(sim)
    sim.end(one.request_id)
    sim.owner.blocks.forget_left()
    await_turn(sim, name, prompt)


def test_it_is_free_when_it_is_back_and_found_in_every_layer_group() -> None:
    sim = Simulation(seed=1, depth=0)
    left(sim)

    advance(sim)

    assert sim.owner.returns.num_coming == len(PROMPT) * sim.num_groups
    assert sim.pool.get_num_free_blocks() == sim.num_blocks - 1 - len(PROMPT) * sim.num_groups
    settled(sim)
    assert sim.pool.get_num_free_blocks() == sim.num_blocks - 1
    assert all(column.is_left for column in found_in(sim.owner.host, keys_of(PROMPT)))
    assert sim.owner.counters.num_returned_blocks == len(PROMPT) * sim.num_groups
    advance(sim)
    assert not sim.owner.returns.is_busy


def test_what_the_pool_still_has_of_a_column_is_not_copied() -> None:
    sim = Simulation(seed=1, depth=0)
    one = sim.admit(ALL_RESIDENT, prompt=PROMPT, num_slots=20)
    sim.step({one.request_id: len(PROMPT) * BLOCK_SIZE})
    settled(sim)
    sim.end(one.request_id)
    (first, *_) = found_in(sim.owner.host, keys_of(PROMPT))
    sim.owner.blocks.release(sim.owner.blocks.find_all([first.uid], 0))
    await_turn(sim, "one", PROMPT)

    advance(sim)
    settled(sim)

    assert sim.owner.counters.num_returned_blocks == 1
    assert first.is_left


@pytest.mark.parametrize("others_are_kept", [False, True])
def test_blocks_that_hold_what_is_kept_are_nobodys_room(others_are_kept: bool) -> None:
    prompts = [(letter, "y", "z") for letter in "pqrs"]
    sim = Simulation(seed=1, depth=0, num_blocks=1 + 4 * 3 * 4)  # as much as these take
    left(sim)
    for number, prompt in enumerate(prompts):
        one = sim.admit(ALL_RESIDENT, prompt=prompt, num_slots=20)
        sim.step({one.request_id: len(prompt) * BLOCK_SIZE})
        settled(sim)
        sim.end(one.request_id)
        if others_are_kept or number == 0:  # the first would go first
            keys = [(key, 60.0) for key in keys_of(prompt)]
            sim.owner.host.cache.retain("", "other", keys, AMPLE)
    assert sim.owner.blocks.num_left == sim.num_blocks - 1

    advance(sim)
    settled(sim)
    advance(sim)

    first, *rest = [
        all(column.is_left for column in found_in(sim.owner.host, keys_of(prompt)))
        for prompt in (*prompts, PROMPT)
    ]
    assert first
    assert rest == ([True] * 3 + [False] if others_are_kept else [False, False, True, True])
    assert not sim.owner.returns.is_busy


def test_it_gives_way_to_whoever_waits_and_begins_anew_when_none_does() -> None:
    sim = Simulation(seed=1, depth=0)
    left(sim)
    advance(sim)
    sim.step({})

    advance(sim, is_wanted=True)

    assert sim.owner.returns.num_coming == 0
    settled(sim)
    assert sim.pool.get_num_free_blocks() == sim.num_blocks - 1
    assert not any(column.is_left for column in found_in(sim.owner.host, keys_of(PROMPT)))
    assert not sim.owner.returns.is_busy  # an engine that is paused has no steps for it
    advance(sim)
    settled(sim)
    assert all(column.is_left for column in found_in(sim.owner.host, keys_of(PROMPT)))


@pytest.mark.parametrize("num_blocks", [4, 8, 512])
def test_what_came_back_is_lost_from_its_end_in_the_pool_and_on_the_host(
    num_blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(returns, "MAX_BLOCKS", num_blocks)
    sim = Simulation(seed=1, depth=0)
    left(sim)
    for _ in PROMPT:
        advance(sim)
        settled(sim)
    columns = found_in(sim.owner.host, keys_of(PROMPT))
    assert all(column.is_left for column in columns)

    sim.pool.get_new_blocks(sim.num_blocks - 1 - 3 * sim.num_groups)
    sim.owner.host.cache.awaited.clear()
    sim.owner.host.cache.evict(sim.num_groups)

    assert [column.is_left for column in columns] == [True] * 3 + [False]
    assert found_in(sim.owner.host, keys_of(PROMPT)) == columns[:3]


def test_of_a_session_the_newest_turn_is_awaited() -> None:
    sim = Simulation(seed=1, depth=0)
    left(sim, prompt=PROMPT[:2])
    left(sim)

    for _ in range(3):
        advance(sim)
        settled(sim)

    assert not sim.owner.returns.is_busy
    assert sim.owner.counters.num_returned_blocks == len(PROMPT) * sim.num_groups


@pytest.mark.parametrize("num_left", [15, 16])
def test_slots_that_are_promised_stay_free_for_whom_they_are(num_left: int) -> None:
    sim = Simulation(seed=1, depth=0)
    left(sim)
    sim.admit(ALL_RESIDENT, num_slots=sim.owner.host.num_unpromised - num_left)

    advance(sim)

    assert sim.owner.returns.num_coming == (16 if num_left >= 16 else 0)
    sim.owner.check_integrity()


def test_half_of_the_free_blocks_stay_free() -> None:
    sim = Simulation(seed=1, depth=0, num_blocks=1 + 2 * len(PROMPT) * 4 - 1)
    left(sim)

    advance(sim)

    assert sim.owner.returns.num_coming == 3 * sim.num_groups
    settled(sim)
    advance(sim)
    assert sim.owner.returns.num_coming == sim.num_groups
    settled(sim)
    assert all(column.is_left for column in found_in(sim.owner.host, keys_of(PROMPT)))


def test_it_gives_way_to_requests_that_grow() -> None:
    sim = Simulation(seed=1, depth=0, num_blocks=40)
    left(sim)
    advance(sim)
    assert sim.owner.returns.num_owned == len(PROMPT) * sim.num_groups
    growing = sim.admit(ALL_RESIDENT, num_slots=20)
    sim.step({growing.request_id: 2 * BLOCK_SIZE})

    advance(sim)

    assert sim.owner.returns.num_owned == 0
    settled(sim)
    assert sim.pool.get_num_free_blocks() == sim.num_blocks - 1 - 2 * sim.num_groups


def test_what_is_not_awaited_any_more_is_not_brought_back() -> None:
    sim = Simulation(seed=1, depth=0)
    left(sim)
    sim.owner.host.cache.awaited.release("", "one")

    advance(sim)

    assert not sim.owner.returns.is_busy
    assert sim.pool.get_num_free_blocks() == sim.num_blocks - 1


@pytest.mark.parametrize("cause", [FailureCause.CORRUPT, FailureCause.FAILED])
def test_what_goes_wrong_is_found_by_nobody(cause: FailureCause) -> None:
    sim = Simulation(seed=1, depth=0)
    left(sim)
    advance(sim)
    (transfers_step, under_way) = sim.owner.orders.next_step, sim.owner.returns.num_coming
    assert under_way
    is_corrupt = cause is FailureCause.CORRUPT
    feedback = StepFeedback(
        step=transfers_step,
        saved_step=0,
        lost_requests={NAMES[1]: cause} if is_corrupt else {},
        failed_restores={} if is_corrupt else {1: cause},
    )

    Losses(sim.owner, sim.transfers).absorb(feedback)

    assert sim.owner.returns.num_coming == 0
    settled(sim)
    assert not sim.owner.returns.is_busy
    assert bool(found_in(sim.owner.host, keys_of(PROMPT))) != is_corrupt
    assert sim.pool.get_num_free_blocks() == sim.num_blocks - 1
    sim.owner.check_integrity()


def test_a_reset_brings_nothing_back() -> None:
    sim = Simulation(seed=1, depth=0)
    left(sim)
    advance(sim)
    sim.step({})

    sim.owner.forget_prefixes()

    assert not sim.owner.returns.is_busy
    settled(sim)
    assert_all_is_given_back(sim)
    assert sim.owner.blocks.num_left == 0
