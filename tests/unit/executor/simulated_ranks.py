"""Ranks without a model: memory that remembers which block of whose KV was written where.

Everything but the model and the bytes is the real thing: `BlockOwner`, `Transfers` and
`TransferRunner`. Copies are carried out as late as waiting allows, or at random before, and read
their source only then, so that a missing wait shows.
"""

import random
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import BlockHash

from services.control.prefixes.prefix_cache import Column, FoundPrefix
from services.control.requests.life import State
from services.control.requests.request_record import RequestRecord
from services.executor.blocks.block_owner import BlockOwner
from services.executor.blocks.holder import Holder
from services.executor.blocks.host_pool import HostPool
from services.executor.blocks.residency import RequestKV
from services.executor.blocks.transfers.transfers import Transfers
from services.executor.copies.copy_engine import FOR_EVER, Copy, Direction, TransferTotals
from services.executor.copies.transfer_runner import TransferRunner
from services.executor.step_messages import StepFeedback, StepTransfers
from services.placement.blocks import STATE, BlockGeometry
from services.placement.layer_placement import LayerPlacement
from tests.unit.records import make_record

# Whose KV or which tokens', layer group, position; None: poison.
Content = tuple[str, int, int] | None
BLOCK_SIZE = 4


@dataclass(eq=False)
class LateTicket:
    waits_for_layers: ClassVar[bool] = False
    copy: Copy
    done: bool = False
    cancelled: bool = False
    fault: str = ""  # what is to go wrong with it


class LateEngine:
    """Copies contents between two dicts, late."""

    def __init__(self, memory: dict[int, Content], rng: random.Random) -> None:
        self.memory = memory
        self.host: dict[int, Content] = {}
        self._rng = rng
        self._queues: dict[Direction, list[LateTicket]] = {d: [] for d in Direction}

    def submit(self, copy: Copy) -> LateTicket:
        if copy.direction is Direction.H2D:
            self.memory.update(dict.fromkeys(copy.block_ids))
        ticket = LateTicket(copy)
        self._queues[copy.direction].append(ticket)
        return ticket

    def wait(self, ticket: LateTicket, timeout_s: float = FOR_EVER) -> float:
        queue = self._queues[ticket.copy.direction]
        if ticket.copy.direction is Direction.D2H:  # in the order of submission
            while not ticket.done:
                self._carry_out(queue.pop(0))
        elif not ticket.done:
            queue.remove(ticket)
            self._carry_out(ticket)
        return 0.0

    def cancel(self, ticket: LateTicket) -> None:
        ticket.cancelled = True

    def progress(self) -> None:
        """Carry out some copies that nobody waits for."""
        for direction, queue in self._queues.items():
            if direction is Direction.H2D:
                self._rng.shuffle(queue)
            for _ in range(self._rng.randrange(4)):
                if queue:
                    self._carry_out(queue.pop(0))

    def _carry_out(self, ticket: LateTicket) -> None:
        copy = ticket.copy
        for slot, block_id in zip(copy.slots, copy.block_ids, strict=True):
            if ticket.cancelled:
                break
            if copy.direction is Direction.H2D:
                self.memory[block_id] = self.host.get(slot)
            else:
                self.host[slot] = self.memory.get(block_id)
        ticket.done = True

    def totals(self) -> TransferTotals:
        return TransferTotals()

    def close(self) -> None:
        pass


@dataclass(frozen=True)
class Slice:
    """One request in one step."""

    request_id: str
    start: int  # tokens
    num_tokens: int
    new_ids: tuple[list[int], ...]  # per group, what its row gains
    is_new: bool
    beginning: int = 0  # how often it has begun anew
    prompt: tuple[str, ...] = ()  # full blocks that others may begin with, too
    shadow_of: str = ""  # whose KV it computes anew; empty: its own

    @property
    def kv(self) -> str:
        """Whose KV it is: that of another beginning is somebody else's."""
        return f"{self.shadow_of or self.request_id}.{self.beginning}"

    def content(self, group: int, position: int) -> Content:
        """Return what is in a block: in one of the prompt, what follows from its tokens alone."""
        if position < len(self.prompt):
            return "/".join(self.prompt[: position + 1]), group, position
        return self.kv, group, position


