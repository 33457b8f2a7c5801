"""Copies to the host: every full block of every mirrored request, soon after it is filled.

What offloaded groups fill is copied at once, for their blocks are given up when the copy is
complete. What resident groups fill follows within a budget per step: first what several requests
share, then the likeliest victim of a preemption, so that it can be parked, or its layers dropped,
without a transfer.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from enum import Enum

from services.executor.blocks.block_owner import BlockOwner
from services.executor.blocks.holder import GroupKV, Holder
from services.executor.blocks.residency import RequestKV, Trunk
from services.executor.step_messages import SaveOrder


class Retraction(Enum):
    """What became of a save that did not succeed."""

    DONE = "done"  # it is ordered anew
    GONE = "gone"  # nothing waits for it
    ONLY_COPY = "only_copy"  # what it was to copy is lost


@dataclass(frozen=True, slots=True)
class UnderWay:
    """A copy that was ordered and is not confirmed."""

    step: int
    ordered_for: str  # the holder that had the blocks then
    holder: Holder  # that has them now
    index: int  # layer group
    end: int  # leading blocks that are on the host once it is complete
    num_blocks: int

    @property
    def group(self) -> GroupKV:
        return self.holder.groups[self.index]

    @property
    def frees_blocks(self) -> bool:
        copied = range(self.end - self.num_blocks, self.end)
        return self.group.stages and any(position in copied for position in self.group.own)


def _cut(copy: UnderWay, trunk: Trunk) -> Iterator[UnderWay]:
    """Yield a trunk's part of a copy, and what is left of it."""
    begin, end = copy.end - copy.num_blocks, min(copy.end, trunk.end)
    if begin < end:
        yield replace(copy, holder=trunk, end=end, num_blocks=end - begin)
    if copy.end > trunk.end:
        yield replace(copy, num_blocks=copy.end - max(begin, trunk.end))


