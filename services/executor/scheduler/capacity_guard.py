"""Keeps the batch within the pool by itself: `dynamic-heuristic`, before every step.

The guard never needs a planner. A placement that somebody else gave a request is a floor: the
guard offloads more when the pool is too small, and brings back what it took on its own account
when there is room again.
"""

from collections.abc import Sequence
from typing import NamedTuple

from services.executor.blocks.block_owner import BlockOwner
from services.executor.blocks.residency import RequestKV
from services.executor.blocks.transfer_planner import TransferPlanner
from services.placement.blocks import BlockGeometry, Residency, num_request_blocks
from services.placement.layer_placement import ALL_RESIDENT, LayerPlacement, widened
from services.placement.place.fewest_offloaded import Demand, fewest_offloaded, spread_order


class Need(NamedTuple):
    """One request in scheduling order, running ones first."""

    request_id: str
    num_tokens: int  # known tokens, >= 1


class CapacityGuard:
    """Chooses placements when nobody else did, and more offloading when blocks run out."""

    def __init__(
        self,
        owner: BlockOwner,
        transfers: TransferPlanner,
        *,
        max_staging: int,
        restore_when_free_frac: float,
    ) -> None:
        self.owner = owner
        self.transfers = transfers
        self._max_staging = max_staging
        self._num_blocks: int = owner.pool.num_gpu_blocks - 1
        self._num_spare = int(restore_when_free_frac * self._num_blocks)
        self._num_kept_free = 0
        self._spread = spread_order(owner.geometry.num_groups)
        self._given: dict[str, LayerPlacement] = {}
        self._running_ids: set[str] = set()  # at the last adjustment

    def give(self, request_id: str, placement: LayerPlacement) -> None:
        """Set the placement of a request, admitted or not; it holds from the next step on."""
        self._given[request_id] = placement

    def forget(self, request_id: str) -> None:
        self._given.pop(request_id, None)

    def place_new(self, need: Need, others: Sequence[Need]) -> LayerPlacement:
        """Return where a request that asks for its first blocks belongs, beside `others`."""
        needs = [*others, need]
        answers = self._fewest(needs, num_blocks=self._num_blocks - self._num_unmovable(needs))
        return self._placement(need.request_id, answers[-1])

    def adjust(self, running: Sequence[Need], waiting: Sequence[Need]) -> None:
        """Move layer groups so that the next step fits, and back when there is room.

        `running` are those that may run, `waiting` the ones that may be admitted next. The other
        requests that own blocks are idle: theirs are taken before a running one is offloaded.
        """
        needs = [*running, *waiting]
        self._running_ids = {need.request_id for need in running}
        if self._is_all_resident_with_room(needs):
            return
        num_blocks = self._num_blocks - self._num_unmovable(needs)
        tight = self._fewest(needs, num_blocks=num_blocks)
        roomy = self._fewest(needs, num_blocks=num_blocks - self._num_spare)
        num_needed = [
            self._num_blocks_of(need, residency)
            for need, residency in zip(needs, tight, strict=True)
        ]
        self._reclaim(self._idle(needs), self._num_blocks - sum(num_needed))
        # Restores take what the next step leaves, or they would starve it again and again.
        self._num_kept_free = self._num_spare + self.num_blocks_of_next_step(running)
        for need, num_blocks in zip(waiting, num_needed[len(running) :], strict=True):
            request = self.owner.requests.get(need.request_id)
            num_owned = 0 if request is None else len(request.owned_blocks())
            self._num_kept_free += max(0, num_blocks - num_owned)
        pairs = zip(running, tight[: len(running)], roomy[: len(running)], strict=True)
        for need, least, most in pairs:
            request = self.owner.requests.get(need.request_id)
            if request is None or not request.mirrored:
                continue
            if not request.chain() and most is not None and most.num_offloaded == 0:
                continue  # all of it is in the pool and may stay
            self._move(
                request,
                least=self._placement(need.request_id, least),
                most=self._placement(need.request_id, most),
            )

    def relieve(self) -> bool:
        """Find blocks for a running request that found none; return whether some will come free.

        Takes from requests that do not run, then gives up restores.
        """
        owner = self.owner
        idle = [r for name, r in owner.requests.items() if name not in self._running_ids]
        num_free = owner.blocks.num_free
        num_expected = sum(_num_blocks_after(request, owner.geometry) for request in idle)
        took = self._reclaim(idle, num_expected - 2 * owner.geometry.num_groups)
        return owner.blocks.num_free > num_free or self.transfers.relieve() or took

    def _idle(self, needs: Sequence[Need]) -> list[RequestKV]:
        active = {need.request_id for need in needs}
        return [r for name, r in self.owner.requests.items() if name not in active]

    def _num_unmovable(self, needs: Sequence[Need]) -> int:
        """Return what idle requests keep even when all that can be reclaimed is."""
        return sum(_num_unmovable(r, self.owner.geometry) for r in self._idle(needs))

    def _num_blocks_of(self, need: Need, residency: Residency | None) -> int:
        if residency is None:
            return 0
        return num_request_blocks(self.owner.geometry, residency, num_tokens=need.num_tokens + 1)

    def _reclaim(self, idle: Sequence[RequestKV], num_allowed: int) -> bool:
        """Take blocks of idle requests, layer by layer, until they will own `num_allowed`.

        Returns whether anything was taken; blocks come free as their copies complete.
        """
        owner, geometry = self.owner, self.owner.geometry
        num_excess = sum(_num_blocks_after(r, geometry) for r in idle) - num_allowed
        took = False
        for request in self.transfers.write_through.by_likelihood(idle):
            if num_excess <= 0:
                break
            if not request.mirrored:
                continue
            num_before = _num_blocks_after(request, geometry)
            owner.staging.drop(request)
            for index in self._spread:
                if num_before - _num_blocks_after(request, geometry) >= num_excess:
                    break
                group = request.groups[index]
                if not group.offloaded or group.restore is not None:
                    owner.offload(request, [index])
                    owner.counters.num_reclaimed_groups += 1
            self.transfers.note_offloaded(request)
            num_taken = num_before - _num_blocks_after(request, geometry)
            took |= num_taken > 0
            num_excess -= num_taken
        return took

    def _is_all_resident_with_room(self, needs: Sequence[Need]) -> bool:
        """Return whether there is nothing to do: the common case, answered without the search."""
        requests = self.owner.requests.values()
        if self._given or any(request.staging or request.asleep for request in requests):
            return False
        geometry = self.owner.geometry
        num_row_blocks = sum(need.num_tokens // geometry.block_size + 1 for need in needs)
        num_idle = sum(request.num_row_blocks for request in self._idle(needs))
        num_blocks = (num_row_blocks + num_idle) * geometry.num_groups
        return num_blocks <= self._num_blocks - self._num_spare

    def _move(self, request: RequestKV, *, least: LayerPlacement, most: LayerPlacement) -> None:
        """Offload what must leave and restore what may come back; between the two, stay."""
        now = request.placement.offloaded
        leaving = [
            index
            for index in sorted(least.offloaded)
            if index not in now or request.groups[index].restore is not None
        ]
        if leaving:
            self.owner.offload(request, leaving)
            self.transfers.note_offloaded(request)
        for index in sorted(now - most.offloaded):
            if not self._may_restore(request, index):
                break
            self.owner.restores.begin(request, index)
        if request.staging and len(request.staging) != least.num_staging:
            self.owner.staging.set_number(request, least.num_staging)

    def _may_restore(self, request: RequestKV, index: int) -> bool:
        num_left = self.owner.pool.get_num_free_blocks() - self._num_kept_free
        return request.groups[index].stages and request.num_row_blocks <= num_left

    def num_blocks_of_next_step(self, running: Sequence[Need]) -> int:
        """Return how many blocks requests take for all their known tokens, those asleep to wake.

        `running` may include requests that are about to run.
        """
        owner = self.owner
        num_blocks = 0
        for need in running:
            request = owner.requests.get(need.request_id)
            if request is not None:
                num_blocks += owner.num_new_blocks(request, num_tokens=need.num_tokens)
                num_blocks += owner.staging.num_to_wake(request)
        return num_blocks

    def _fewest(self, needs: Sequence[Need], *, num_blocks: int) -> list[Residency | None]:
        demands = [self._demand(need) for need in needs]
        return fewest_offloaded(
            demands, self.owner.geometry, num_blocks=num_blocks, max_staging=self._max_staging
        )

    def _demand(self, need: Need) -> Demand:
        request = self.owner.requests.get(need.request_id)
        given = self._given.get(need.request_id, ALL_RESIDENT)
        return Demand(
            # The next token of every request must find room, and it opens a block at worst.
            num_tokens=need.num_tokens + 1,
            offloadable=request is None or request.mirrored,
            min_offloaded=len(given.offloaded),
        )

    def _placement(self, request_id: str, residency: Residency | None) -> LayerPlacement:
        """Return which groups: the given ones, then the ones that spread best."""
        given = self._given.get(request_id, ALL_RESIDENT)
        return widened(given, residency, self._spread)


def _num_unmovable(request: RequestKV, geometry: BlockGeometry) -> int:
    """Return the blocks that an idle request keeps: its open ones, or all without a host copy."""
    if not request.mirrored:
        return len(request.owned_blocks())
    num_full = request.num_tokens // geometry.block_size
    return geometry.num_groups * max(0, request.num_row_blocks - num_full)


def _num_blocks_after(request: RequestKV, geometry: BlockGeometry) -> int:
    """Return the blocks that an idle request will own once copies under way are complete."""
    num_full = request.num_tokens // geometry.block_size
    num_open = max(0, request.num_row_blocks - num_full)
    num_blocks = sum(len(buffer) for buffer in request.staging)
    for group in request.groups:
        num_blocks += num_open if group.offloaded else request.num_row_blocks
        if group.restore is not None:
            num_blocks += len(group.restore.targets)
    return num_blocks
