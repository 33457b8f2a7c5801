"""Drafts are in nobody's copy: only tokens that cannot be rejected any more fill a block."""

from collections import Counter
from dataclasses import dataclass, field

import pytest

from services.executor.step_messages import StepFeedback
from tests.unit.executor.blocks.test_block_life import random_placement
from tests.unit.executor.simulated_ranks import BLOCK_SIZE, Simulation, Slice

pytestmark = pytest.mark.filterwarnings("default")

PROMPT = 20  # tokens; what is behind them is decoded


@dataclass
class Drafting(Simulation):
    """Decodes with drafts. How many of them are right the scheduler learns when a step has run."""

    num_drafts: int = 3
    num_lookahead: int = 2
    known: dict[str, int] = field(default_factory=dict)  # tokens, the newest without KV
    under_way: Counter[str] = field(default_factory=Counter)  # drafts in flight that are wrong
    right: dict[tuple[str, int], int] = field(default_factory=dict)  # by request and first token
    num_rejected_full: int = 0  # steps whose drafts would have filled a block more
    num_accepted_drafts: int = 0

    def _schedule(self, request_id: str, num_tokens: int) -> Slice | None:
        start = self.lengths[request_id]
        self._assert_nothing_is_written_that_was_copied(request_id, start)
        if start < PROMPT:
            self.known[request_id] = start + num_tokens
            return super()._schedule(request_id, num_tokens)
        num_drafts = self.rng.randint(0, self.num_drafts)
        end = start + self.under_way[request_id] + 1 + num_drafts  # if all in flight are right
        num_accepted = min(end, self.known[request_id] + self._is_in_flight(request_id))
        part = self.sliced(
            request_id,
            1 + num_drafts,
            num_wanted=end + self.num_lookahead,
            num_accepted=num_accepted,
        )
        if part is not None:
            num_right = self.rng.randint(0, num_drafts)
            self.right[request_id, start] = num_right
            self.num_accepted_drafts += num_right
            self.num_rejected_full += end // BLOCK_SIZE > (start + 1 + num_right) // BLOCK_SIZE
        return part

    def _assert_nothing_is_written_that_was_copied(self, request_id: str, start: int) -> None:
        kv = self.kv(request_id)
        full = [*(g.num_saves_sent for g in kv.groups), len(kv.columns), kv.num_full_blocks]
        assert max(full) * BLOCK_SIZE <= start, "a draft is in what counts as full"
        for group in kv.groups:
            ends = [stretch.stop for stretch in group.staged_stretches()]
            assert max(ends, default=0) * BLOCK_SIZE <= start, "a step writes into staging"

    def _is_in_flight(self, request_id: str) -> bool:
        return any(part.request_id == request_id for _, batch in self.in_flight for part in batch)

    def num_accepted(self, part: Slice) -> int:
        end = part.start + self.under_way[part.request_id] + part.num_tokens
        return min(end, self.known[part.request_id] + self._is_in_flight(part.request_id))

    def length_after(self, part: Slice) -> int:
        if part.start < PROMPT:
            return part.start + part.num_tokens
        num_right = self.right[part.request_id, part.start]
        self.under_way[part.request_id] += part.num_tokens - 1 - num_right
        return part.start + 1 + num_right

    def take_in(self, feedback: StepFeedback, batch: list[Slice]) -> None:
        super().take_in(feedback, batch)
        for part in batch:
            name = part.request_id
            if part.start < PROMPT:  # the last chunk gives a token
                self.known[name] = max(self.known[name], part.start + part.num_tokens + 1)
                continue
            num_right = self.right.pop((name, part.start))
            self.known[name] = part.start + 1 + num_right + 1
            self.under_way[name] -= part.num_tokens - 1 - num_right


def change_at_random(sim: Drafting) -> None:
    rng = sim.rng
    if len(sim.lengths) < 5 and rng.random() < 0.3:
        sim.admit(
            random_placement(rng, sim.num_groups),
            num_slots=rng.choice((0, 80, 200)),
            prompt=tuple(f"{sim.num_requests}.{n}" for n in range(40)),  # nobody else's
        )
    if sim.lengths and rng.random() < 0.05:
        sim.end(rng.choice(list(sim.lengths)))
    for request_id in list(sim.lengths):
        kv = sim.kv(request_id)
        if kv.mirrored and rng.random() < 0.3:
            sim.place(kv, random_placement(rng, sim.num_groups))


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("num_drafts", [1, 3, 6])  # more than a block's, too
@pytest.mark.parametrize("seed", range(2))
def test_what_is_sealed_copied_or_published_holds_accepted_tokens_only(
    seed: int, num_drafts: int, depth: int
) -> None:
    sim = Drafting(seed=seed, depth=depth, num_drafts=num_drafts, num_slots=300, num_blocks=90)

    for _ in range(150):
        sim.settle()
        change_at_random(sim)
        lengths = sim.lengths.items()
        sim.step({name: sim.rng.randrange(1, 14) if n < PROMPT else 1 for name, n in lengths})

    assert min(sim.num_rejected_full, sim.num_accepted_drafts) >= 5
    assert sim.owner.counters.num_sealed_blocks > 0
    assert sim.owner.host.cache.num_columns > 0
    assert sim.owner.counters.num_restored_groups > 0