class WriteThrough:
    """Knows which full blocks have no host copy yet, and orders copies."""

    def __init__(self, owner: BlockOwner, *, budget: Callable[[int], int]) -> None:
        """`budget` returns how many blocks of resident groups a step may order.

        It is given how many blocks are under way.
        """
        self._owner = owner
        self._budget = budget
        self._lagging: dict[Holder, None] = {}  # has full blocks whose copy was not yet ordered
        self._under_way: deque[UnderWay] = deque()  # in step order
        self.num_under_way = 0  # blocks

    def note(self, kv: Holder) -> None:
        """Order the copies that a holder's full blocks lack, in the steps that come."""
        self._lagging[kv] = None

    def by_likelihood(self, kvs: Iterable[RequestKV]) -> list[RequestKV]:
        """Return requests, the likeliest victim first: by deposit, then the last admitted."""
        age = {kv: number for number, kv in enumerate(self._owner.kvs)}
        return sorted(
            kvs,
            key=lambda kv: (kv.record.num_deposited_tokens, age.get(kv, -1)),
            reverse=True,
        )

    def split(self, holder: Holder, trunk: Trunk) -> None:
        """Let a trunk that was cut from a holder have its part of what is under way and lags."""
        if trunk.mirrored or not trunk.is_copied:
            return
        self.note(trunk)
        copies, self._under_way = self._under_way, deque()
        for copy in copies:
            self._under_way.extend(_cut(copy, trunk) if copy.holder is holder else [copy])

    def confirm(self, saved_step: int) -> list[Holder]:
        """Count the copies of all steps up to `saved_step` as complete; return whose they are."""
        touched: dict[Holder, None] = {}
        while self._under_way and self._under_way[0].step <= saved_step:
            copy = self._under_way.popleft()
            self.num_under_way -= copy.num_blocks
            copy.group.num_host_blocks = max(copy.group.num_host_blocks, copy.end)
            touched[copy.holder] = None
        return list(touched)

    def whose(self, step: int, ordered_for: str, index: int) -> list[Holder]:
        """Return what has the blocks now that a save was to copy."""
        save = (step, ordered_for, index)
        return [c.holder for c in self._under_way if (c.step, c.ordered_for, c.index) == save]

    def retract(self, step: int, holder: Holder, index: int) -> Retraction:
        """Take back a save that did not succeed and the group's later ones, to order them anew.

        Nothing changes if there is no such save any more, or if blocks are among them that exist
        nowhere else.
        """
        group = holder.groups[index]
        copies = [copy for copy in self._under_way if copy.group is group]
        if not self._owner.is_live(holder):
            return Retraction.GONE
        num_kept = max([group.num_host_blocks, *(c.end for c in copies if c.step < step)])
        if any(position >= num_kept for position in group.staged_positions()):
            return Retraction.ONLY_COPY
        self._forget(lambda copy: copy.group is group and copy.step >= step)
        num_slots = max(num_kept, len(holder.columns))
        self._owner.host.give_back(group.host_slots[num_slots:])
        del group.host_slots[num_slots:]
        group.num_saves_sent = num_kept
        self.note(holder)
        return Retraction.DONE

    def unmirror(self, holder: Holder) -> None:
        """Make no more host copies of what has no offloaded groups; a request has none any more."""
        self._forget(lambda copy: copy.holder is holder)
        self._lagging.pop(holder, None)
        if isinstance(holder, RequestKV):
            self._owner.unmirror(holder)

    def _forget(self, is_gone: Callable[[UnderWay], bool]) -> None:
        kept = deque(copy for copy in self._under_way if not is_gone(copy))
        self.num_under_way = sum(copy.num_blocks for copy in kept)
        self._under_way = kept

    def plan(self, step: int) -> list[SaveOrder]:
        """Return the copies of a step."""
        self._forget_the_gone()
        saves: list[SaveOrder] = []
        if not self._lagging:
            return saves
        num_before = self.num_under_way
        for kv in self._lagging:
            for index, group in enumerate(kv.groups):
                if group.offloaded:
                    self._order(step, kv, index, kv.num_full_blocks, saves)
        num_left = self._budget(num_before) - (self.num_under_way - num_before)
        if num_left > 0:
            self._mirror(step, num_left, saves)
        return saves

    def _mirror(self, step: int, num_left: int, saves: list[SaveOrder]) -> None:
        trunks = [holder for holder in self._lagging if isinstance(holder, Trunk)]
        requests = [holder for holder in self._lagging if isinstance(holder, RequestKV)]
        for kv in (*trunks, *self.by_likelihood(requests)):
            for index, group in enumerate(kv.groups):
                if num_left <= 0:
                    return
                if not group.offloaded:
                    end = min(kv.num_full_blocks, group.num_saves_sent + num_left)
                    num_ordered = self._order(step, kv, index, end, saves)
                    num_left -= num_ordered
                    self._owner.counters.num_mirrored_blocks += num_ordered

    def _order(
        self,
        step: int,
        kv: Holder,
        index: int,
        end: int,
        saves: list[SaveOrder],
    ) -> int:
        """Order copies of a group's blocks up to `end`, and return of how many.

        0 if there is no room on the host.
        """
        group = kv.groups[index]
        num_new = end - group.num_saves_sent
        if num_new <= 0 or not self._owner.prepare_save(kv, group, end):
            return 0
        saves.extend(_save_orders(kv, index, end))
        self._under_way.append(UnderWay(step, kv.request_id, kv, index, end, num_new))
        self.num_under_way += num_new
        return num_new

    def _forget_the_gone(self) -> None:
        for kv in list(self._lagging):
            num_full = kv.num_full_blocks
            if not self._owner.is_live(kv) or all(
                group.num_saves_sent >= num_full for group in kv.groups
            ):
                del self._lagging[kv]

    def budget(self) -> int:
        """Return how many blocks the next step may order, beside what offloaded groups fill."""
        return self._budget(self.num_under_way)

    def frees_blocks(self) -> bool:
        """Whether a copy is under way whose completion gives blocks back: own ones, not staging."""
        return any(c.frees_blocks for c in self._under_way if self._owner.is_live(c.holder))

    @property
    def is_busy(self) -> bool:
        return bool(self._under_way)

    def num_lagging_blocks(self) -> int:
        """Return how many full blocks have no complete host copy, and shall have one."""
        return sum(
            max(0, holder.num_full_blocks - group.num_host_blocks)
            for holder in self._owner.holders()
            if holder.is_copied
            for group in holder.groups
        )


def _save_orders(kv: Holder, index: int, end: int) -> list[SaveOrder]:
    """Return orders for one group's blocks up to `end`, own and staging blocks apart."""
    group = kv.groups[index]
    orders = [
        SaveOrder(kv.request_id, index, [], [], [], from_staging) for from_staging in (False, True)
    ]
    for position in range(group.num_saves_sent, end):
        order = orders[group.offloaded and position not in group.own]
        order.uids.append(kv.uid(position))
        order.slots.append(group.host_slots[position])
        order.block_ids.append(group.row[position].block_id)
    group.num_saves_sent = end
    return [order for order in orders if order.slots]
