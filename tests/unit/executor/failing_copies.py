"""Simulated ranks whose copies fail, hang and come back wrong, and a scheduler that recovers."""

import random
from dataclasses import dataclass, field

from services.executor.blocks.failures import Fate, note_loss
from services.executor.blocks.transfers.losses import Losses
from services.executor.copies.copy_engine import (
    FOR_EVER,
    Copy,
    CopyError,
    CopyFailedError,
    CopyHungError,
    Direction,
)
from services.executor.copies.copy_watch import CopyWatch, Patience
from services.executor.step_messages import FailureCause, StepFeedback
from services.placement.layer_placement import LayerPlacement
from tests.unit.executor.simulated_ranks import (
    Content,
    LateEngine,
    LateTicket,
    SimulatedRank,
    Simulation,
    Slice,
    keys_of,
)

STEPS_UNTIL_LATE = 6


class CopyCorruptError(CopyError):
    """What arrived is not what once left the pool: the product's guard tells it after the wait."""

    cause = FailureCause.CORRUPT


@dataclass(frozen=True, kw_only=True)
class FaultRates:
    """How likely a copy goes wrong in one way, each in [0, 1]."""

    fails: float = 0.0
    hangs: float = 0.0
    changes: float = 0.0  # loads only: other bytes arrive

    def draw(self, rng: random.Random, copy: Copy) -> str:
        kinds = {"fails": self.fails, "hangs": self.hangs}
        if copy.direction is Direction.H2D:
            kinds["changes"] = self.changes
        for kind, rate in kinds.items():
            if rng.random() < rate:
                return kind
        return ""


class FailingEngine(LateEngine):
    """Copies that go wrong now and then; a guard notices what comes back wrong."""

    def __init__(self, memory: dict[int, Content], rng: random.Random) -> None:
        super().__init__(memory, rng)
        self.rates = FaultRates()
        self.num_faults = 0
        self.hung: list[LateTicket] = []
        self._left: dict[int, Content] = {}  # what each slot was given, by slot

    def submit(self, copy: Copy) -> LateTicket:
        if copy.direction is Direction.D2H:
            for slot, block_id in zip(copy.slots, copy.block_ids, strict=True):
                self._left[slot] = self.memory.get(block_id)
        ticket = super().submit(copy)
        ticket.fault = self.rates.draw(self._rng, copy) if copy.slots else ""
        self.num_faults += bool(ticket.fault)
        return ticket

    def _carry_out(self, ticket: LateTicket) -> None:
        if ticket.fault == "hangs":
            self.hung.append(ticket)
            return
        if ticket.fault == "fails":
            ticket.done = True
            return
        super()._carry_out(ticket)
        if ticket.fault == "changes" and not ticket.cancelled:
            self.memory[ticket.copy.block_ids[-1]] = ("somebody else's", 0, 0)

    def wait(self, ticket: LateTicket, timeout_s: float = FOR_EVER) -> float:
        queue = self._queues[ticket.copy.direction]
        while ticket in queue:
            first = ticket.copy.direction is Direction.D2H  # in the order of submission
            self._carry_out(queue.pop(0 if first else queue.index(ticket)))
        if not ticket.done:
            raise CopyHungError("held back")
        if ticket.fault == "fails" and not ticket.cancelled:
            raise CopyFailedError("made to fail")
        if ticket.copy.direction is Direction.H2D and not ticket.cancelled:
            self._check(ticket.copy)
        return 0.0

    def _check(self, copy: Copy) -> None:
        for slot, block_id in zip(copy.slots, copy.block_ids, strict=True):
            if self.memory.get(block_id) != self._left.get(slot):
                raise CopyCorruptError(f"block {block_id}")

    def progress(self) -> None:
        super().progress()
        for ticket in list(self.hung):
            if self._rng.random() < 0.1:
                self.end_hung(ticket)

    def end_hung(self, ticket: LateTicket) -> None:
        """Let a hung copy write, whatever has become of its targets."""
        self.hung.remove(ticket)
        copy = ticket.copy
        for slot, block_id in zip(copy.slots, copy.block_ids, strict=True):
            late: Content = ("written late", slot, block_id)
            if copy.direction is Direction.H2D:
                self.memory[block_id] = late
            else:
                self.host[slot] = late
        ticket.done = True


@dataclass
class FailingSimulation(Simulation):
    """Recovers as the scheduler does, and asserts that no wrong token leaves."""

    rates: FaultRates = field(default_factory=FaultRates)
    only_first_rank: bool = False
    num_lost: int = 0
    num_tokens_out: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.losses = Losses(self.owner, self.transfers)

    def make_rank(self, number: int) -> SimulatedRank:
        rank = SimulatedRank(self.num_groups, self.rng, FailingEngine)
        if number == 0 or not self.only_first_rank:
            rank.engine.rates = self.rates
        rank.runner.watch = CopyWatch(
            rank.engine,
            Patience(least_s=STEPS_UNTIL_LATE),
            clock=lambda: float(rank.runner.num_steps),
        )
        return rank

    def take_in(self, feedback: StepFeedback, batch: list[Slice]) -> None:
        for request_id, cause in self.losses.absorb(feedback).items():
            if request_id in self.lengths:
                verdict = note_loss(
                    self.records[request_id], self.owner.counters, cause, may_run_again=True
                )
                self.begin_anew(request_id, verdict)
            elif self.records[request_id].kv is not None:  # it waits
                self.beginnings[request_id] += 1
                self.end(request_id)
        self.transfers.absorb(feedback)
        self.owner.check_integrity()
        wrong = set().union(*(rank.wrong for rank in self.ranks))
        for part in batch:
            if part.request_id in self.lengths and self.is_current(part):
                assert part.kv not in wrong, f"a token of {part.kv} leaves, and is wrong"
                self.num_tokens_out += 1

    def is_current(self, part: Slice) -> bool:
        return part.beginning == self.beginnings[part.request_id]

    def begin_anew(self, request_id: str, verdict: Fate) -> None:
        self.num_lost += 1
        self.beginnings[request_id] += 1
        self.end(request_id)
        if verdict is Fate.GIVE_UP:
            return
        groups = frozenset(g for g in range(self.num_groups) if self.rng.random() < 0.5)
        request = self.owner.draft(
            self.records[request_id],
            LayerPlacement(offloaded=groups, num_staging=self.rng.choice((1, 2))),
            num_slots=200,
            keys=keys_of(self.prompts.get(request_id, ())),
        )
        self.owner.adopt(request)
        self.lengths[request_id] = 0

    def end_all(self) -> None:
        """End every request and every fault, and run until nothing is under way."""
        for request_id in list(self.lengths):
            self.end(request_id)
        for rank in self.ranks:
            rank.engine.rates = FaultRates()
        self.drain()
        for rank in self.ranks:
            for ticket in list(rank.engine.hung):
                rank.engine.end_hung(ticket)
        self.drain()
