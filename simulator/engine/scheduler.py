"""Continuous batching over one block pool: which requests the next step has, and which make room.

The order is vLLM's: running requests first, one token each or the next chunk of a prompt, then
waiting ones, first come first served, each only if its whole prompt has room. Before that the guard
makes room. A request that lacks blocks all the same takes them from paused requests and groups on
their way back, then waits for copies under way; only then the newest request is preempted, and
brought back later.
"""

from collections import deque
from collections.abc import Callable

from services.control.counters import Counters
from services.control.measures.rates import Rates
from services.control.order.line import Line
from services.control.prefixes.prefix_cache import Column
from services.control.requests.life import State
from services.control.requests.request_record import RequestRecord
from services.control.room.capacity_guard import (
    MAX_STAGING,
    PLANNED_SPARE_FRAC,
    CapacityGuard,
)
from services.control.room.resumes import Resumes
from services.placement.types import EngineShape, RequestId
from simulator.device.copies import Lane
from simulator.engine.seam import SimulatedEngine
from simulator.engine.turns import Turn
from simulator.engine.vllm import NOTHING, VllmPool
from simulator.memory import side_copies
from simulator.memory.host import COLUMNS, HostLedger
from simulator.memory.kv import KVState
from simulator.memory.moves import CountedMoves, num_host_blocks, num_shared_slots
from simulator.memory.pool import PoolLedger
from simulator.memory.requests import SimulatedRequest


