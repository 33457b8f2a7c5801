"""vLLM's running and waiting loops in miniature, over simulated ranks.

The owner, the planner, the capacity guard and the run control are the real ones; what vLLM does
around them is reduced to who runs, who waits, and who is preempted for want of blocks.
"""

import time
from types import SimpleNamespace
from typing import Any

from services.control.capacity_guard import CapacityGuard, Need
from services.control.holds import Holds
from services.control.rates import Rates
from services.control.resumes import Resumes
from services.executor.blocks.moves import BlockMoves
from services.executor.blocks.residency import RequestKV
from services.executor.kv_options import KVOptions
from services.executor.scheduler.run_control import RunControl
from tests.unit.executor.simulated_ranks import BLOCK_SIZE, Simulation, Slice
from tests.unit.records import make_record


class SimulatedRequest(SimpleNamespace):
    """What the run control looks at in vLLM's request; it gains a token in each step it is in."""

    def __init__(self, request_id: str, num_tokens: int, num_placeholders: int) -> None:
        """With `num_placeholders`, that many of its last tokens are sampled and not yet known."""
        super().__init__(
            request_id=request_id,
            num_prompt_tokens=num_tokens,
            num_known_or_not=num_tokens,
            num_output_placeholders=0,
            max_tokens=1_000,
            num_computed_tokens=0,
            num_in_flight_tokens=0,
            num_preemptions=0,
            skip_reading_prefix_cache=False,
            next_decode_eligible_step=0,
        )
        self.num_placeholders = num_placeholders

    @property
    def num_tokens(self) -> int:
        num_tokens: int = self.num_known_or_not - self.num_output_placeholders
        return num_tokens

    @property
    def num_output_tokens(self) -> int:
        num_tokens: int = self.num_tokens - self.num_prompt_tokens
        return num_tokens


