"""Keeps the batch within the pool before every step, as the executor's capacity guard does.

The placement that a plan gave a request is a floor: the guard offloads more when the pool is too
small for the running requests and the first in line, and brings back what is offloaded beyond it
when there is room again. Paused requests lose theirs before a running one is offloaded.
"""

from collections.abc import Sequence

from services.placement.blocks import BlockGeometry, Residency, num_request_blocks
from services.placement.layer_placement import ALL_RESIDENT, LayerPlacement, widened
from services.placement.place.fewest_offloaded import Demand, fewest_offloaded, spread_order
from services.placement.types import RequestId
from simulator.blocks import BlockLedger
from simulator.copies import Lane
from simulator.requests import LiveRequest

MAX_STAGING = 2


class Guard:
    """Chooses placements where no plan did, and more offloading when blocks run out."""

    def __init__(
        self, pool: BlockLedger, geometry: BlockGeometry, *, block_bytes: int, num_spare: int
    ) -> None:
        """`num_spare`: blocks that stay free when a group comes back."""
        self.given: dict[RequestId, LayerPlacement] = {}
        self.num_offloads = 0  # groups that left the pool, since the start
        self.pool, self.geometry, self._block_bytes = pool, geometry, block_bytes
        self.num_spare = num_spare
        self._num_kept_free = 0
        self._spread = spread_order(geometry.num_groups)

    # -- placements ------------------------------------------------------------------------------

    def place_new(
        self, request: LiveRequest, running: Sequence[LiveRequest], idle: Sequence[LiveRequest]
    ) -> LayerPlacement:
        """Return where a request that asks for its first blocks belongs, beside those that run."""
        num_blocks = self.pool.num_blocks - sum(one.kv.num_unmovable for one in idle)
        answers = self._fewest([*running, request], num_blocks=num_blocks)
        return self._placement(request, answers[-1])

    def _fewest(
        self, requests: Sequence[LiveRequest], *, num_blocks: int
    ) -> list[Residency | None]:
        demands = [
            Demand(
                # The next token of every request must find room, and it opens a block at worst.
                num_tokens=request.num_tokens + 1,
                offloadable=request.kv.mirrored or request.request_id not in self.pool.owned,
                min_offloaded=len(self._floor(request).offloaded),
            )
            for request in requests
        ]
        return fewest_offloaded(
            demands, self.geometry, num_blocks=num_blocks, max_staging=MAX_STAGING
        )

    def _floor(self, request: LiveRequest) -> LayerPlacement:
        return self.given.get(request.request_id, ALL_RESIDENT)

    def _placement(self, request: LiveRequest, residency: Residency | None) -> LayerPlacement:
        """Return which groups: the given ones, then the ones that spread best."""
        return widened(self._floor(request), residency, self._spread)

    # -- before each step ------------------------------------------------------------------------

    def adjust(
        self,
        running: Sequence[LiveRequest],
        waiting: Sequence[LiveRequest],
        idle: Sequence[LiveRequest],
        h2d: Lane,
    ) -> None:
        """Move groups so that the next step fits, and back when there is room.

        `waiting` are those to make room for, `idle` own blocks and do not run.
        """
        needs = [*running, *waiting]
        if self._is_all_resident_with_room(needs, idle):
            return
        num_blocks = self.pool.num_blocks - sum(one.kv.num_unmovable for one in idle)
        tight = self._fewest(needs, num_blocks=num_blocks)
        roomy = self._fewest(needs, num_blocks=num_blocks - self.num_spare)
        num_needed = [
            self._num_blocks_of(one, found) for one, found in zip(needs, tight, strict=True)
        ]
        self.reclaim(idle, self.pool.num_blocks - sum(num_needed))
        # What comes back takes what the next step leaves, or it would starve it again and again.
        self._num_kept_free = self.num_spare + self.num_blocks_of_next_step(running)
        for one, num_blocks in zip(waiting, num_needed[len(running) :], strict=True):
            self._num_kept_free += max(0, num_blocks - one.kv.num_owned)
        for request, least, most in zip(running, tight, roomy, strict=False):
            untouched = not request.kv.offloaded and most is not None and not most.num_offloaded
            if request.kv.mirrored and not untouched:
                self._move(
                    request, self._placement(request, least), self._placement(request, most), h2d
                )

    def num_blocks_of_next_step(self, requests: Sequence[LiveRequest]) -> int:
        """Return the blocks that requests take for all their tokens, those asleep to wake up."""
        return sum(one.kv.num_new(one.num_tokens) + one.kv.num_to_wake for one in requests)

    def _num_blocks_of(self, request: LiveRequest, residency: Residency | None) -> int:
        if residency is None:
            return 0
        return num_request_blocks(self.geometry, residency, num_tokens=request.num_tokens + 1)

    def _is_all_resident_with_room(
        self, needs: Sequence[LiveRequest], idle: Sequence[LiveRequest]
    ) -> bool:
        """Return whether there is nothing to do: the common case, answered without the search."""
        if self.given or any(one.kv.offloaded or one.kv.asleep for one in (*needs, *idle)):
            return False
        block_size = self.geometry.block_size
        num_rows = sum(one.num_tokens // block_size + 1 for one in needs)
        num_rows += sum(one.kv.num_rows for one in idle)
        return num_rows * self.geometry.num_groups <= self.pool.num_blocks - self.num_spare

    def _move(
        self, request: LiveRequest, least: LayerPlacement, most: LayerPlacement, h2d: Lane
    ) -> None:
        """Offload what must leave and bring back what may; between the two, stay."""
        kv, now = request.kv, set(request.kv.offloaded)
        leaving = [g for g in sorted(least.offloaded) if g not in now or g in kv.restoring]
        if leaving:
            kv.offload(leaving, num_free=self.pool.num_free)
            self.num_offloads += len(leaving)
            self.refresh(request)
        for group in sorted(now - most.offloaded):
            if not self._may_restore(request, group):
                break
            h2d.submit(kv.begin_restore(group, self._block_bytes), h2d.now_s)
            self.refresh(request)
        if kv.num_buffers and kv.num_buffers != least.num_staging:
            kv.set_buffers(least.num_staging, num_free=self.pool.num_free)
            self.refresh(request)

    def _may_restore(self, request: LiveRequest, group: int) -> bool:
        num_left = self.pool.num_free - self._num_kept_free
        return group not in request.kv.restoring and request.kv.num_rows <= num_left

    def reclaim(self, idle: Sequence[LiveRequest], num_allowed: int) -> bool:
        """Take blocks of idle requests, group by group, until they will own `num_allowed`.

        Returns whether anything was taken; blocks come free as their copies complete.
        """
        num_excess = sum(one.kv.num_owned_when_copied for one in idle) - num_allowed
        took = False
        for request in idle:
            kv = request.kv
            if num_excess <= 0:
                break
            if not kv.mirrored:
                continue
            num_before = kv.num_owned_when_copied
            kv.sleep()
            for group in self._spread:
                if num_before - kv.num_owned_when_copied >= num_excess:
                    break
                if group not in kv.offloaded or group in kv.restoring:
                    kv.offload([group], num_free=0)
                    self.num_offloads += 1
            self.refresh(request)
            num_taken = num_before - kv.num_owned_when_copied
            took |= num_taken > 0
            num_excess -= num_taken
        return took

    def refresh(self, request: LiveRequest) -> None:
        """Let the ledger follow a change of a request's KV that finds its blocks free."""
        taken = self.pool.set_owned(request.request_id, request.kv.num_owned)
        assert taken, "blocks were taken that were not free"