class Scheduler:
    """Owns the queues, the pool and the host pool. Only the host pool's size allows offloading."""

    def __init__(
        self,
        shape: EngineShape,
        h2d: Lane,
        d2h: Lane,
        *,
        vllm: VllmPool | None,
        rates: Callable[[], Rates],
    ) -> None:
        """`vllm`: where no KV may leave the pool; `rates`: measured so far."""
        self.shape, self.vllm, self._d2h = shape, vllm, d2h
        self.offloads = vllm is None and shape.num_host_blocks > 0
        self.geometry = shape.geometry
        self.pool = vllm.blocks if vllm else PoolLedger(num_blocks=shape.num_blocks)
        self.counters = Counters()
        self.host = HostLedger(num_blocks=shape.num_host_blocks, counters=self.counters)
        self.caches_prefixes = self.offloads and not shape.side_windows  # on the host
        self.running: list[SimulatedRequest] = []
        self.waiting: deque[SimulatedRequest] = deque()
        self.records: dict[str, RequestRecord[KVState]] = {}  # of all live requests
        self.moves = CountedMoves(shape, self.pool, self.host, lambda: self.live, h2d)
        self.guard = CapacityGuard(
            self.moves,
            self.records,
            self.counters,
            max_staging=MAX_STAGING,
            restore_when_free_frac=PLANNED_SPARE_FRAC,
        )
        self.resumes = Resumes(self.moves, self.guard, self.counters, block_bytes=shape.block_bytes)
        engine = SimulatedEngine(self, h2d, d2h)
        self.line: Line[SimulatedRequest, KVState] = Line(engine, self.resumes, rates)
        self._num_left_of_prompts: int | None = None  # tokens, of this step; None: no limit
        self._num_recomputed: dict[RequestId, int] = {}  # blocks, of this step
        self._last_uid = 0  # of columns
        self.num_admitted = 0
        self.in_flight: list[SimulatedRequest] = []  # whose newest token the engine waits for
        self.preempted: list[SimulatedRequest] = []  # since the caller last emptied it

    def add(self, request: SimulatedRequest) -> None:
        """Take in a request that has arrived, at the end of the queue."""
        self.waiting.append(request)
        self.moves.requests[request.request_id] = request
        self.records[request.request_id] = request.record

    @property
    def num_places(self) -> int:
        """Return how many more requests may run."""
        return self.shape.max_num_seqs - len(self.running)

    @property
    def live(self) -> tuple[SimulatedRequest, ...]:
        """Return all requests that have not ended, those that run first."""
        return (*self.running, *self.waiting)

    # -- one step ------------------------------------------------------------------------------

    def schedule(self, now_s: float) -> list[Turn]:
        """Return the next step, with the blocks for it taken. Empty: no request can run now."""
        self._send_away(now_s)
        self._wake_up()
        self._uncache()
        if self.offloads:
            self.line.make_room()
            self.line.prepare()
        turns: list[Turn] = []
        decision = self.line.decision
        self._num_left_of_prompts = decision.chunk_tokens if decision else None
        budget, num_preempted = self.shape.max_num_batched_tokens, len(self.preempted)
        for request in list(self.running):
            if request.record.state.is_skipped or request not in self.running:
                continue
            turn = self._turn(request, budget, now_s) if budget > 0 else None
            if turn is None:
                break  # those behind it wait, too
            turns.append(turn)
            budget -= turn.num_rows
        turns = [turn for turn in turns if turn.request in self.running]
        while budget > 0 and len(self.preempted) == num_preempted:
            if not self._admit(budget):
                break
            turn = self._turn(self.running[-1], budget, now_s)
            assert turn is not None, "there is room for it"
            turns.append(turn)
            budget -= turn.num_rows
        for turn in turns:
            turn.request.computed(turn.num_tokens)
        return turns

    def _send_away(self, now_s: float) -> None:
        """Preempt the requests that are parked, each as soon as its newest token is known."""
        for request in list(self.running):
            is_leaving = request.record.state is State.LEAVING
            if is_leaving and request not in self.in_flight:
                self.leave(request, now_s)

    @property
    def sends_away(self) -> bool:
        """Return whether requests leave that wait for no copy."""
        leaving = (one for one in self.running if one.record.state is State.LEAVING)
        return any(not side_copies.is_leaving(one.kv) for one in leaving)

    def leave(self, request: SimulatedRequest, now_s: float) -> None:
        """Preempt a request, as soon as what it takes with it is on the host."""
        if side_copies.may_leave(request.kv, self._d2h, self.shape.block_bytes):
            self.preempt(request, now_s)

    def take_in_copies(self) -> int:
        """Act on copies that are complete; return how many groups are back."""
        if self.vllm:
            self.vllm.take_in_copies()
        num_restored = 0
        for request in self.live:
            if request.record.kv is not None:
                num_restored += self._settle(request.kv)
        for trunk in self.moves.trunks.all:
            num_restored += self._settle(trunk)
        return num_restored

    def _settle(self, holder: KVState) -> int:
        """Let others find what is saved, and groups be back; return how many are."""
        saved = self.take_in_saves(holder)
        num_restored = holder.take_in_restores()
        if saved or num_restored:
            holder.seal()
            self.moves.refresh(holder)
        return num_restored

    def take_in_saves(self, holder: KVState) -> bool:
        """Let others find what is saved of a holder; return whether there is more than before."""
        saved = holder.take_in_saves()
        self.host.publish(holder.columns[saved.start : saved.stop])
        return bool(saved)

    def _wake_up(self) -> None:
        """Give requests whose pause has ended a staging buffer, as far as there are blocks."""
        for request in self.running:
            if request.record.state is State.LEAVING:
                continue
            runs = not request.is_paused and self.moves.wake(request.kv)
            state = State.RUNNING if runs else State.PAUSED
            if request.record.state is not state:
                request.record.enter(state)

    def _uncache(self) -> None:
        """Let KV be computed anew that the decision says; what is kept from now on is, too."""
        self._num_recomputed.clear()
        wanted = self.line.decision.uncached_blocks if self.line.decision else {}
        for request in self.running:
            kv, before = request.kv, request.kv.num_uncached
            number = wanted.get(request.request_id, 0)
            if number != before and request.num_output_tokens:
                kv.uncache(number, num_free=self.pool.num_free)
                self.moves.refresh(kv)
            self._num_recomputed[request.request_id] = max(before, kv.num_uncached)

    def _turn(self, request: SimulatedRequest, budget: int, now_s: float) -> Turn | None:
        num_tokens = self._chunk(request.num_left_tokens, budget)
        if not num_tokens:
            return None
        before = request.num_computed_tokens
        while not self._has_room(request.kv, before + num_tokens):
            if self.guard.relieve():
                return None  # blocks are free, or come free, before the next step
            victim = self.running[-1]
            self.preempt(victim, now_s)
            if victim is request:
                return None
        rows, staged, filled = request.kv.num_rows, request.kv.num_staged, request.kv.num_tokens
        request.kv.grow(before + num_tokens)
        self.moves.refresh(request.kv)
        self.fill(request, filled, before + num_tokens)
        if self._num_left_of_prompts is not None and request.num_left_tokens > 1:
            self._num_left_of_prompts -= num_tokens
        direct = request.kv.num_staged - staged if request.kv.num_rows > rows else 0
        return Turn(
            request=request,
            num_tokens=num_tokens,
            num_before=before,
            num_staged=staged,
            num_direct=direct,
            num_recomputed=self.shape.block_size * self._num_recomputed.get(request.request_id, 0),
            num_drafts=min(request.num_drafts, budget - num_tokens),
        )

    def _chunk(self, num_left: int, budget: int) -> int:
        """Return how many of the tokens left a step computes."""
        most = min(num_left, budget, self.shape.max_prefill_chunk_tokens or budget)
        left = self._num_left_of_prompts
        return most if left is None or num_left == 1 else min(most, left)

    def _has_room(self, kv: KVState, num_tokens: int, num_kept_free: int = 0) -> bool:
        return kv.num_new(num_tokens) + num_kept_free <= self.pool.num_free

    # -- admission -----------------------------------------------------------------------------

    def _admit(self, budget: int) -> bool:
        """Move the first in line to the running requests if its whole prompt has room."""
        request = self._next_with_room(budget) if self.num_places else None
        if request is None:
            return False
        self.waiting.remove(request)
        self.running.append(request)
        is_new = not request.num_preemptions
        self.resumes.admitted(request.record, is_new=is_new)
        request.num_computed_tokens = request.kv.num_tokens
        if is_new:
            request.num_cached_tokens = request.kv.num_tokens
            self.counters.num_prefix_hit_tokens += request.kv.num_tokens
        self.num_admitted += 1
        return True

    def _next_with_room(self, budget: int) -> SimulatedRequest | None:
        """Return the first in line, if it has room; one that waits for copies is passed over."""
        for request in self.line.requests():
            if self.line.num_host_tokens(request) is None or self._is_loading(request):
                continue
            has_room = self._take_in(request, budget)
            if has_room is not None and not self._is_loading(request):
                return request if has_room else None
        return None

    def _is_loading(self, request: SimulatedRequest) -> bool:
        return self.vllm is not None and self.vllm.is_loading(request)

    def _take_in(self, request: SimulatedRequest, budget: int) -> bool | None:
        """Return whether there is room for all known tokens of a request; None: it has to wait."""
        is_new = not request.kv.num_tokens  # else its blocks are from the host
        kv = self._draft(request) if is_new else request.kv
        hit = self.vllm.find(request) if self.vllm and is_new else NOTHING
        if hit is None:
            return None
        kv.num_tokens += hit.num_blocks * self.shape.block_size
        chunk = self._chunk(request.num_tokens - kv.num_tokens, budget)
        if not chunk:
            return False
        # Part of a prompt may take more than all of it: what fills a block is staged.
        ends, num_kept_free = [request.num_tokens, kv.num_tokens + chunk], 0
        if self.vllm:
            num_kept_free = self.vllm.num_kept_free(hit, beside_others=bool(self.running))
            if not self.vllm.options.scheduler_reserve_full_isl:
                ends = [kv.num_tokens if hit.on_host else ends[1]]
        if not all(self._has_room(kv, end, num_kept_free) for end in ends):
            return False
        if is_new and kv.mirrored:
            reserved = self.moves.promise(request, num_host_blocks(self.geometry, request))
            assert reserved
        if self.vllm:
            self.vllm.begin(request, hit)
        request.record.kv = kv
        return True

    def _draft(self, request: SimulatedRequest) -> KVState:
        """Return where a request that asks for its first blocks would be."""
        kv = KVState(request_id=request.request_id, geometry=self.geometry)
        if self.offloads:
            others = self.line.active_needs()
            placement = self.guard.place_new(self.line.engine.need_of(request), others)
            kv.mirrored = self.moves.can_reserve(request, num_host_blocks(self.geometry, request))
            if kv.mirrored:
                kv.wanted_buffers = placement.num_staging
                kv.offload(sorted(placement.offloaded), num_free=0)
        return kv

    # -- the prefix cache ----------------------------------------------------------------------

    def fill(self, request: SimulatedRequest, before: int, after: int) -> None:
        """Let other requests begin with what a step fills, the tokens from `before` to `after`."""
        kv, block_size = request.kv, self.shape.block_size
        if self.vllm:
            self.vllm.publish(request, before, after)
        for number in range(len(kv.columns), self._num_to_share(kv, after)):
            key = request.spec.shared_key(number, block_size)
            if key is None:
                break
            self._last_uid += 1
            column = Column(key, (0,) * self.geometry.num_groups, self._last_uid, holder=kv)
            self.host.fill(request.request_id, column)
            kv.columns.append(column)

    def _num_to_share(self, kv: KVState, num_tokens: int) -> int:
        """Return how many leading blocks others may have: full ones with room on the host."""
        return num_tokens // self.shape.block_size if self.caches_prefixes and kv.mirrored else 0

    # -- leaving -------------------------------------------------------------------------------

    def preempt(self, request: SimulatedRequest, now_s: float) -> None:
        """Put a request back to the head of the queue, with what is on the host."""
        self.running.remove(request)
        kept = request.kv.parked()
        request.kv.cancel_copies()
        self.release(request)
        self.moves.keep(request, kept)
        request.preempt(now_s)
        if request.kv.mirrored:
            num_slots = self.geometry.num_groups * request.kv.num_host_blocks
            if request.kv.num_side_tokens:
                num_slots += side_copies.num_blocks(request.kv, request.kv.num_side_tokens)
            self.host.set_owned(request.request_id, num_slots - num_shared_slots(request.kv))
        self.waiting.appendleft(request)
        self.preempted.append(request)

    def put_back_last(self) -> bool:
        """Take back the blocks of the last in line that has some: those ahead lack them.

        One that is alone is computed again. False if no waiting request has blocks.
        """
        preparing = [
            one for one in self.waiting if self.pool.owned.get(one.request_id) or one.kv.trunks
        ]
        if preparing and (len(preparing) == 1 or self.vllm):
            preparing[-1].record.way = None
            self.moves.drop(preparing[-1].kv)
        elif preparing:
            self.line.put_back_last(preparing)
        return bool(preparing)

    def forget(self, request: SimulatedRequest) -> None:
        """Take a request out of its queue, and forget it."""
        queue = self.waiting if request.record.state.is_queued else self.running
        queue.remove(request)
        if self.vllm:
            self.vllm.ended(request)
        self.release(request)
        self.host.give_back(request.kv.columns)
        self.moves.requests.pop(request.request_id, None)
        self.records.pop(request.request_id, None)

    def release(self, request: SimulatedRequest) -> None:
        request.record.way = None
        self.moves.trunks.end(request.kv)
        self.host.release(request.request_id)

    def check_integrity(self) -> None:
        """Raise AssertionError if blocks, host slots or requests do not add up."""
        self.pool.check_integrity()
        self.host.check_integrity()
        if self.vllm and self.vllm.tier:
            self.vllm.tier.check_integrity()
        ids = {request.request_id for request in self.live}
        trunks = self.moves.trunks
        names = {RequestId(trunk.request_id) for trunk in trunks.all}
        assert self.pool.owned.keys() <= ids | names
        assert self.host.owned.keys() <= ids | {COLUMNS}
        trunks.check_integrity(one.kv for one in self.live)
        in_columns = self.host.cache.check_integrity(one.kv.columns for one in self.live)
        assert len(in_columns) == self.host.owned.get(COLUMNS, 0)
        assert len(ids) == len(self.running) + len(self.waiting)
        assert len(self.running) <= self.shape.max_num_seqs
        for request in self.live:
            assert request.record.state.is_queued == (request in self.waiting)
            assert request.record.is_prepared <= (request.record.kv is not None)
            num_owned = request.kv.num_owned + request.kv.num_side_blocks
            assert self.pool.owned.get(request.request_id, 0) == num_owned
            assert (request.request_id in self.host.owned) == request.kv.mirrored
            request.kv.check_integrity()
        assert self.records.keys() == ids
