"""Brings parked requests back: chooses the way, and has their blocks filled before they run.

A parked request waits in the queue. While it is prepared it owns blocks and is passed over; when it
is awake, it is admitted with all tokens computed that came from the host. Its last, partly filled
block is recomputed: less than a block of tokens. Where groups keep windows or states it came, too.
"""

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Generic

from services.control.counters import Counters
from services.control.kv import KVT, holders_of
from services.control.requests.life import State
from services.control.requests.request_record import RequestRecord
from services.control.room.capacity_guard import CapacityGuard, Need
from services.control.room.moves import ReturnMoves
from services.placement.layer_placement import LayerPlacement
from services.placement.run.resume import (
    LinkAndStep,
    ParkedRequest,
    ResumeWay,
    cheapest_resume,
)


class Resumes(Generic[KVT]):
    """Preparation of parked requests, in the order of the queue."""

    def __init__(
        self,
        moves: ReturnMoves[KVT],
        guard: CapacityGuard[KVT],
        counters: Counters,
        *,
        block_bytes: int,
    ) -> None:
        """`block_bytes`: of one layer group, as the link's rate counts them."""
        # A request that lacks blocks to come back: no other is admitted meanwhile.
        self.is_short_of_blocks = False
        self.choose_way: Callable[[ParkedRequest, LinkAndStep], ResumeWay] = cheapest_resume
        self._moves, self.guard, self._counters = moves, guard, counters
        self.block_bytes = block_bytes

    def allow(self, ways: Collection[ResumeWay]) -> None:
        """Let the cheapest of these ways be taken from now on."""
        self.choose_way = partial(cheapest_resume, ways=ways)

    def choose(
        self,
        kv: KVT,
        need: Need[KVT],
        others: Sequence[Need[KVT]],
        *,
        num_left: int,
        engine: LinkAndStep,
    ) -> tuple[ResumeWay, LayerPlacement]:
        """Return how a request comes back beside `others`, and which of its layers do.

        `num_left`: tokens that it may still generate.
        """
        placement = self.guard.place_new(need, others)
        num_groups = self._moves.geometry.num_groups
        loaded = [group for group in range(num_groups) if group not in placement.offloaded]
        group_bytes = (kv.num_rows - kv.num_shared) * self.block_bytes
        parked = ParkedRequest(
            num_tokens=need.num_tokens,
            num_host_tokens=max(kv.num_tokens, kv.num_side_tokens),
            num_shared_tokens=kv.num_shared * self._moves.geometry.block_size,
            load_bytes=len(loaded) * group_bytes,
            first_bytes=self._moves.num_first_to_load(kv) * self.block_bytes,
            found_bytes=self._moves.num_to_find(kv, loaded) * self.block_bytes,
            num_left=max(1, num_left),
        )
        way = self.choose_way(parked, engine)
        if way is ResumeWay.LOAD and not loaded:
            way = ResumeWay.HOST_RESIDENT
        return way, placement

    def prepare(
        self,
        record: RequestRecord[KVT],
        choose: Callable[[KVT], tuple[ResumeWay, LayerPlacement]],
        *,
        num_slots: int,
        num_kept_free: int,
    ) -> None:
        """Take the next step towards running again; `choose` says how, when it has to be decided.

        `num_slots` of host room are asked for; `num_kept_free` blocks are left to running requests.
        """
        kv, way = record.kv, record.way
        if kv is None and way is not ResumeWay.RECOMPUTE:
            record.way = None  # its copies went to others
        if kv is None or not kv.asleep:
            return
        num_left = self._moves.num_free - num_kept_free
        if way is None or (way is ResumeWay.LOAD and kv.is_parked):  # it was put back
            if self._moves.num_to_fit(kv) > num_left:
                self.is_short_of_blocks = True
                return
            self._moves.share(kv)
            way, placement = choose(kv)
            record.way = way = self._begin(kv, way, placement, num_slots, num_left)
            if way is not ResumeWay.RECOMPUTE and not record.is_prepared:
                record.enter(State.LOADING)
        if way is ResumeWay.RECOMPUTE:
            return
        num_left = self._moves.num_free - num_kept_free
        loading = self._moves.load_on(kv, num_left)
        self.is_short_of_blocks |= loading.lacks_blocks
        if loading.is_complete:
            # A running request that lacks what is kept would take it back, step after step.
            fits = sum(map(self._moves.num_to_wake, holders_of([kv]))) <= num_left
            if fits and self._moves.wake(kv):
                record.enter(State.READY)
            else:
                self.is_short_of_blocks = True

    def _begin(
        self, kv: KVT, way: ResumeWay, placement: LayerPlacement, num_slots: int, num_left: int
    ) -> ResumeWay:
        """Return the way taken: without room on the host to grow into, what it has is recomputed.

        What is shared in the pool is neither loaded nor recomputed.
        """
        if way is ResumeWay.RECOMPUTE and kv.num_shared:
            self._moves.keep_shared(kv)
            way = ResumeWay.LOAD
        if way is not ResumeWay.RECOMPUTE and self._moves.reserve(kv, num_slots):
            loaded = way is ResumeWay.LOAD
            groups = [g for g in kv.offloaded if loaded and g not in placement.offloaded]
            self._moves.begin_load(kv, groups, num_buffers=placement.num_staging)
            return way
        if way is not ResumeWay.RECOMPUTE and self._moves.stay(kv, num_left):
            return ResumeWay.LOAD
        self._moves.drop(kv)
        return ResumeWay.RECOMPUTE

    def begin_anew(self, record: RequestRecord[KVT]) -> None:
        """Take from a request in the queue what it has: it may begin with more."""
        assert record.kv is not None
        record.way = None
        self._moves.drop(record.kv)

    def put_back(self, record: RequestRecord[KVT]) -> bool:
        """Undo a preparation, to choose anew; False if the request has no block of the pool.

        Nothing is copied: all that a request in the queue has is on the host.
        """
        kv = record.kv
        if kv is None:
            return False
        if not (kv.num_owned or kv.trunks or self._moves.num_side_blocks(kv)):
            return False
        record.way = None
        self._moves.put_back(kv)
        record.put_back()
        return True

    def admitted(self, record: RequestRecord[KVT], *, is_new: bool = False) -> None:
        """Take in that a request runs, prepared or not; a new one has a cached prefix."""
        record.enter(State.RUNNING)
        if record.way is not None:
            self._counters.count_resume(record.way)
            if is_new:
                self._counters.count_prefix_hit(record.way)
            record.way = None


def num_host_tokens(record: RequestRecord[KVT]) -> int | None:
    """Return how many tokens a waiting request need not compute; None while it is not ready."""
    if record.kv is None:
        return 0
    return None if record.kv.asleep else record.kv.num_tokens
