"""Keeps the batch within the pool by itself, before every step.

The guard never needs a planner. A placement that something else gave a request is a floor: the
guard offloads more when the pool is too small, and brings back what it took on its own account
when there is room again.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple

from services.control.counters import Counters
from services.control.kv import KVT, holders_of, trunks_of
from services.control.requests.life import State
from services.control.requests.request_record import RequestRecord
from services.control.room.moves import Moves
from services.placement.blocks import Residency, num_request_blocks, side_blocks
from services.placement.layer_placement import ALL_RESIDENT, LayerPlacement, widened
from services.placement.place.fewest_offloaded import Claim, fewest_offloaded, spread_order

MAX_STAGING = 2  # buffers of a request
PLANNED_SPARE_FRAC = 0.02  # of the pool stays free when a group comes back, where plans say which


class Need(NamedTuple, Generic[KVT]):
    """One request in scheduling order, running ones first."""

    record: RequestRecord[KVT]
    num_tokens: int  # known tokens, >= 1
    num_to_share: int = 0  # leading blocks of one in the queue that others have in the pool
    num_processed_tokens: int = 0  # computed, those in flight not counted


@dataclass(frozen=True, slots=True)
class Share:
    """What one holder takes of the pool: a request's own part, or a trunk's."""

    kv: Any  # None: a request that has no block yet
    num_tokens: int  # of its own, at which it owns most blocks
    floor: LayerPlacement
    num_side_blocks: int = 0  # of groups that never leave
    num_ahead: int = 0  # tokens behind those that have room: drafts


class CapacityGuard(Generic[KVT]):
    """Chooses placements when nothing else did, and more offloading when blocks run out."""

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
        """Return where a request that asks for its first blocks belongs, beside `others`.

        What a request that leaves still has is free in a step: none is placed on the host for it.
        """
        needs = [*others, need]
        leaving = {one for one in self._records.values() if one.state is State.LEAVING}
        idle = self._moves.idle(but=leaving | {need.record for need in needs})
        shares = self._shares(needs, set())
        answers = self._fewest(shares, num_blocks=self._num_movable(idle))
        return self._placement(shares[-1], answers[-1])

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
        seen = set[Any]()
        shares = self._shares(running, seen)
        num_running = len(shares)
        shares += self._shares(waiting, seen)
        tight = self._fewest(shares, num_blocks=num_movable)
        roomy = self._fewest(shares, num_blocks=num_movable - self.num_spare)
        num_needed = [
            self._num_blocks_of(share, found) for share, found in zip(shares, tight, strict=True)
        ]
        self._reclaim(idle, self._moves.num_blocks - self._num_side_of(idle) - sum(num_needed))
        # Restores take what the next step and the next in line leave, or they would be given up
        # and begun anew step after step.
        self._num_kept_free = self.num_spare + self.num_blocks_of_next_step(running)
        for share, num_blocks in zip(shares[num_running:], num_needed[num_running:], strict=True):
            kv = share.kv
            num_owned = 0 if kv is None else kv.num_owned + self._num_side_of([kv])
            self._num_kept_free += max(0, num_blocks - num_owned)
        for share, least, most in zip(shares[:num_running], tight, roomy, strict=False):
            kv = share.kv
            if kv is None or not kv.mirrored:
                continue
            if not kv.offloaded and most is not None and most.num_offloaded == 0:
                continue  # all of it is in the pool and may stay
            self._move(
                kv,
                least=self._placement(share, least),
                most=self._placement(share, most),
            )

    def relieve(self) -> bool:
        """Find blocks for a running request that found none; return whether some will come free.

        Takes from requests that do not run, then gives up restores.
        """
        moves = self._moves
        idle, num_free = moves.idle(but=self._running), moves.num_free
        num_expected = sum(kv.num_owned_when_copied for kv in idle)
        # Two blocks per group let any request go on: an open one, and one on its way to the host.
        num_lacking = (1 + moves.geometry.max_open_blocks) * moves.geometry.num_groups
        num_lacking += moves.geometry.max_new_side_blocks
        took = self._reclaim(idle, num_expected - num_lacking)
        return moves.num_free > num_free or moves.give_up_restores() or took

    def num_blocks_of_next_step(self, running: Sequence[Need[KVT]]) -> int:
        """Return how many blocks requests take for all their known tokens, those asleep to wake.

        `running` may include requests that are about to run.
        """
        kvs = {need: kv for need in running if (kv := need.record.kv) is not None}
        num_new = sum(self._moves.num_new(kv, need.num_tokens) for need, kv in kvs.items())
        num_to_wake: int = sum(map(self._moves.num_to_wake, holders_of(kvs.values())))
        return num_new + num_to_wake

    def _shares(self, needs: Sequence[Need[KVT]], seen: set[Any]) -> list[Share]:
        """Return what holders take: a trunk stands before its first user, if it is not `seen`."""
        block_size, shares = self._moves.geometry.block_size, list[Share]()
        for need in needs:
            kv, (num_tokens, num_ahead) = need.record.kv, self._tokens_to_hold(need)
            for trunk in () if kv is None else kv.trunks:
                if trunk not in seen:
                    seen.add(trunk)
                    floor = trunk.floor or ALL_RESIDENT
                    shares.append(Share(trunk, trunk.num_own_tokens, floor))
            num_own = num_tokens - _num_shared(need) * block_size
            floor = need.record.floor or ALL_RESIDENT
            shares.append(Share(kv, num_own, floor, self._num_side_blocks(need), num_ahead))
        return shares

    def _num_side_blocks(self, need: Need[KVT]) -> int:
        """Return the blocks of groups that never leave, with the next token."""
        if not self._moves.geometry.side_windows:
            return 0
        num_tokens = need.num_tokens + 1 + self._moves.geometry.max_ahead_tokens
        num_new = num_tokens - need.num_processed_tokens
        return side_blocks(self._moves.geometry, num_tokens=num_tokens, num_new_tokens=num_new)

    def _num_side_of(self, kvs: Iterable[Any]) -> int:
        """Return the blocks of such groups that requests have."""
        if not self._moves.geometry.side_windows:
            return 0
        return sum(map(self._moves.num_side_blocks, kvs))

    def _num_movable(self, idle: Sequence[Any]) -> int:
        """Return the blocks that are not kept by idle requests when all that can be taken is."""
        num_kept: int = sum(kv.num_unmovable for kv in idle)
        return self._moves.num_blocks - num_kept - self._num_side_of(idle)

    def _num_blocks_of(self, share: Share, residency: Residency | None) -> int:
        if residency is None:
            return 0
        own = num_request_blocks(
            self._moves.geometry,
            residency,
            num_tokens=share.num_tokens,
            num_ahead=share.num_ahead,
        )
        return own + share.num_side_blocks

    def _tokens_to_hold(self, need: Need[KVT]) -> tuple[int, int]:
        """Return at which length a request owns most blocks, and for how many tokens behind it.

        That is as it is, or with its next token, which opens a block at worst. Where it fills one,
        the open blocks of offloaded groups are more than what they become: a request is largest
        just before. Drafts open a block while the one before it is filling, or on its way to the
        host: any of them may be the request's or not.
        """
        geometry, num_tokens = self._moves.geometry, need.num_tokens
        size, ahead = geometry.block_size, geometry.max_ahead_tokens
        if ahead:
            least = max(1, _num_shared(need) * size, num_tokens + 1 - ahead)
            return least, num_tokens + 1 + ahead - least
        fills = num_tokens % size and not (num_tokens + 1) % size
        return (num_tokens, 0) if fills else (num_tokens + 1, 0)

    def _reclaim(self, idle: Sequence[Any], num_allowed: int) -> bool:
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

    def _sleep(self, kv: Any) -> None:
        """Take the buffers of what is in no step."""
        self._moves.sleep(kv)
        record = self._records.get(kv.request_id)
        if record is not None and record.state is State.READY:
            record.enter(State.LOADING)

    def _is_all_resident_with_room(self, needs: Sequence[Need[KVT]]) -> bool:
        """Return whether there is nothing to do: the common case, answered without the search."""
        for record in self._records.values():
            if record.floor is not None:
                return False
        for trunk in trunks_of(need.record.kv for need in needs).values():
            if trunk.floor is not None:
                return False
        moves, num_rows = self._moves, 0
        active = {need.record.request_id for need in needs}
        for kv in moves.all():
            if kv.num_buffers or kv.asleep:  # what is offloaded and awake has buffers
                return False
            if kv.request_id not in active:
                num_rows += kv.num_rows - kv.num_shared
        block_size, ahead = moves.geometry.block_size, moves.geometry.max_ahead_tokens
        for need in needs:
            num_rows += (need.num_tokens + ahead) // block_size + 1 - _num_shared(need)
        num_left = moves.num_blocks - self.num_spare
        if moves.geometry.side_windows:
            num_left -= self._num_side_of(kv for kv in moves.all() if kv.request_id not in active)
            num_left -= sum(map(self._num_side_blocks, needs))
        return num_rows * moves.geometry.num_groups <= num_left

    def _move(self, kv: Any, *, least: LayerPlacement, most: LayerPlacement) -> None:
        """Offload what must leave and restore what may come back; between the two, stay."""
        now, returning = set(kv.offloaded), set(kv.restoring)
        leaving = [g for g in sorted(least.offloaded) if g not in now or g in returning]
        if leaving:
            self._moves.offload(kv, leaving)
        for group in sorted(now - most.offloaded):
            if (
                group in returning
                or kv.num_rows - kv.num_shared > self._moves.num_free - self._num_kept_free
            ):
                break
            self._moves.restore(kv, group)
        if kv.num_buffers and kv.num_buffers != least.num_staging:
            self._moves.set_staging(kv, least.num_staging)

    def _fewest(self, shares: Sequence[Share], *, num_blocks: int) -> list[Residency | None]:
        claims = [
            Claim(
                num_tokens=share.num_tokens,
                offloadable=share.kv is None or share.kv.mirrored,
                min_offloaded=len(share.floor.offloaded),
                num_side_blocks=share.num_side_blocks,
                num_ahead=share.num_ahead,
            )
            for share in shares
        ]
        return fewest_offloaded(
            claims, self._moves.geometry, num_blocks=num_blocks, max_staging=self._max_staging
        )

    def _placement(self, share: Share, residency: Residency | None) -> LayerPlacement:
        """Return which groups: those of its floor, then the ones that spread best."""
        return widened(share.floor, residency, self._spread)


def _num_shared(need: Need[KVT]) -> int:
    """Return how many leading blocks are not the request's own, or will not be."""
    kv = need.record.kv
    return need.num_to_share if kv is None or not kv.num_shared else kv.num_shared
