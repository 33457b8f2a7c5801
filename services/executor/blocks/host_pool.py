"""Host memory for KV, counted in slots: one slot holds one block of one layer group.

The scheduler owns the slots; each rank has the same number of them, and slot i of every rank holds
its shard of the same block. Room is reserved per request at admission, so that a request that was
promised a host copy gets it.

Slots become usable from the first one on, as every rank gets their memory ready. What none uses
of the prefix cache is as good as free.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from vllm.v1.core.kv_cache_utils import BlockHash

from services.control.counters import Counters
from services.control.prefixes.anchors import Anchor
from services.control.prefixes.prefix_cache import Column, FoundPrefix, PrefixCache


@dataclass(slots=True, eq=False)
class SlotPromise:
    """Slots that a request was promised and has not taken yet."""

    num_slots: int = 0
    backed: bool = True  # False: there may not be as many free


class HostPool:
    """Bounded set of slots with reservations. Slots are taken and given back in O(1)."""

    def __init__(self, num_slots: int, *, num_ready: int | None = None) -> None:
        """Make a pool of `num_slots`, of which the first `num_ready` are usable; None: all."""
        self.num_slots = num_slots
        self.num_ready = num_slots if num_ready is None else num_ready
        self.counters = Counters()
        self.cache = PrefixCache(self.counters)
        self._free = list(range(self.num_ready - 1, -1, -1))
        self._num_reserved = 0  # promised and not yet taken
        self._num_unbacked = 0  # of these, in promises that are not backed
        self._quarantined: frozenset[int] = frozenset()
        self._held: set[int] = set()  # in quarantine, without an owner

    def open_slots(self, num_ready: int) -> None:
        """Make the first `num_ready` slots usable; fewer than before changes nothing."""
        num_ready = min(num_ready, self.num_slots)
        if num_ready > self.num_ready:
            self._free[:0] = range(num_ready - 1, self.num_ready - 1, -1)
            self.num_ready = num_ready

    def limit(self, num_slots: int) -> None:
        """Have no more slots than these from now on.

        As many as there are change nothing, so that ranks may say it again (vLLM does after a
        wake-up). For fewer none may have been taken or promised.
        """
        if num_slots >= self.num_slots:
            return
        assert self.num_used == 0
        assert not self._num_reserved
        self.num_slots = num_slots
        self.num_ready = min(self.num_ready, num_slots)
        self._free = list(range(self.num_ready - 1, -1, -1))

    @property
    def num_free(self) -> int:
        """Usable slots that no request's KV is in; some of them may be promised."""
        num_idle = self.cache.num_idle_slots + self.cache.anchors.num_idle_slots
        return len(self._free) + num_idle

    @property
    def num_unpromised(self) -> int:
        """Free slots that are not promised; below 0 if more are promised than are free."""
        return self.num_free - self._num_reserved

    @property
    def num_used(self) -> int:
        return self.num_ready - self.num_free

    def reserve(self, promise: SlotPromise, num_slots: int) -> bool:
        """Fill an empty promise; False, and nothing changed, if there is no room."""
        assert not promise.num_slots
        if num_slots > self.num_unpromised:
            return False
        promise.num_slots = num_slots
        self._num_reserved += num_slots
        return True

    def reserve_unbacked(self, promise: SlotPromise, num_slots: int) -> None:
        """Promise slots that may not be free yet. None may be taken before `back`."""
        assert not promise.num_slots
        promise.num_slots, promise.backed = num_slots, False
        self._num_reserved += num_slots
        self._num_unbacked += num_slots

    def back(self, promise: SlotPromise) -> None:
        """Make an unbacked promise one like all others: what it lacked has become free."""
        assert self.num_unpromised >= 0
        self._num_unbacked -= promise.num_slots
        promise.backed = True

    def can_take(self, promise: SlotPromise, num_slots: int) -> bool:
        """Return whether `take` would succeed, now or once an unbacked promise is backed."""
        num_more = max(0, num_slots - promise.num_slots)
        if not promise.backed:
            return num_more <= max(0, self.num_unpromised)
        # Free slots cover all backed promises, unless quarantine has taken some: what is within one
        # is there whatever unbacked ones lack. What is beyond it must be promised to none.
        return num_more <= self.num_unpromised + (0 if num_more else self._num_unbacked)

    def take(self, promise: SlotPromise, num_slots: int) -> list[int] | None:
        """Return slots from the promise, then from what is not promised.

        None, and nothing changed, if there are not enough.
        """
        assert promise.backed
        if not self.can_take(promise, num_slots):
            return None
        promised = min(num_slots, promise.num_slots)
        promise.num_slots -= promised
        self._num_reserved -= promised
        self.give_back(self.cache.evict(num_slots - len(self._free)))
        return [self._free.pop() for _ in range(num_slots)]

    def take_spare(self, num_slots: int) -> list[int] | None:
        """Return slots that are promised to no request and that nothing kept has to go for; None,
        and nothing changed, if there are not enough.
        """
        spare = self.cache.can_evict(num_slots + self._num_reserved - len(self._free))
        return self.take(SlotPromise(), num_slots) if spare else None

    def give_back(self, slots: Sequence[int]) -> None:
        for slot in reversed(slots):
            if slot in self._quarantined:
                self._held.add(slot)
            else:
                self._free.append(slot)

    def find(
        self, found: FoundPrefix, keys: Iterable[BlockHash], num_keys: int
    ) -> Sequence[Column]:
        """Return the columns that a request may begin with whose first blocks are these.

        Of those that no request uses, no more than there is unpromised room for. `found`: the
        request's own.
        """
        columns = self.cache.find_again(found, keys, num_keys)
        num_left = self.num_unpromised
        num_groups = len(columns[0].slots) if columns else 0
        if not columns or 0 < len(columns) * num_groups <= num_left:
            return columns  # there is room for all; a column has a slot per layer group, or none
        for number, column in enumerate(columns):
            num_left -= 0 if column.num_users else len(column.slots)
            if num_left < 0:
                return columns[:number]
        return columns

    def release(self, columns: Sequence[Column]) -> None:
        """Give columns back that a request does not use any more; they may be found again."""
        self.give_back(self.cache.release(columns))

    def forget(self, is_gone: Callable[[Column], bool]) -> None:
        """Let columns not be found any more; what uses them now keeps them."""
        self.give_back(self.cache.forget(is_gone))

    def forget_all(self) -> None:
        """Let no column be found any more, nor any be retained."""
        self.cache.awaited.clear()
        self.cache.retention.clear()
        self.forget(lambda column: True)

    def quarantine(self, slots: frozenset[int]) -> None:
        """Let exactly these slots not be taken, now or when they are given back.

        Nor are columns found that have one of them.
        """
        if new := slots - self._quarantined:
            self.forget(lambda column: not new.isdisjoint(column.slots))
            gone = self.cache.anchors.forget(lambda anchor: not new.isdisjoint(anchor.slots))
            self.give_back(gone)
        strays = (slots - self._quarantined).intersection(self._free) if slots else frozenset()
        if strays:
            self._free = [slot for slot in self._free if slot not in strays]
        self._quarantined = slots
        self._free.extend(self._held - slots)
        self._held = (self._held & slots) | strays

    def withdraw(self, promise: SlotPromise) -> None:
        """Empty what is left of a promise."""
        if not promise.backed:
            self._num_unbacked -= promise.num_slots
        self._num_reserved -= promise.num_slots
        promise.num_slots, promise.backed = 0, True

    def check_integrity(
        self,
        owned: Sequence[int],
        promises: Iterable[SlotPromise],
        used: Iterable[Sequence[Column]] = (),
        anchors: Iterable[Anchor] = (),
    ) -> None:
        """Assert that every usable slot is one thing, and that what is free covers promises.

        Free, held, of a column or an anchor, or one of the `owned`. `promises`: all but empty ones;
        `used`: the columns of each request; `anchors`: those that requests come back to.
        """
        in_columns = self.cache.check_integrity(used, anchors)
        everything = sorted([*self._free, *self._held, *in_columns, *owned])
        assert everything == list(range(self.num_ready)), "a host slot is lost or owned twice"
        promises = list(promises)
        assert self._num_reserved == sum(one.num_slots for one in promises)
        assert self._num_unbacked == sum(one.num_slots for one in promises if not one.backed)
        num_coming = self.num_free + len(self._quarantined)
        assert 0 <= self._num_reserved - self._num_unbacked <= num_coming, (
            "more host slots promised than free"
        )
