"""Keeps the batch within the pool by itself, before every step.

The guard never needs a planner. A placement that somebody else gave a request is a floor: the
guard offloads more when the pool is too small, and brings back what it took on its own account
when there is room again.
"""

from collections.abc import Mapping, Sequence
from typing import Generic, NamedTuple

from services.control.counters import Counters
from services.control.kv import KVT
from services.control.requests.life import State
from services.control.requests.request_record import RequestRecord
from services.control.room.moves import Moves
from services.placement.blocks import Residency, num_request_blocks
from services.placement.layer_placement import ALL_RESIDENT, LayerPlacement, widened
from services.placement.place.fewest_offloaded import Claim, fewest_offloaded, spread_order

MAX_STAGING = 2  # buffers of a request
PLANNED_SPARE_FRAC = 0.02  # of the pool stays free when a group comes back, where plans say which


class Need(NamedTuple, Generic[KVT]):
    """One request in scheduling order, running ones first."""

    record: RequestRecord[KVT]
    num_tokens: int  # known tokens, >= 1


class CapacityGuard(Generic[KVT]):
    """Chooses placements when nobody else did, and more offloading when blocks run out."""

    def __init__(
        self,
        moves: Moves[KVT],
        records: Mapping[str, RequestRecord[KVT]],
        counters: Counters,
        *,
        max_staging: int,
        restore_when_free_frac: float,
    ) -> None:
        """`records`: of all live requests."""
        self.num_spare = int(restore_when_free_frac * moves.num_blocks)
        self._moves, self._records, self._counters = moves, records, counters
        self._max_staging = max_staging
        self._num_kept_free = 0
        self._spread = spread_order(moves.geometry.num_groups)
        self._running: set[RequestRecord[KVT]] = set()  # at the last adjustment

    def place_new(self, need: Need[KVT], others: Sequence[Need[KVT]]) -> LayerPlacement:
        """Return where a request that asks for its first blocks belongs, beside `others`."""
        needs = [*others, need]
        idle = self._moves.idle(but={need.record for need in needs})
        answers = self._fewest(needs, num_blocks=self._num_movable(idle))
        return self._placement(need.record, answers[-1])

    def adjust(self, running: Sequence[Need[KVT]], waiting: Sequence[Need[KVT]]) -> None:
        """Move layer groups so that the next step fits, and back when there is room.

        `running` are those that may run, `waiting` the ones that may be admitted next. The other
        requests that own blocks are idle: theirs are taken before a running one is offloaded.
        """
        needs = [*running, *waiting]
        self._running = {need.record for need in running}
        if self._is_all_resident_with_room(needs):
            return
        idle = self._moves.idle(but={need.record for need in needs})
        num_movable = self._num_movable(idle)
        tight = self._fewest(needs, num_blocks=num_movable)
        roomy = self._fewest(needs, num_blocks=num_movable - self.num_spare)
        num_needed = [
            self._num_blocks_of(need, found) for need, found in zip(needs, tight, strict=True)
        ]
        self._reclaim(idle, self._moves.num_blocks - sum(num_needed))
        # Restores take what the next step and the next in line leave, or they would be given up
        # and begun anew step after step.
        self._num_kept_free = self.num_spare + self.num_blocks_of_next_step(running)
        for need, num_blocks in zip(waiting, num_needed[len(running) :], strict=True):
            kv = need.record.kv
            self._num_kept_free += max(0, num_blocks - (0 if kv is None else kv.num_owned))
        for need, least, most in zip(running, tight, roomy, strict=False):
            kv = need.record.kv
            if kv is None or not kv.mirrored:
                continue
            if not kv.offloaded and most is not None and most.num_offloaded == 0:
                continue  # all of it is in the pool and may stay
            self._move(
                kv,
                least=self._placement(need.record, least),
                most=self._placement(need.record, most),
            )

    def relieve(self) -> bool:
        """Find blocks for a running request that found none; return whether some will come free.

        Takes from requests that do not run, then gives up restores.
        """
        moves = self._moves
        idle, num_free = moves.idle(but=self._running), moves.num_free
        num_expected = sum(kv.num_owned_when_copied for kv in idle)
        # Two blocks per group let any request go on: an open one, and one on its way to the host.
        took = self._reclaim(idle, num_expected - 2 * moves.geometry.num_groups)
        return moves.num_free > num_free or moves.give_up_restores() or took

    def num_blocks_of_next_step(self, running: Sequence[Need[KVT]]) -> int:
        """Return how many blocks requests take for all their known tokens, those asleep to wake.

        `running` may include requests that are about to run.
        """
        return sum(
            self._moves.num_new(kv, need.num_tokens) + self._moves.num_to_wake(kv)
            for need in running
            if (kv := need.record.kv) is not None
        )

    def _num_movable(self, idle: Sequence[KVT]) -> int:
        """Return the blocks that are not kept by idle requests when all that can be taken is."""
        return self._moves.num_blocks - sum(kv.num_unmovable for kv in idle)

    def _num_blocks_of(self, need: Need[KVT], residency: Residency | None) -> int:
        if residency is None:
            return 0
        num_tokens = self._num_tokens_to_hold(need)
        return num_request_blocks(self._moves.geometry, residency, num_tokens=num_tokens)

    def _num_tokens_to_hold(self, need: Need[KVT]) -> int:
        """Return at which length a request owns most blocks: as it is, or with its next token.

        That token opens a block at worst. Where it fills one, the open blocks of offloaded groups
        are more than what they become: a request is largest just before.
        """
        size, num_tokens = self._moves.geometry.block_size, need.num_tokens
        fills = num_tokens % size and not (num_tokens + 1) % size
        return num_tokens if fills else num_tokens + 1

    def _reclaim(self, idle: Sequence[KVT], num_allowed: int) -> bool:
        """Take blocks of idle requests, layer by layer, until they will own `num_allowed`.

        Returns whether anything was taken; blocks come free as their copies complete.
        """
        num_excess = sum(kv.num_owned_when_copied for kv in idle) - num_allowed
        took = False
        for kv in idle:
            if num_excess <= 0:
                break
            if not kv.mirrored:
                continue
            num_before = kv.num_owned_when_copied
            self._sleep(kv)
            now, returning = set(kv.offloaded), set(kv.restoring)
            for group in self._spread:
                if num_before - kv.num_owned_when_copied >= num_excess:
                    break
                if group not in now or group in returning:
                    self._moves.offload(kv, [group])
                    self._counters.num_reclaimed_groups += 1
            num_taken = num_before - kv.num_owned_when_copied
            took |= num_taken > 0
            num_excess -= num_taken
        return took

    def _sleep(self, kv: KVT) -> None:
        """Take the buffers of a request that does not run."""
        self._moves.sleep(kv)
        record = self._records[kv.request_id]
        if record.state is State.READY:
            record.enter(State.LOADING)

    def _is_all_resident_with_room(self, needs: Sequence[Need[KVT]]) -> bool:
        """Return whether there is nothing to do: the common case, answered without the search."""
        for record in self._records.values():
            if record.floor is not None:
                return False
        moves, num_rows = self._moves, 0
        active = {need.record.request_id for need in needs}
        for kv in moves.all():
            if kv.num_buffers or kv.asleep:  # what is offloaded and awake has buffers
                return False
            if kv.request_id not in active:
                num_rows += kv.num_rows
        block_size = moves.geometry.block_size
        for need in needs:
            num_rows += need.num_tokens // block_size + 1
        return num_rows * moves.geometry.num_groups <= moves.num_blocks - self.num_spare

    def _move(self, kv: KVT, *, least: LayerPlacement, most: LayerPlacement) -> None:
        """Offload what must leave and restore what may come back; between the two, stay."""
        now, returning = set(kv.offloaded), set(kv.restoring)
        leaving = [g for g in sorted(least.offloaded) if g not in now or g in returning]
        if leaving:
            self._moves.offload(kv, leaving)
        for group in sorted(now - most.offloaded):
            if group in returning or kv.num_rows > self._moves.num_free - self._num_kept_free:
                break
            self._moves.restore(kv, group)
        if kv.num_buffers and kv.num_buffers != least.num_staging:
            self._moves.set_staging(kv, least.num_staging)

    def _fewest(self, needs: Sequence[Need[KVT]], *, num_blocks: int) -> list[Residency | None]:
        demands = [self._demand(need) for need in needs]
        return fewest_offloaded(
            demands, self._moves.geometry, num_blocks=num_blocks, max_staging=self._max_staging
        )

    def _demand(self, need: Need[KVT]) -> Claim:
        kv = need.record.kv
        return Claim(
            num_tokens=self._num_tokens_to_hold(need),
            offloadable=kv is None or kv.mirrored,
            min_offloaded=len(_floor(need.record).offloaded),
        )

    def _placement(self, record: RequestRecord[KVT], residency: Residency | None) -> LayerPlacement:
        """Return which groups: those of its floor, then the ones that spread best."""
        return widened(_floor(record), residency, self._spread)


def _floor(record: RequestRecord[KVT]) -> LayerPlacement:
    return record.floor or ALL_RESIDENT
