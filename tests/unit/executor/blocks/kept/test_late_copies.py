"""What is kept and had no copy when its request ended gets one behind it, on simulated ranks."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.request import RequestStatus

from services.control.prefixes.prefix_cache import num_complete
from services.control.prefixes.retention import RetentionBudget
from services.executor.blocks.kept import late_copies
from services.executor.blocks.kept.late_copies import NAMES
from services.executor.blocks.transfers.losses import Losses
from services.executor.kv_options import KVOptions
from services.executor.request_tag import KeptTokens, with_kept
from services.executor.scheduler.retaining import Retaining
from services.executor.step_messages import FailureCause, StepFeedback
from services.placement.layer_placement import ALL_RESIDENT, LayerPlacement
from tests.unit.executor.blocks.test_prefix_hits import (
    Conversations,
    assert_all_is_given_back,
    settled,
)
from tests.unit.executor.failing_copies import FailingSimulation, FaultRates
from tests.unit.executor.simulated_ranks import BLOCK_SIZE, Simulation, found_in, keys_of

pytestmark = pytest.mark.filterwarnings("default")

AMPLE = RetentionBudget(num_columns=1_000, column_s=1e9)
PROMPT = ("a", "b", "c", "d")
PROMISED = 20  # slots, of a request
Ending = Callable[[Simulation], None]


def keep(sim: Simulation, name: str, prompt: tuple[str, ...]) -> None:
    """Keep what a request leaves, for its client."""
    keys = keys_of(prompt)
    sim.owner.host.cache.retain("", name, [(key, 60.0) for key in keys], AMPLE)
    sim.owner.late_copies.add(keys, num_copied=num_complete(sim.owner.host.cache.find(keys)))


def advance(sim: Simulation, *, is_wanted: bool = False, budget: int = 512) -> None:
    sim.owner.late_copies.advance(is_wanted=is_wanted, budget=lambda: budget)


class KeptConversations(Conversations):
    """Conversations of which many are kept, by a link that leaves most without a copy."""

    is_wanted = False

    def step(self) -> None:
        rng = self.sim.rng
        if rng.random() < (0.5 if self.is_wanted else 0.1):
            self.is_wanted = not self.is_wanted
            self.sim.max_mirrored = rng.choice((0, 0, 0, 16))
        advance(self.sim, is_wanted=self.is_wanted, budget=rng.choice((1, 8, 512)))
        super().step()

    def placement(self) -> LayerPlacement:
        return ALL_RESIDENT if self.sim.rng.random() < 0.8 else super().placement()

    def ended(self, name: str) -> None:
        if self.sim.rng.random() < 0.9:
            keep(self.sim, name, self.sim.prompts[name])


def drilled(sim: Simulation) -> KeptConversations:
    """Return conversations that have been had, and ended; nothing is kept any more."""
    drill = KeptConversations(sim)
    for _ in range(150):
        drill.step()
    drill.end_all()
    sim.owner.host.cache.retention.clear()
    sim.owner.late_copies.forget_all()
    sim.owner.check_integrity()
    return drill


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_whoever_begins_with_what_was_copied_late_reads_its_own_tokens(depth: int) -> None:
    num_late = num_hits = 0
    for seed in (3, 4):
        sim = Simulation(seed=seed, depth=depth, num_slots=500, num_blocks=200)
        num_hits += drilled(sim).num_hit_blocks
        sim.drain()
        assert_all_is_given_back(sim)
        num_late += sim.owner.counters.num_late_blocks

    assert num_late > 40
    assert num_hits > 50


@pytest.mark.parametrize("depth", [0, 2])
def test_late_copies_that_go_wrong_bring_no_wrong_token(depth: int) -> None:
    rates = FaultRates(fails=0.02, hangs=0.005, changes=0.01)
    num_late = 0
    for seed in (3, 4):
        sim = FailingSimulation(seed=seed, depth=depth, num_slots=500, num_blocks=200, rates=rates)
        drilled(sim)
        sim.end_all()
        assert_all_is_given_back(sim)
        num_late += sim.owner.counters.num_late_blocks

    assert num_late > 20


def left(sim: Simulation, prompt: tuple[str, ...] = PROMPT) -> None:
    """Have a request leave a prompt in the pool, without a copy; it is kept."""
    one = sim.admit(ALL_RESIDENT, prompt=prompt, num_slots=PROMISED)
    sim.step({one.request_id: len(prompt) * BLOCK_SIZE})
    settled(sim)
    keep(sim, one.request_id, prompt)
    sim.end(one.request_id)


def without_copies(num_blocks: int = 60) -> Simulation:
    return Simulation(seed=1, depth=0, max_mirrored=0, num_blocks=num_blocks)


def states(sim: Simulation) -> list[tuple[bool, bool]]:
    """Return of each column of the prompt whether it is on the host, and in free blocks."""
    columns = sim.owner.host.cache.find(keys_of(PROMPT))
    return [(column.is_complete, column.is_left) for column in columns]


def test_it_is_on_the_host_and_still_in_the_pool() -> None:
    sim = without_copies()
    left(sim)
    assert states(sim) == [(False, True)] * len(PROMPT)

    advance(sim)
    assert sim.owner.late_copies.num_owned == len(PROMPT) * sim.num_groups
    settled(sim)
    advance(sim)

    assert states(sim) == [(True, True)] * len(PROMPT)
    assert sim.owner.counters.num_late_blocks == len(PROMPT) * sim.num_groups
    assert sim.pool.get_num_free_blocks() == sim.num_blocks - 1
    advance(sim)
    assert not sim.owner.late_copies.is_busy


def test_it_counts_as_copied_once_the_ranks_have_copied_it() -> None:
    sim = without_copies()
    left(sim)
    advance(sim)
    step = sim.transfers.plan_step({}).step

    sim.transfers.absorb(StepFeedback(step=step, saved_step=step - 1))
    advance(sim)

    assert states(sim) == [(False, False)] * len(PROMPT)
    sim.transfers.absorb(StepFeedback(step=step + 1, saved_step=step))
    advance(sim)
    assert states(sim) == [(True, True)] * len(PROMPT)


@pytest.mark.parametrize("budget", [1, 9])
def test_a_step_orders_what_it_may_the_first_ones_first(budget: int) -> None:
    sim = without_copies()
    left(sim)

    advance(sim, budget=budget)
    settled(sim)
    advance(sim, budget=0)

    number = max(1, budget // sim.num_groups)
    assert [is_complete for is_complete, _ in states(sim)] == [
        position < number for position in range(len(PROMPT))
    ]
    for _ in PROMPT:
        advance(sim, budget=budget)
        settled(sim)
    advance(sim)
    assert states(sim) == [(True, True)] * len(PROMPT)


@pytest.mark.parametrize("is_ordered", [False, True])
def test_it_gives_way_to_whoever_waits_and_begins_anew_when_none_does(is_ordered: bool) -> None:
    sim = without_copies()
    left(sim)
    advance(sim)
    if is_ordered:
        sim.transfers.plan_step({})  # no rank has run it

    advance(sim, is_wanted=True)

    assert not sim.owner.late_copies.is_busy  # an engine that is paused has no steps for it
    assert states(sim) == [(False, True)] * len(PROMPT)
    assert sim.owner.host.num_free == sim.num_slots
    sim.owner.check_integrity()
    advance(sim)
    settled(sim)
    advance(sim)
    assert states(sim) == [(True, True)] * len(PROMPT)


def test_it_gives_way_to_requests_that_grow() -> None:
    sim = without_copies(num_blocks=40)
    left(sim)
    advance(sim)
    growing = sim.admit(ALL_RESIDENT, num_slots=PROMISED)
    sim.step({growing.request_id: 5 * BLOCK_SIZE})
    sim.owner.late_copies._batch.is_copied = False  # type: ignore[union-attr]

    advance(sim)

    assert sim.owner.late_copies.num_owned == 0
    assert sim.pool.get_num_free_blocks() == sim.num_blocks - 1 - 5 * sim.num_groups


def test_whoever_runs_and_finds_no_block_waits_for_those_that_it_gives_back() -> None:
    sim = without_copies()
    left(sim)
    advance(sim)
    sim.transfers.plan_step({})

    assert sim.transfers.relieve()

    assert sim.owner.late_copies.num_owned == 0
    assert sim.pool.get_num_free_blocks() == sim.num_blocks - 1
    assert not sim.transfers.relieve()


@pytest.mark.parametrize("num_left", [15, 16])
def test_slots_that_are_promised_stay_free_for_whom_they_are(num_left: int) -> None:
    sim = without_copies()
    left(sim)
    sim.admit(ALL_RESIDENT, num_slots=sim.owner.host.num_unpromised - num_left)

    advance(sim)

    assert sim.owner.late_copies.num_owned == (16 if num_left >= 16 else 0)
    sim.owner.check_integrity()


def not_kept(sim: Simulation) -> None:
    sim.owner.host.cache.retention.clear()


def not_in_the_pool(sim: Simulation) -> None:
    sim.owner.blocks.forget_left()


def in_use(sim: Simulation) -> None:
    record, keys = sim.arrive(PROMPT), keys_of(PROMPT)
    sim.owner.host.cache.share(found_in(sim.owner.host, keys))
    assert record.kv is None


@pytest.mark.parametrize("ending", [not_kept, not_in_the_pool, in_use])
def test_what_is_not_kept_or_not_free_is_not_copied(ending: Ending) -> None:
    sim = without_copies()
    left(sim)
    ending(sim)

    for _ in range(2):
        advance(sim)

    assert sim.owner.late_copies.num_owned == 0
    assert not sim.owner.late_copies.is_busy


def test_a_pool_without_room_copies_nothing() -> None:
    sim = without_copies(num_blocks=1 + 2 * 4 - 1)
    left(sim, prompt=PROMPT[:1])

    advance(sim)

    assert sim.owner.late_copies.num_owned == 0
    assert not sim.owner.late_copies.is_busy


def failed(step: int) -> StepFeedback:
    saves = {(step, NAMES[1], 2): FailureCause.FAILED}
    return StepFeedback(step=step, saved_step=step, failed_saves=saves)


def lost_with_another(step: int) -> StepFeedback:
    lost = {"another": FailureCause.FAILED}
    return StepFeedback(step=step, saved_step=step - 1, lost_requests=lost)


@pytest.mark.parametrize(
    ("feedback", "expected"),
    [(failed, [(False, True)] * len(PROMPT)), (lost_with_another, [])],
)
def test_what_goes_wrong_is_on_no_host(
    feedback: Callable[[int], StepFeedback], expected: list[tuple[bool, bool]]
) -> None:
    sim = without_copies()
    left(sim)
    advance(sim)
    step = sim.transfers.plan_step({}).step

    Losses(sim.owner, sim.transfers).absorb(feedback(step))
    sim.transfers.absorb(feedback(step))
    for _ in range(2):
        advance(sim)

    assert states(sim) == expected
    assert not sim.owner.late_copies.is_busy
    assert_all_is_given_back(sim)
    sim.owner.check_integrity()


def test_a_hung_copy_s_slots_and_blocks_are_given_to_nobody() -> None:
    sim = without_copies()
    left(sim)
    advance(sim)
    (save, *_) = sim.transfers.plan_step({}).saves
    hung = frozenset(save.slots)

    Losses(sim.owner, sim.transfers).absorb(
        StepFeedback(step=1, saved_step=0, hung_slots=hung, hung_blocks=frozenset())
    )

    assert sim.owner.late_copies.num_owned == 0
    assert sim.owner.host.num_free == sim.num_slots - len(hung)
    sim.owner.check_integrity()


def test_a_reset_copies_nothing() -> None:
    sim = without_copies()
    left(sim)
    advance(sim)
    sim.step({})

    sim.owner.forget_prefixes()

    assert not sim.owner.late_copies.is_busy
    settled(sim)
    assert_all_is_given_back(sim)


@pytest.mark.parametrize("max_mirrored", [0, 8])
def test_an_engine_that_copies_nothing_runs_no_steps_for_it(max_mirrored: int) -> None:
    sim = without_copies()
    options = KVOptions(
        host_bytes=1 << 20, prefix_caching=True, max_mirrored_blocks_per_step=max_mirrored
    )
    retaining = Retaining(sim.transfers, options)
    one = sim.admit(ALL_RESIDENT, prompt=PROMPT, num_slots=PROMISED)
    sim.step({one.request_id: len(PROMPT) * BLOCK_SIZE})
    kept = KeptTokens("", "s", [(0, 60.0)])
    request: Any = SimpleNamespace(
        request_id=one.request_id,
        num_computed_tokens=len(PROMPT) * BLOCK_SIZE,
        num_tokens=len(PROMPT) * BLOCK_SIZE + 1,
        block_hashes=keys_of(PROMPT),
        sampling_params=SimpleNamespace(extra_args=with_kept({}, kept)),
        status=RequestStatus.FINISHED_LENGTH_CAPPED,
    )

    retaining.ended(request, 0.0)

    assert sim.owner.host.cache.num_retained_columns == len(PROMPT)
    assert sim.transfers.needs_steps == bool(max_mirrored)


def test_so_many_are_known_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(late_copies, "MAX_KEPT", 1)
    sim = without_copies()
    left(sim)
    left(sim, prompt=("x", "y"))

    for _ in range(3):
        advance(sim)
        settled(sim)

    assert states(sim) == [(True, True)] * len(PROMPT)
    assert sim.owner.counters.num_late_blocks == len(PROMPT) * sim.num_groups
