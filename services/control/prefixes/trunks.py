"""Which holders have in the pool what a request begins with: trunks, and requests' own parts.

    A  |--- trunk ---|----- own -----
    B  |--- trunk ---|-- own --

The same of blocks, in the executor, and of counts, in the simulator.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence
from typing import Any

from services.control.prefixes.prefix_cache import Column, num_alike
from services.control.prefixes.shared_prefixes import Stretch

MIN_TRUNK_TOKENS = 256  # what is shorter each request has for itself


class Sharing:
    """What requests of one engine may share."""

    def __init__(self, *, block_size: int) -> None:
        self.is_on = True
        self.min_tokens = MIN_TRUNK_TOKENS
        self._block_size = block_size

    @property
    def num_least(self) -> int:
        """Return how many blocks of a row are shared at least."""
        return -(-self.min_tokens // self._block_size)

    def holders_along(
        self, columns: Sequence[Column], *, but: Any = None
    ) -> Iterator[tuple[Any, int]]:
        """Yield what has leading columns in the pool, one behind the other, and each up to where.

        At least `num_least` at a time; none from `but` on.
        """
        first, num_least = 0, self.num_least
        while self.is_on and first + num_least <= len(columns):
            # Behind what is too short to be shared, which many begin with that differ then.
            holder = columns[first + num_least - 1].holder
            if holder is None or holder is but or holder.first != first:
                return
            # What is not on the host yet is shared only while all layers are in the pool.
            last = holder.num_copied_blocks if holder.offloaded else None
            number = num_alike(columns[first:], holder.columns[first:last])
            if number < num_least:
                return
            first += number
            yield holder, first

    def num_shared(self, columns: Sequence[Column]) -> int:
        """Return how many leading columns others have in the pool, or are loading."""
        return max((end for _, end in self.holders_along(columns)), default=0)

    def found(self, columns: Sequence[Column]) -> list[Stretch]:
        """Return whose the leading columns are that a request will begin with."""
        if not self.is_on:
            return []
        parts = [Stretch(holder.request_id, end) for holder, end in self.holders_along(columns)]
        is_nobodys = len(columns) >= self.num_least and columns[0].holder is None
        if is_nobodys and not parts:  # of several that begin so the first will have it
            parts = [Stretch(columns[-1].uid, len(columns))]
        return parts


def stretches(kv: Any, end: int) -> list[Stretch]:
    """Return what a request begins with: its trunks, and its own up to `end`, to be shared."""
    parts = [Stretch(trunk.request_id, trunk.num_rows) for trunk in kv.trunks]
    if end > kv.num_shared:
        parts.append(Stretch(kv.request_id, end))
    return parts


def put_before(holder: Any, trunk: Any, users: Iterable[Any]) -> None:
    """Let a new trunk stand before what it was cut from, in all requests that had that."""
    for user in users:
        at = user.trunks.index(holder) if holder in user.trunks else len(user.trunks)
        user.trunks.insert(at, trunk)
        trunk.users[user] = None


def own_columns(holder: Any) -> Sequence[Column]:
    """Return the columns whose blocks are a holder's own."""
    own: Sequence[Column] = holder.columns[holder.first :]
    return own


def hold(holder: Any) -> None:
    """Let what begins with a holder's own columns share them, where no other has them."""
    for column in own_columns(holder):
        if column.holder is None:
            column.holder = holder


def give_up(holder: Any) -> None:
    """Let no request share what a holder has any more."""
    for column in holder.columns:
        if column.holder is holder:
            column.holder = None


def num_duplicate_blocks(
    holders: Sequence[tuple[Sequence[Column], Collection[int]]], *, num_groups: int
) -> int:
    """Return how many blocks the pool could do without if requests shared them there.

    `holders`: of each live request its columns, and the layer groups that are not in the pool.
    """
    by_key: defaultdict[Hashable, list[int]] = defaultdict(list)
    for number, (columns, _) in enumerate(holders):
        for column in columns:
            by_key[column.key].append(number)
    num_columns = Counter(map(tuple, by_key.values()))  # by the requests that they begin
    total = 0
    for numbers, number_of_columns in num_columns.items():
        num_offloaded = Counter(group for number in numbers for group in holders[number][1])
        in_pool = (len(numbers) - num_offloaded[group] for group in range(num_groups))
        total += number_of_columns * sum(max(0, number - 1) for number in in_pool)
    return total
