"""Continuous batching over one block pool: who is part of the next step, and who makes room.

The order is vLLM's: running requests first, one token each or the next chunk of a prompt, then
waiting ones, first come first served. Who lacks blocks takes them, in this order, from restores
under way, from paused requests, from running ones by offloading one more group of the largest; only
then the newest request is preempted, and computed again later.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from services.placement.blocks import RESIDENT as RESIDENT_BLOCKS
from services.placement.blocks import BlockGeometry, min_request_blocks, num_request_blocks
from services.placement.fewest_offloaded import Demand, fewest_offloaded, spread_order
from services.placement.types import EngineShape
from simulator.blocks import BlockLedger
from simulator.requests import LiveRequest

MAX_STAGING = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One request's part of a step."""

    request: LiveRequest
    num_tokens: int  # computed, >= 1
    num_before: int  # computed before the step

    @property
    def is_decode(self) -> bool:
        return self.num_tokens == 1


class Scheduler:
    """Owns the queues, the pool and the host pool. Only the host pool's size allows offloading."""

    def __init__(self, shape: EngineShape, *, offloads: bool) -> None:
        """`offloads`: whether KV may leave the pool at all."""
        self.shape = shape
        self.offloads = offloads and shape.num_host_blocks > 0
        self.geometry = BlockGeometry(num_groups=shape.num_groups, block_size=shape.block_size)
        self.pool = BlockLedger(num_blocks=shape.num_blocks)
        self.host = BlockLedger(num_blocks=shape.num_host_blocks)
        self.running: list[LiveRequest] = []
        self.waiting: deque[LiveRequest] = deque()
        self.num_admitted = 0
        self.num_guard_offloads = 0  # groups that left the pool without a plan
        self.preempted: list[LiveRequest] = []  # since the caller last emptied it
        self._order = spread_order(shape.num_groups)

    # -- one step ------------------------------------------------------------------------------

    def schedule(self, now_s: float) -> list[Turn]:
        """Return the next step, with the blocks for it taken. Empty: nobody can run now."""
        turns: list[Turn] = []
        budget = self.shape.max_num_batched_tokens
        for request in list(self.running):
            if request.is_paused or request not in self.running or budget <= 0:
                continue
            turn = self._turn(request, budget, now_s)
            if turn is not None:
                turns.append(turn)
                budget -= turn.num_tokens
        while budget > 0 and (admitted := self._admit()) is not None:
            turn = self._turn(admitted, budget, now_s)
            if turn is None:
                break
            turns.append(turn)
            budget -= turn.num_tokens
        for turn in turns:
            turn.request.last_scheduled_s, turn.request.preempted_s = now_s, None
            turn.request.computed(turn.num_tokens)
        return turns

    def _turn(self, request: LiveRequest, budget: int, now_s: float) -> Turn | None:
        limit = self.shape.max_prefill_chunk_tokens or budget
        num_tokens = min(request.num_left_tokens, budget, limit)
        before = request.num_computed_tokens
        while not self._grow(request, before + num_tokens):
            if self._make_room():
                continue
            if self._waits_for_copies():
                return None  # blocks come free by themselves
            victim = self._victim()
            self.preempt(victim, now_s)
            if victim is request:
                return None
        return Turn(request=request, num_tokens=num_tokens, num_before=before)

    def _grow(self, request: LiveRequest, num_tokens: int) -> bool:
        """Give a request room for so many tokens, and staging if it has been asleep."""
        kv = request.kv
        if not self.pool.set_owned(
            request.request_id, kv.num_owned(num_tokens=num_tokens, awake=True)
        ):
            return False
        kv.num_tokens, kv.asleep = num_tokens, False
        return True

    # -- admission -----------------------------------------------------------------------------

    def fits_alone(self, request: LiveRequest) -> bool:
        """Return whether an empty engine could bring a request to its end."""
        total = request.spec.num_prompt_tokens + request.spec.num_output_tokens
        if num_request_blocks(self.geometry, RESIDENT_BLOCKS, num_tokens=total) <= (
            self.pool.num_blocks
        ):
            return True
        least = min_request_blocks(self.geometry, num_tokens=total) + self._chunk_blocks(request)
        least += self.geometry.num_groups  # a block less than full needs one more per group
        on_host = self._host_blocks(request) <= self.host.num_blocks
        return self.offloads and on_host and least <= self.pool.num_blocks

    def _host_blocks(self, request: LiveRequest) -> int:
        total = request.spec.num_prompt_tokens + request.spec.num_output_tokens
        return self.geometry.num_groups * -(-total // self.geometry.block_size)

    def _chunk_blocks(self, request: LiveRequest) -> int:
        """Return the blocks that a chunk of a prompt needs until its copies are complete."""
        limit = self.shape.max_prefill_chunk_tokens or self.shape.max_num_batched_tokens
        chunk = min(request.num_tokens, limit, self.shape.max_num_batched_tokens)
        return self.geometry.num_groups * -(-chunk // self.geometry.block_size)

    def _admit(self) -> LiveRequest | None:
        """Move the first in line to the running requests if it can have room for its prompt."""
        if not self.waiting or len(self.running) >= self.shape.max_num_seqs:
            return None
        request = self.waiting[0]
        if self.offloads:
            reserved = self.host.set_owned(request.request_id, self._host_blocks(request))
            request.kv.mirrored = reserved
        groups = self._first_placement(request)
        if groups is None:
            self.host.release(request.request_id)
            request.kv.mirrored = False
            return None
        request.kv.offloaded, request.kv.num_buffers = groups, min(1, len(groups))
        self.waiting.popleft()
        self.running.append(request)
        self.num_admitted += 1
        return request

    def _first_placement(self, request: LiveRequest) -> tuple[int, ...] | None:
        """Return the groups offloaded from the start; None if there is no room even so."""
        num_tokens = request.num_tokens + 1
        resident = num_request_blocks(self.geometry, RESIDENT_BLOCKS, num_tokens=num_tokens)
        if resident <= self.pool.num_free - self._num_promised():
            return ()
        if not request.kv.mirrored:
            return None
        demands = [
            Demand(num_tokens=max(1, r.num_tokens + 1), offloadable=r.kv.mirrored)
            for r in [*self._holders(), request]
        ]
        found = fewest_offloaded(
            demands,
            self.geometry,
            num_blocks=self.pool.num_blocks - self._chunk_blocks(request),
            max_staging=1,
        )
        if any(one is None for one in found):
            return None
        last = found[-1]
        assert last is not None
        return tuple(sorted(self._order[: last.num_offloaded]))

    def _num_promised(self) -> int:
        """Return the blocks that prompts under computation have yet to take."""
        return sum(
            r.kv.num_owned(num_tokens=r.num_tokens + 1) - self.pool.owned.get(r.request_id, 0)
            for r in self.running
            if r.num_left_tokens > 1
        )

    def _holders(self) -> Iterator[LiveRequest]:
        return (request for request in self.running if request.request_id in self.pool.owned)

    # -- making room ---------------------------------------------------------------------------

    def _make_room(self) -> bool:
        """Free some blocks without preempting anybody; return whether any came free."""
        return self._cancel_restore() or self._reclaim_paused() or self._offload_one_more()

    def _cancel_restore(self) -> bool:
        for request in reversed(self.running):
            if request.kv.restoring:
                _, job = request.kv.restoring.popitem()
                job.cancelled = True
                self.refresh(request)
                return True
        return False

    def _reclaim_paused(self) -> bool:
        for request in self.running:
            if not request.is_paused:
                continue
            kv = request.kv
            if not kv.asleep and kv.num_buffers:
                before = self.pool.owned[request.request_id]
                kv.asleep = True
                self.refresh(request)
                if self.pool.owned[request.request_id] < before:
                    return True
            if self._offload_group_of(request):
                return True
        return False

    def _offload_one_more(self) -> bool:
        owned = self.pool.owned
        by_size = sorted(self._holders(), key=lambda r: -owned[r.request_id])
        return any(self._offload_group_of(request) for request in by_size)

    def _offload_group_of(self, request: LiveRequest) -> bool:
        """Offload the next groups of a request that free any block; those before stay offloaded."""
        kv = request.kv
        if not (self.offloads and kv.mirrored and kv.num_host_blocks):
            return False
        left = [group for group in self._order if group not in kv.offloaded]
        for number in range(1, len(left) + 1):
            count = len(kv.offloaded) + number
            buffers = max(1, kv.num_buffers)
            need = kv.num_owned(num_offloaded=count, num_buffers=buffers)
            if need < self.pool.owned[request.request_id]:
                kv.offloaded = tuple(sorted({*kv.offloaded, *left[:number]}))
                kv.num_buffers = buffers
                kv.asleep = kv.asleep or request.is_paused
                self.num_guard_offloads += number
                self.refresh(request)
                return True
        return False

    def _waits_for_copies(self) -> bool:
        return any(request.kv.num_late_blocks and request.kv.saves for request in self.running)

    def _victim(self) -> LiveRequest:
        holding = [r for r in self.running if self.pool.owned.get(r.request_id)]
        paused = [request for request in holding if request.is_paused]
        return (paused or holding or self.running)[-1]

    def preempt(self, request: LiveRequest, now_s: float) -> None:
        """Put a request back to the head of the queue, with nothing computed."""
        self.running.remove(request)
        self.release(request)
        request.preempt(now_s)
        self.waiting.appendleft(request)
        self.preempted.append(request)

    def release(self, request: LiveRequest) -> None:
        self.pool.release(request.request_id)
        self.host.release(request.request_id)

    def refresh(self, request: LiveRequest) -> None:
        """Let the ledger follow a change of a request's KV that takes no more blocks."""
        taken = self.pool.set_owned(request.request_id, request.kv.num_owned())
        assert taken, "a change that frees blocks needs none"

    def check_integrity(self) -> None:
        """Raise AssertionError if blocks, host slots or requests do not add up."""
        self.pool.check_integrity()
        self.host.check_integrity()
        ids = {request.request_id for request in self.running}
        assert self.pool.owned.keys() <= ids
        assert len(ids) == len(self.running) <= self.shape.max_num_seqs
        for request in self.running:
            kv = request.kv
            assert self.pool.owned.get(request.request_id, 0) == kv.num_owned()
            assert (request.request_id in self.host.owned) == kv.mirrored
            assert kv.num_host_blocks <= kv.num_sent_blocks <= kv.num_full_blocks
            assert set(kv.restoring) <= set(kv.offloaded)
            assert bool(kv.num_buffers) == bool(kv.offloaded)
            assert kv.mirrored or not kv.offloaded
        for request in self.waiting:
            assert request.request_id not in self.host.owned
            assert not request.kv.num_tokens