class SimulatedRank:
    def __init__(
        self,
        num_groups: int,
        rng: random.Random,
        engine: "type[LateEngine] | None" = None,
        *,
        windows: Sequence[int] = (),
    ) -> None:
        """Give an engine whose copies fail: what is wrong then is noted, not asserted.

        `windows`: of the side groups.
        """
        self.memory: dict[int, Content] = {}
        self.rows: dict[str, list[list[int]]] = {}
        self.engine = (engine or LateEngine)(self.memory, rng)
        self.wrong: set[str] = set()  # KV that was wrong when it was read, or depends on that
        self._may_be_wrong = engine is not None
        self.replays_full_graphs = False  # where nothing needs the hooks
        self.runner = TransferRunner(self.engine, num_groups, num_side_groups=len(windows))
        self.runner.fill = lambda ids, nan: self.memory.update(dict.fromkeys(ids)) if nan else None
        self._num_groups, self._windows = num_groups, windows

    def run_step(self, transfers: StepTransfers, batch: list[Slice]) -> StepFeedback:
        for edit in self.runner.take_in(transfers):
            if edit.request_id in self.rows:
                row = self.rows[edit.request_id][edit.group]
                row[edit.start : edit.start + len(edit.block_ids)] = edit.block_ids
        for part in batch:
            if part.is_new:
                self.rows[part.request_id] = [[] for _ in part.new_ids]
            for row, ids in zip(self.rows[part.request_id], part.new_ids, strict=True):
                row.extend(ids)
        self.runner.begin_step(transfers)
        self._are_hooks_called = (
            transfers.needs_hooks
            if self.replays_full_graphs
            else self.runner.has_work_between_layers
        )
        for group in range(self._num_groups if batch else 0):
            self._run_group(group, batch)
            self.engine.progress()
        for number, window in enumerate(self._windows, self._num_groups):
            for part in batch:
                self._run_side_group(number, window, part)
        self.runner.end_step()
        return self.runner.feedback()

    def _run_group(self, group: int, batch: list[Slice]) -> None:
        for part in batch:  # vLLM writes new KV before it asks for the layer's load
            self._write(group, part)
        if self._are_hooks_called:
            self.runner.before_group(group)
        for part in batch:
            self._read(group, part)
        if self._are_hooks_called:
            self.runner.after_group(group)

    def _write(self, group: int, part: Slice) -> None:
        end = part.start + part.num_tokens
        for position in range(part.start // BLOCK_SIZE, -(-end // BLOCK_SIZE)):
            block_id = self.rows[part.request_id][group][position]
            content = part.content(group, position)
            if position * BLOCK_SIZE < part.start:
                self._check(part, self.memory.get(block_id) == content, "an open block is lost")
            self.memory[block_id] = None if part.kv in self.wrong else content

    def _read(self, group: int, part: Slice) -> None:
        end = part.start + part.num_tokens
        for position in range(-(-end // BLOCK_SIZE)):
            block_id = self.rows[part.request_id][group][position]
            expected, found = part.content(group, position), self.memory.get(block_id)
            message = f"attention reads {found} where {expected} belongs"
            self._check(part, found == expected, message)

    def _run_side_group(self, group: int, window: int, part: Slice) -> None:
        row, end = self.rows[part.request_id][group], part.start + part.num_tokens
        if window == STATE:  # belongs to a number of tokens
            found = self.memory.get(row[0])
            self._check(part, not part.start or found == (part.kv, group, part.start), "a state")
            self.memory[row[0]] = part.kv, group, end
            return
        for position in range(max(0, part.start - window + 1) // BLOCK_SIZE, -(-end // BLOCK_SIZE)):
            content = part.kv, group, position
            if position * BLOCK_SIZE < part.start:
                self._check(part, self.memory.get(row[position]) == content, "a window")
            self.memory[row[position]] = content

    def _check(self, part: Slice, is_right: bool, message: str) -> None:
        if not is_right:
            assert self._may_be_wrong, message
            self.wrong.add(part.kv)


def keys_of(prompt: tuple[str, ...]) -> list[BlockHash]:
    """Return the hashes of a prompt's blocks, each of which stands for those before it, too."""
    return [BlockHash("/".join(prompt[: n + 1]).encode()) for n in range(len(prompt))]


def found_in(host: HostPool, keys: Sequence[BlockHash]) -> list[Column]:
    """Return what a request that asks for the first time may begin with."""
    return list(host.find(FoundPrefix(), keys, len(keys)))


@dataclass
class Simulation:
    """A scheduler that knows only capacity, and ranks that run its steps `depth` steps later."""

    seed: int
    num_groups: int = 4
    num_blocks: int = 60
    num_slots: int = 400
    num_ranks: int = 2
    depth: int = 1  # steps in flight when the next one is scheduled
    max_mirrored: int = 1_000
    windows: tuple[int, ...] = ()  # of the side groups
    max_ahead_tokens: int = 0  # drafts
    lengths: dict[str, int] = field(default_factory=dict)  # tokens computed, of live requests
    prompts: dict[str, tuple[str, ...]] = field(default_factory=dict)  # of those with shared ones
    returning: set[str] = field(default_factory=set)  # admitted again, not yet scheduled
    beginnings: Counter[str] = field(default_factory=Counter)  # how often each began anew
    in_flight: deque[tuple[StepTransfers, list[Slice]]] = field(default_factory=deque)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.pool = BlockPool(self.num_blocks, False, BLOCK_SIZE)
        self.records: dict[str, RequestRecord[RequestKV]] = {}
        self.owner = BlockOwner(
            self.pool,
            HostPool(self.num_slots),
            BlockGeometry(
                num_groups=self.num_groups,
                block_size=BLOCK_SIZE,
                side_windows=self.windows,
                max_in_flight_tokens=64,
                max_ahead_tokens=self.max_ahead_tokens,
            ),
            self.records,
            poison_freed=True,
        )
        self.transfers = Transfers(
            self.owner, num_ranks=self.num_ranks, write_budget=lambda _: self.max_mirrored
        )
        self.ranks = [self.make_rank(number) for number in range(self.num_ranks)]
        self.num_requests = 0
        self.recomputed: list[RequestKV] = []  # by the step that was scheduled last

    def kv(self, request_id: str) -> RequestKV:
        """Return the KV of a request that has some."""
        kv = self.records[request_id].kv
        assert kv is not None
        return kv

    def make_rank(self, number: int) -> SimulatedRank:
        return SimulatedRank(self.num_groups, self.rng, windows=self.windows)

    def step(self, num_new_tokens: dict[str, int]) -> None:
        """Schedule one step with the tokens that find room, and run the oldest one in flight."""
        batch = []
        for request_id, num_tokens in num_new_tokens.items():
            part = self._schedule(request_id, num_tokens)
            if part is not None:
                batch.append(part)
        transfers = self.transfers.plan_step({p.request_id: self.num_accepted(p) for p in batch})
        for part in batch:
            self.lengths[part.request_id] = self.length_after(part)
        batch.extend(self._shadows([part.request_id for part in batch]))
        self.in_flight.append((transfers, batch))
        self.owner.check_integrity()
        while len(self.in_flight) > self.depth:
            self.run_oldest()

    def num_accepted(self, part: Slice) -> int:
        """Return how many tokens of a request are its own for good once a step has run."""
        return part.start + part.num_tokens

    def length_after(self, part: Slice) -> int:
        """Return where the request's next step begins."""
        return part.start + part.num_tokens

    def _shadows(self, scheduled: list[str]) -> list[Slice]:
        self.recomputed = [kv for kv in self.owner.uncached.kvs if kv.request_id in scheduled]
        return [
            Slice(
                f"{kv.request_id}, a shadow",
                0,
                kv.num_recomputed * BLOCK_SIZE,
                tuple(
                    [block.block_id for block in kv.recomputed_row(group)]
                    for group in range(self.num_groups)
                ),
                is_new=True,
                beginning=self.beginnings[kv.request_id],
                prompt=self.prompts.get(kv.request_id, ()),
                shadow_of=kv.request_id,
            )
            for kv in self.recomputed
        ]

    def uncache(self, request_id: str, num_blocks: int) -> None:
        """Let so many leading blocks be uncached from the next step on."""
        request = self.kv(request_id)
        if request.retiring and request in self.recomputed:
            self.owner.uncached.settle(request)
        self.owner.uncached.set_length(request, num_blocks, num_known=self.lengths[request_id])
        self.owner.check_integrity()

    def _schedule(self, request_id: str, num_tokens: int) -> Slice | None:
        wanted = self.lengths[request_id] + num_tokens
        return self.sliced(request_id, num_tokens, num_wanted=wanted, num_accepted=wanted)

    def sliced(
        self, request_id: str, num_tokens: int, *, num_wanted: int, num_accepted: int
    ) -> Slice | None:
        """Return a request's part of a step, in a row of `num_wanted` tokens; None without room."""
        start = self.lengths[request_id]
        request, sides = self.kv(request_id), self.owner.sides
        wanted = {"num_tokens": num_wanted, "num_accepted": num_accepted}
        sides.slide(request_id, num_tokens=self.processed(request_id))
        num_free = self.pool.get_num_free_blocks()
        num_new = self.owner.growth.num_new_blocks(request, **wanted)
        num_new += sides.num_new(request_id, num_tokens=num_wanted)
        if num_new > num_free:
            return None
        gained = self.owner.growth.grow(request, **wanted)
        gained = (*gained, *sides.grow(request_id, num_tokens=num_wanted))
        assert num_free - self.pool.get_num_free_blocks() == num_new, (
            "took what it did not announce"
        )
        is_new = start == 0 or request_id in self.returning
        self.returning.discard(request_id)
        if is_new:  # vLLM sends the whole row
            gained = (*request.shown_rows(), *sides.rows(request_id))
        ids = tuple([block.block_id for block in row] for row in gained)
        return Slice(
            request_id,
            start,
            num_tokens,
            ids,
            is_new=is_new,
            beginning=self.beginnings[request_id],
            prompt=self.prompts.get(request_id, ()),
        )

    def processed(self, request_id: str) -> int:
        """Return how many tokens of a live request no step in flight computes."""
        parts = [p for _, batch in self.in_flight for p in batch if p.request_id == request_id]
        return min((part.start for part in parts), default=self.lengths[request_id])

    def run_oldest(self) -> None:
        transfers, batch = self.in_flight.popleft()
        feedback: Any = None
        for rank in self.ranks:
            own = rank.run_step(transfers, batch)
            feedback = own if feedback is None else feedback.aggregate(own)
        self.take_in(feedback, batch)

    def take_in(self, feedback: StepFeedback, batch: list[Slice]) -> None:
        self.transfers.absorb(feedback)

    def admit(
        self, placement: LayerPlacement, num_slots: int = 200, prompt: tuple[str, ...] = ()
    ) -> RequestKV:
        """Admit a request with nothing computed; `prompt` are blocks that others may share."""
        record = self.arrive(prompt)
        request = self.begin(record.request_id, placement, num_slots, prompt)
        record.enter(State.RUNNING)
        return request

    def arrive(self, prompt: tuple[str, ...] = ()) -> RequestRecord[RequestKV]:
        self.num_requests += 1
        record = make_record(f"r{self.num_requests}")
        self.records[record.request_id], self.prompts[record.request_id] = record, prompt
        return record

    def begin(
        self, name: str, placement: LayerPlacement, num_slots: int, prompt: tuple[str, ...] = ()
    ) -> RequestKV:
        request = self.owner.draft(
            self.records[name], placement, num_slots=num_slots, keys=keys_of(prompt)
        )
        self.owner.adopt(request)
        self.lengths[name] = 0
        return request

    def seek(self, record: RequestRecord[RequestKV], keys: Sequence[BlockHash]) -> Sequence[Column]:
        """Return what a request may begin with: not its last block."""
        return self.owner.trunks.find(record.prefix, keys, len(keys) - 1)

    def place(self, holder: Holder, wanted: LayerPlacement) -> None:
        """Let a request's own part, or a trunk, be where a planner without any sense says."""
        self.owner.offload(holder, wanted.offloaded)
        if isinstance(holder, RequestKV):
            self.transfers.write_through.note(holder)
        for index in set(holder.offloaded) - wanted.offloaded:
            self.owner.restores.begin(holder, index)
            if self.rng.random() < 0.2:
                self.owner.restores.cancel(holder, index)
        self.owner.staging.set_number(holder, wanted.num_staging)

    def sleep(self, request_id: str, groups: Iterable[int]) -> None:
        """Take the staging and some groups of a request that does not run."""
        request = self.kv(request_id)
        self.owner.staging.drop(request)
        self.owner.offload(request, groups)
        self.transfers.write_through.note(request)
        self.owner.check_integrity()

    def park(self, request_id: str) -> int:
        """Preempt a request, keeping its host copies; return how many tokens they hold."""
        del self.lengths[request_id]
        self.pool.free_blocks(reversed(self.owner.park(self.kv(request_id))))
        self.records[request_id].preempted()
        self.owner.check_integrity()
        kept = self.records[request_id].kv
        return kept.num_tokens if kept else 0

    def come_back(self, request_id: str) -> None:
        """Admit a parked request that is awake."""
        request = self.kv(request_id)
        assert not request.asleep
        self.lengths[request_id] = request.num_tokens
        self.returning.add(request_id)

    def end(self, request_id: str) -> None:
        self.lengths.pop(request_id, None)
        if (kv := self.records[request_id].kv) is not None:
            self.pool.free_blocks(reversed(self.owner.pop(kv)))

    def settle(self) -> None:
        self.transfers.settle()
        self.owner.check_integrity()

    def drain(self) -> None:
        """Run idle steps until nothing is under way."""
        for _ in range(200):
            for rank in self.ranks:
                rank.engine.progress()
            self.settle()
            self.step({})
        while self.in_flight:
            self.run_oldest()
        self.settle()
