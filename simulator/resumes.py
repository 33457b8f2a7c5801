"""Brings preempted requests back whose KV is on the host: by the executor's rules.

A preempted request keeps what has a complete copy in every group. At the head of the queue the way
back is chosen by `services/placement/run/resume.py`: its groups are loaded into free blocks, one
whole group after the other, or it runs from its staging buffers, or all is computed again. While it
is prepared it waits, asleep; once awake it is admitted with all tokens computed that came from the
host.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice

from services.control.capacity_guard import CapacityGuard
from services.placement.blocks import BlockGeometry
from services.placement.run.resume import (
    RESUME_HORIZON,
    LinkAndStep,
    ParkedRequest,
    ResumeWay,
    cheapest_resume,
)
from services.placement.types import RequestId
from simulator.blocks import BlockLedger
from simulator.kv import KVState
from simulator.moves import CountedMoves
from simulator.requests import LiveRequest, need_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """What the engine has measured of itself; None until there is a sample."""

    h2d_bytes_per_s: float | None
    prefill_tokens_per_s: float | None
    step_s: float | None  # of a decode step


@dataclass(slots=True, kw_only=True)
class _Return:
    """The way that was chosen, and the groups whose load has not begun."""

    way: ResumeWay
    lacking: list[int]


class Resumes:
    """Preparation of requests that were preempted, in the order of the queue."""

    def __init__(
        self,
        guard: CapacityGuard[KVState],
        moves: CountedMoves,
        host: BlockLedger,
        waiting: Sequence[LiveRequest],
        *,
        rates: Callable[[], Rates],
    ) -> None:
        """`waiting`: the queue of this moment, the first in line first."""
        # A request lacks blocks to come back: nobody without KV is admitted meanwhile.
        self.is_short_of_blocks = False
        self.num_resumes = dict.fromkeys(ResumeWay, 0)
        self._guard, self._moves, self._host = guard, moves, host
        self._pool = moves.pool
        self._waiting = waiting
        self._rates = rates
        self._returns: dict[RequestId, _Return] = {}

    def forget(self, request: LiveRequest) -> None:
        self._returns.pop(request.request_id, None)

    def is_preparing(self, request: LiveRequest) -> bool:
        return request.request_id in self._returns

    def first_ready(self) -> LiveRequest | None:
        """Return who may be admitted first; who is prepared is passed over."""
        for request in self._waiting:
            if not request.kv.asleep and (request.kv.num_tokens or not self.is_short_of_blocks):
                return request
        return None

    def admitted(self, request: LiveRequest) -> None:
        """Take in that a request runs again, or for the first time."""
        found = self._returns.pop(request.request_id, None)
        if found is not None:
            self.num_resumes[found.way] += 1

    def prepare(
        self,
        num_places: int,
        active: Sequence[LiveRequest],
    ) -> None:
        """Move the first `num_places` in line on towards running, beside `active` ones."""
        self.is_short_of_blocks = False
        ahead = list(active)
        for request in islice(self._waiting, num_places):
            if request.kv.asleep:
                self._move_on(request, ahead)
            if self.is_short_of_blocks or not request.kv.num_tokens:
                break
            ahead.append(request)

    def _move_on(
        self,
        request: LiveRequest,
        ahead: Sequence[LiveRequest],
    ) -> None:
        kv, found = request.kv, self._returns.get(request.request_id)
        if found is None or (found.way is ResumeWay.LOAD and kv.is_parked):  # it was put back
            found = self._begin(request, ahead)
        if found.way is ResumeWay.RECOMPUTE:
            return
        num_left = self._pool.num_free - self._guard.num_blocks_of_next_step(
            [need_of(one) for one in ahead]
        )
        num_left -= self._load(request, found, num_left)
        if found.lacking or kv.restoring:
            self.is_short_of_blocks |= bool(found.lacking)
            return
        # A running request that lacks what is kept would take it back, again and again.
        woke = kv.num_to_wake <= num_left and kv.wake(num_free=self._pool.num_free)
        self._moves.refresh(request.kv)
        self.is_short_of_blocks |= not woke

    def _begin(
        self,
        request: LiveRequest,
        ahead: Sequence[LiveRequest],
    ) -> _Return:
        """Choose a way; without room on the host to grow into, all is computed again."""
        geometry, kv = self._moves.geometry, request.kv
        placement = self._guard.place_new(need_of(request), [need_of(one) for one in ahead])
        num_loaded = geometry.num_groups - len(placement.offloaded)
        group_bytes = kv.num_host_blocks * self._moves.block_bytes
        parked = ParkedRequest(
            num_tokens=request.num_tokens,
            num_host_tokens=kv.num_tokens,
            load_bytes=num_loaded * group_bytes,
            host_bytes=geometry.num_groups * group_bytes,
            num_steps=max(1, min(RESUME_HORIZON, request.num_left_output_tokens)),
        )
        way = cheapest_resume(parked, self._link_and_step(ahead))
        if way is ResumeWay.LOAD and not num_loaded:
            way = ResumeWay.HOST_RESIDENT
        if way is ResumeWay.RECOMPUTE or not self.reserve(request):
            way = ResumeWay.RECOMPUTE
            self.recompute(request)
        kv.wanted_buffers = placement.num_staging
        lacking = [g for g in kv.offloaded if g not in placement.offloaded]
        found = _Return(way=way, lacking=lacking if way is ResumeWay.LOAD else [])
        self._returns[request.request_id] = found
        return found

    def _link_and_step(self, ahead: Sequence[LiveRequest]) -> LinkAndStep:
        rates = self._rates()
        num_blocks = sum(one.kv.num_staged * one.kv.num_staging_groups for one in ahead)
        return LinkAndStep(
            h2d_bytes_per_s=rates.h2d_bytes_per_s,
            prefill_tokens_per_s=rates.prefill_tokens_per_s,
            step_s=rates.step_s or 0.0,
            step_bytes=num_blocks * self._moves.block_bytes,
            queue_bytes=self._moves.h2d.num_queued_bytes,  # between two steps: restores only
            num_running=len(ahead),
        )

    def _load(self, request: LiveRequest, found: _Return, num_left: int) -> int:
        """Begin the loads for which there are blocks; return the blocks taken."""
        kv, num_taken = request.kv, 0
        while found.lacking and num_taken + kv.num_rows <= num_left:
            self._moves.restore(kv, found.lacking.pop(0))
            num_taken += kv.num_rows
        return num_taken

    def put_back(self, request: LiveRequest) -> None:
        """Undo a preparation, to choose anew."""
        self.forget(request)
        request.kv.cancel_copies()
        request.kv = request.kv.parked()
        self._moves.refresh(request.kv)

    def recompute(self, request: LiveRequest) -> None:
        """Give up the host copies of a request that waits, and what came back of them."""
        self.forget(request)
        request.kv.cancel_copies()
        self._pool.release(request.request_id)
        self._host.release(request.request_id)
        request.kv = KVState(request_id=request.request_id, geometry=request.kv.geometry)

    def can_reserve(self, request: LiveRequest) -> bool:
        """Return whether `reserve` would succeed."""
        num_droppable = sum(self._host.owned[one.request_id] for one in self._parked(request))
        return self._num_missing(request) <= num_droppable

    def reserve(self, request: LiveRequest) -> bool:
        """Promise the host slots that a request may take until its end; False: too few.

        It is at the cost of parked ones, shortest first. Its own copies it keeps.
        """
        if not self.can_reserve(request):
            return False
        for one in self._parked(request):
            if self._num_missing(request) <= 0:
                break
            self.recompute(one)
        num_slots = num_host_blocks(self._moves.geometry, request)
        return self._host.set_owned(request.request_id, num_slots)

    def _num_missing(self, request: LiveRequest) -> int:
        num_slots = num_host_blocks(self._moves.geometry, request)
        return num_slots - self._host.owned.get(request.request_id, 0) - self._host.num_free

    def _parked(self, but: LiveRequest) -> list[LiveRequest]:
        parked = [one for one in self._waiting if one.kv.is_parked and one is not but]
        return sorted(parked, key=lambda one: one.kv.num_tokens)


def num_host_blocks(geometry: BlockGeometry, request: LiveRequest) -> int:
    """Return the host blocks that a request takes until its end."""
    total = request.spec.num_prompt_tokens + request.spec.num_output_tokens
    return geometry.num_groups * -(-total // geometry.block_size)
