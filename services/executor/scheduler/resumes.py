"""Brings parked requests back: chooses the way, and has their blocks filled before they run.

A parked request waits in vLLM's queue. While it is prepared it owns blocks and vLLM passes over it;
when it is awake, vLLM admits it with all tokens computed that came from the host. Its last, partly
filled block is recomputed: less than a block of tokens.
"""

from collections.abc import Callable, Sequence

from services.control.rates import Rates
from services.executor.blocks.block_owner import BlockOwner
from services.executor.blocks.residency import RequestKV
from services.placement.layer_placement import LayerPlacement
from services.placement.run.resume import ResumeWay


class Resumes:
    """Preparation of parked requests, in the order of the queue."""

    def __init__(self, owner: BlockOwner, rates: Rates, *, overlap: bool = True) -> None:
        """With `overlap`, loads begin with the first blocks that are free; else with all."""
        # A request that lacks blocks to come back: nobody else is admitted meanwhile.
        self.is_short_of_blocks = False
        self.rates = rates
        self._owner = owner
        self._overlap = overlap
        self._ways: dict[str, ResumeWay] = {}

    def forget(self, request_id: str) -> None:
        self._ways.pop(request_id, None)

    def is_preparing(self, request_id: str) -> bool:
        return request_id in self._ways and request_id in self._owner.requests

    def num_host_tokens(self, request_id: str) -> int | None:
        """Return how many tokens a waiting request need not compute; None while it is not ready."""
        request = self._owner.requests.get(request_id)
        if request is None:
            return 0
        return None if request.asleep else request.num_tokens

    def prepare(
        self,
        request_id: str,
        choose: Callable[[RequestKV], tuple[ResumeWay, LayerPlacement]],
        *,
        num_slots: int,
        num_kept_free: int,
    ) -> None:
        """Take the next step towards running again; `choose` says how, when it has to be decided.

        `num_slots` of host room are asked for; `num_kept_free` blocks are left to running requests.
        """
        request = self._owner.requests.get(request_id)
        if request is None or not request.asleep:
            return
        way = self._ways.get(request_id)
        if way is None or (way is ResumeWay.LOAD and request.is_parked):  # it was put back
            way, placement = choose(request)
            way = self._begin(request, way, placement, num_slots)
        if way is ResumeWay.RECOMPUTE:
            return
        num_left = self._owner.blocks.num_free - num_kept_free
        if self._extend(request, num_left):
            # A running request that lacks what is kept would take it back, again and again.
            fits = self._owner.staging.num_to_wake(request) <= num_left
            self.is_short_of_blocks |= not (fits and self._owner.staging.take(request))

    def put_back(self, request_id: str) -> bool:
        """Undo a preparation, to choose anew; False if the request owns no block.

        Nothing is copied: all that a request in the queue has is on the host.
        """
        request = self._owner.requests[request_id]
        if not request.owned_blocks():
            return False
        del self._ways[request_id]
        self._owner.staging.drop(request)
        self._owner.offload(request, range(len(request.groups)))
        return True

    def admitted(self, request_ids: Sequence[str]) -> None:
        """Take in which requests run again, prepared or not; they own blocks."""
        for request_id in request_ids:
            self._owner.requests[request_id].waiting = False
            way = self._ways.pop(request_id, None)
            if way is not None:
                self._owner.counters.count_resume(way)

    def _begin(
        self, request: RequestKV, way: ResumeWay, placement: LayerPlacement, num_slots: int
    ) -> ResumeWay:
        """Return the way taken: without room on the host to grow into, all is recomputed."""
        name = request.request_id
        num_held = sum(len(group.host_slots) for group in request.groups)
        self._owner.host.cancel_reservation(name)
        if way is ResumeWay.RECOMPUTE or not self._owner.reserve(
            name, max(0, num_slots - num_held)
        ):
            self._ways[name] = ResumeWay.RECOMPUTE
            self._owner.pop(name)
            return ResumeWay.RECOMPUTE
        self._ways[name] = way
        request.wanted_staging = placement.num_staging
        for index in range(len(request.groups)):
            if way is ResumeWay.LOAD and index not in placement.offloaded:
                self._owner.restores.begin_in_parts(request, index)
        return way

    def _extend(self, request: RequestKV, num_left: int) -> bool:
        """Order loads into blocks that are free; return whether all of them are complete."""
        lacking = [
            len(group.row) - len(group.restore.targets)
            for group in request.groups
            if group.restore is not None
        ]
        if not self._overlap and sum(lacking) > num_left:
            self.is_short_of_blocks = True
            return False
        complete = True
        for index, group in enumerate(request.groups):
            if group.restore is None:
                continue
            num_left -= self._owner.restores.extend(request, index, max_blocks=num_left)
            if group.restore is not None:
                complete = False
                self.is_short_of_blocks |= len(group.restore.targets) < len(group.row)
        return complete
