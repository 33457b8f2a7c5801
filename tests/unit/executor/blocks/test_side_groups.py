"""Side groups keep what is attended to and no more, whatever requests come, grow and go."""

import random
from dataclasses import dataclass, field

import pytest
from vllm.v1.core.block_pool import BlockPool

from services.executor.blocks.pool_blocks import PoolBlocks
from services.executor.blocks.sides.side_groups import SideGroups
from services.executor.blocks.step_orders import StepOrders
from services.placement.blocks import STATE, BlockGeometry, side_blocks

pytestmark = pytest.mark.filterwarnings("default")

SIZE, MAX_IN_FLIGHT = 4, 12  # tokens
NUM_DRAFTS, NUM_LOOKAHEAD = 3, 2  # of a step; behind it
WINDOWS = (5, 5, 8, STATE)
POISON = ("nobody", -1, -1)


@dataclass
class Part:
    """A request as a scheduler has it: what is processed, and what steps in flight compute."""

    num_processed: int = 0
    in_flight: list[int] = field(default_factory=list)  # tokens, by step, the oldest first
    num_room: int = 0  # tokens; drafts that were rejected leave theirs

    @property
    def num_computed(self) -> int:
        return self.num_processed + sum(self.in_flight)


class Rig:
    """A pool whose blocks remember whose KV was written into them, a rank that runs steps late."""

    def __init__(
        self, *, num_blocks: int = 400, windows: tuple[int, ...] = WINDOWS, max_ahead: int = 0
    ) -> None:
        self.geometry = BlockGeometry(
            num_groups=1,
            block_size=3 * SIZE,
            side_windows=windows,
            side_block_size=SIZE,
            max_in_flight_tokens=MAX_IN_FLIGHT,
            max_ahead_tokens=max_ahead,
        )
        self.orders = StepOrders()
        self.pool = BlockPool(num_blocks + 1, False, SIZE)
        self.blocks = PoolBlocks(self.pool, self.orders, lambda column: None, poison_freed=True)
        self.sides = SideGroups(self.blocks, self.geometry)
        self.parts: dict[str, Part] = {}
        self.memory: dict[int, tuple[str, int, int]] = {}  # request, group, position, by block

    def schedule(self, name: str, num_tokens: int, *, num_lookahead: int = 0) -> None:
        """Schedule so many tokens, as vLLM does: give back, ask, take."""
        part = self.parts.setdefault(name, Part())
        end = part.num_computed + num_tokens + num_lookahead
        self.sides.slide(name, num_tokens=part.num_processed)
        num_new, num_free = self.sides.num_new(name, num_tokens=end), self.blocks.num_free
        gained = self.sides.grow(name, num_tokens=end)
        assert sum(map(len, gained)) == num_new == num_free - self.blocks.num_free
        part.in_flight.append(num_tokens)
        part.num_room = max(part.num_room, end)
        self.check(name)

    def run(self, name: str, *, num_rejected: int = 0) -> None:
        """Run a request's oldest step: write its tokens' KV, and read what they attend to.

        `num_rejected`: of its last tokens, in whose place the next step writes others.
        """
        part, rows = self.parts[name], self.sides.rows(name)
        first = part.num_processed
        end = first + part.in_flight.pop(0)
        for group, (window, row) in enumerate(zip(self.geometry.side_windows, rows, strict=True)):
            if window == STATE:
                (block,) = row
                assert not first or self.memory[block.block_id] == (name, group, 0)
                self.memory[block.block_id] = (name, group, 0)
                continue
            for position in range(first // SIZE, -(-end // SIZE)):
                self.memory[row[position].block_id] = (name, group, position)
            for position in range(max(0, first - window + 1) // SIZE, -(-end // SIZE)):
                assert self.memory[row[position].block_id] == (name, group, position)
        part.num_processed = end - num_rejected

    def end(self, name: str) -> None:
        del self.parts[name]
        self.pool.free_blocks(self.sides.pop(name))

    def check(self, name: str) -> None:
        self.sides.check_integrity()
        num_tokens = self.parts[name].num_room
        num_new = num_tokens - self.parts[name].num_processed
        most = side_blocks(self.geometry, num_tokens=num_tokens, num_new_tokens=num_new)
        assert self.sides.num_owned_by(name) <= most
        assert self.blocks.num_free == self.blocks.num_usable - self.sides.num_owned
        for block_id in self.orders.take(loading=[], saves=[]).poisoned_block_ids:
            self.memory[block_id] = POISON


@pytest.mark.parametrize("seed", range(8))
def test_what_is_attended_to_is_there_at_every_step_of_any_history(seed: int) -> None:
    rng, rig, num_steps = random.Random(seed), Rig(), 0
    for number in range(400):
        if len(rig.parts) < 6 and rng.random() < 0.2:
            rig.schedule(f"r{number}", rng.randint(1, 6))
        for name, part in list(rig.parts.items()):
            if part.in_flight and rng.random() < 0.6:
                rig.run(name)
                num_steps += 1
            elif len(part.in_flight) < 2 and rng.random() < 0.8:
                rig.schedule(name, rng.choice((1, 1, 1, rng.randint(2, 6))))
            elif rng.random() < 0.05:
                rig.end(name)
    for name in list(rig.parts):
        rig.end(name)

    assert num_steps > 300
    assert rig.sides.num_owned == 0
    assert rig.blocks.num_free == rig.blocks.num_usable


@pytest.mark.parametrize("seed", range(8))
def test_what_is_attended_to_is_there_whatever_drafts_are_rejected(seed: int) -> None:
    """A state has a place for each draft, which these groups have not: windows only."""
    rig = Rig(windows=WINDOWS[:3], max_ahead=2 * NUM_DRAFTS + NUM_LOOKAHEAD)
    rng, num_rejected, num_accepted = random.Random(seed), 0, 0
    for number in range(400):
        if len(rig.parts) < 6 and rng.random() < 0.2:
            rig.schedule(f"r{number}", rng.randint(1, 6), num_lookahead=NUM_LOOKAHEAD)
        for name, part in list(rig.parts.items()):
            if part.in_flight and rng.random() < 0.6:
                num_drafts = part.in_flight[0] - 1 if part.num_processed else 0
                wrong = rng.choice((0, num_drafts, rng.randint(0, num_drafts)))
                rig.run(name, num_rejected=wrong)
                num_rejected += wrong
                num_accepted += num_drafts - wrong
            elif len(part.in_flight) < 2 and rng.random() < 0.8:
                num_drafts = rng.randint(0, NUM_DRAFTS)
                rig.schedule(name, 1 + num_drafts, num_lookahead=NUM_LOOKAHEAD)
            elif rng.random() < 0.05:
                rig.end(name)

    assert min(num_rejected, num_accepted) > 100


def test_a_window_is_given_back_as_soon_as_no_token_to_come_attends_to_it() -> None:
    rig = Rig(windows=(5,))
    rig.sides.grow("a", num_tokens=12)
    (row,) = rig.sides.rows("a")

    rig.sides.slide("a", num_tokens=7)  # token 7 attends to token 3
    assert rig.sides.num_owned_by("a") == 3
    rig.sides.slide("a", num_tokens=8)
    assert rig.sides.num_owned_by("a") == 2
    assert row[0] is rig.blocks.null


def test_blocks_begin_cleared_and_end_poisoned() -> None:
    rig = Rig(windows=(5, STATE))
    rig.sides.grow("a", num_tokens=12)
    taken = [block.block_id for row in rig.sides.rows("a") for block in row]
    assert sorted(rig.orders.take(loading=[], saves=[]).cleared_block_ids) == sorted(taken)

    rig.sides.slide("a", num_tokens=12)
    ended = [block.block_id for block in rig.sides.pop("a")]

    assert sorted(rig.orders.take(loading=[], saves=[]).poisoned_block_ids) == sorted(taken)
    assert len(ended) == 2


def test_what_is_to_come_is_what_the_formula_allows_less_what_is_there() -> None:
    rig = Rig(windows=(5, STATE))

    assert rig.sides.num_to_come("a", num_tokens=40) == 4 + 1 + 1  # (4 + 12) / 4, and one
    rig.sides.grow("a", num_tokens=8)
    rig.sides.slide("a", num_tokens=8)
    assert rig.sides.num_owned_by("a") == 2
    # Five tokens and the one before them lie in three blocks at most, wherever blocks begin.
    assert rig.sides.num_to_come("a", num_tokens=9) == 3 + 1 - 2


def test_blocks_are_named_to_be_zeroed_only_where_somebody_asks() -> None:
    rig = Rig(windows=(STATE,))
    rig.sides.grow("a", num_tokens=1)
    assert rig.blocks.take_open_ids() == []

    rig.blocks.notes_open = True
    rig.sides.grow("b", num_tokens=1)
    ((block,),) = rig.sides.rows("b")

    assert rig.blocks.take_open_ids() == [block.block_id]
    assert rig.blocks.take_open_ids() == []