class SimulatedScheduler:
    """Schedules a step, runs it, and lets its copies end: `step`."""

    def __init__(
        self,
        *,
        num_blocks: int,
        num_slots: int,
        num_predicted: int = 64,
        free_frac: float = 0.1,
        num_placeholders: int = 0,
    ) -> None:
        """`num_placeholders` is of each request that runs: 1 as under asynchronous scheduling."""
        self.sim = Simulation(seed=1, depth=0, num_blocks=num_blocks, num_slots=num_slots)
        self.block_owner, self.transfers = self.sim.owner, self.sim.transfers
        self.records = self.sim.records
        self.options = KVOptions(predicted_output_tokens=num_predicted)
        self.capacity_guard = CapacityGuard(
            BlockMoves(self.block_owner, self.transfers),
            self.records,
            self.block_owner.counters,
            max_staging=2,
            restore_when_free_frac=free_frac,
        )
        self.running: list[Any] = []
        self.waiting: list[Any] = []
        self.requests: dict[str, Any] = {}
        self.max_num_running_reqs = 16
        holds = Holds(
            self.records,
            self.block_owner.counters,
            clock=time.monotonic,
            max_hold_s=self.options.max_pause_s,
        )
        moves = BlockMoves(self.block_owner, self.transfers)
        resumes = Resumes(moves, self.capacity_guard, self.block_owner.counters, block_bytes=1)
        vllm: Any = self
        self.control = RunControl(vllm, self.transfers, holds, resumes, Rates)
        self._num_placeholders = num_placeholders
        self._drafts: list[RequestKV] = []
        self._num_steps = 0
        self._batch: list[Slice] = []

    def add(self, request_id: str, num_tokens: int) -> Any:
        request = SimulatedRequest(request_id, num_tokens, self._num_placeholders)
        self.requests[request_id] = request
        self.records[request_id] = make_record(request_id)
        self.waiting.append(request)
        return request

    def finish(self, request_id: str) -> None:
        request = self.requests.pop(request_id)
        (self.running if request in self.running else self.waiting).remove(request)
        self.sim.end(request_id)
        del self.records[request_id]

    def park(self, request_id: str) -> None:
        """Park a request, and step until nobody runs."""
        self.control.holds.park(self.records[request_id])
        while any(request.request_id == request_id for request in self.running):
            self.step()

    def step(self) -> frozenset[str]:
        """Return who ran."""
        self._num_steps += 1
        self._batch = []
        self.transfers.settle()
        for draft in self._drafts:
            self.block_owner.discard(draft)
        self._drafts.clear()
        self.control.stop_and_start()
        self.capacity_guard.adjust(self.control.active_needs(), self.control.needs_in_line())
        self.control.prepare_resumes(self._num_predicted_slots)
        if self._schedule_running():
            self._admit()
        self._run()
        self.control.after_step(num_scheduled=len(self._batch))
        self.control.check_integrity()
        self.block_owner.check_integrity(drafts=self._drafts)
        return frozenset(part.request_id for part in self._batch)

    def _schedule_running(self) -> bool:
        """Return whether nobody had to be preempted."""
        preempted, index = False, 0
        while index < len(self.running):
            request = self.running[index]
            if self._num_steps < request.next_decode_eligible_step:
                index += 1
                continue
            while not self._has_room(request):
                if self.capacity_guard.relieve():
                    break
                victim = self.running.pop()
                self._preempt_request(victim, 0.0)
                preempted = True
                if victim is request:
                    break
            if request not in self.running or not self._has_room(request):
                break
            self._take(request)
            index += 1
        return not preempted

    def _has_room(self, request: Any) -> bool:
        kv = self.sim.kv(request.request_id)
        num_new = self.block_owner.growth.num_new_blocks(kv, num_tokens=request.num_known_or_not)
        num_free: int = self.sim.pool.get_num_free_blocks()
        return num_new <= num_free

    def _take(self, request: Any) -> None:
        num_new = request.num_known_or_not - request.num_computed_tokens
        part = self.sim._schedule(request.request_id, num_new)
        assert part is not None
        self._batch.append(part)

    def _admit(self) -> None:
        passed_over: list[Any] = []
        admitted = []
        while self.waiting and len(self.running) < self.max_num_running_reqs:
            request = self.waiting[0]
            num_host_tokens = self.control.num_host_tokens(request)
            if num_host_tokens is None:
                passed_over.append(self.waiting.pop(0))
                continue
            if not self._admit_one(request, num_host_tokens):
                break
            admitted.append(request)
        self.waiting[:0] = passed_over
        self.control.admitted([r.request_id for r in admitted if r.num_preemptions])

    def _admit_one(self, request: Any, num_host_tokens: int) -> bool:
        owner, name = self.block_owner, request.request_id
        record = self.records[name]
        kv, draft = record.kv, None
        if kv is None:
            need = Need(record, request.num_tokens)
            placement = self.capacity_guard.place_new(need, self.control.active_needs())
            num_slots = self._num_predicted_slots(request)
            kv = draft = owner.draft(record, placement, num_slots=num_slots)
            self._drafts.append(draft)
        if owner.growth.num_new_blocks(kv, num_tokens=request.num_tokens) > owner.blocks.num_free:
            return False
        if draft is not None:
            self._drafts.remove(draft)
            owner.adopt(draft)
        else:
            self.sim.returning.add(name)
        self.running.append(self.waiting.pop(0))
        request.num_computed_tokens = self.sim.lengths[name] = num_host_tokens
        self._take(request)
        return True

    def _num_predicted_slots(self, request: Any) -> int:
        num_left = max(0, request.max_tokens - request.num_output_tokens)
        num_tokens = request.num_tokens + min(num_left, self.options.predicted_output_tokens)
        num_blocks: int = num_tokens // BLOCK_SIZE
        return self.sim.num_groups * num_blocks

    def _preempt_request(self, request: Any, timestamp: float) -> None:
        self.sim.park(request.request_id)
        request.num_output_placeholders = 0
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        self.waiting.insert(0, request)
        self.control.preempted(request)

    def _run(self) -> None:
        lengths = {part.request_id: part.start + part.num_tokens for part in self._batch}
        transfers = self.transfers.plan_step(lengths)
        self.sim.lengths.update(lengths)
        self.sim.in_flight.append((transfers, self._batch))
        self.block_owner.check_integrity(drafts=self._drafts)
        self.sim.run_oldest()
        self.progress()
        for request in self.running:
            request.num_output_placeholders = 0
        for request_id in lengths:
            request = self.requests[request_id]
            request.num_computed_tokens = request.num_known_or_not
            request.num_known_or_not += 1
            request.num_output_placeholders = request.num_placeholders

    def progress(self) -> None:
        """Have copies end that nobody waits for: here, all of them."""
        for rank in self.sim.ranks:
            for _ in range(20):
                rank.engine.progress()
