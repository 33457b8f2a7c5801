"""Which holders have in the pool what a request begins with: trunks, and requests' own parts.

    A  |--- trunk ---|----- own -----
    B  |--- trunk ---|-- own --

The same of blocks, in the executor, and of counts, in the simulator.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from services.control.prefix_cache import Column, num_alike
from services.control.shared_prefixes import Stretch

MIN_TRUNK_TOKENS = 256  # what is shorter each request has for itself


def num_least_blocks(block_size: int, *, min_tokens: int = MIN_TRUNK_TOKENS) -> int:
    """Return how many blocks of a row are shared at least."""
    return -(-min_tokens // block_size)


def holders_along(
    columns: Sequence[Column], num_least: int, *, but: Any = None
) -> Iterator[tuple[Any, int]]:
    """Yield who has leading columns in the pool, one behind the other, and each up to where.

    At least `num_least` at a time; none from `but` on.
    """
    first = 0
    while first + num_least <= len(columns):
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


def num_shared(columns: Sequence[Column], num_least: int) -> int:
    """Return how many leading columns others have in the pool, or are loading."""
    return max((end for _, end in holders_along(columns, num_least)), default=0)


def stretches(kv: Any, end: int) -> list[Stretch]:
    """Return what a request begins with: its trunks, and its own up to `end`, to be shared."""
    parts = [Stretch(trunk.request_id, trunk.num_rows) for trunk in kv.trunks]
    if end > kv.num_shared:
        parts.append(Stretch(kv.request_id, end))
    return parts


def found(columns: Sequence[Column], num_least: int) -> list[Stretch]:
    """Return whose the leading columns are that a request will begin with."""
    parts = [Stretch(holder.request_id, end) for holder, end in holders_along(columns, num_least)]
    is_nobodys = len(columns) >= num_least and columns[0].holder is None
    if is_nobodys and not parts:  # of several that begin so the first will have it
        parts = [Stretch(columns[-1].uid, len(columns))]
    return parts


def own_columns(holder: Any) -> Sequence[Column]:
    """Return the columns whose blocks are a holder's own."""
    own: Sequence[Column] = holder.columns[holder.first :]
    return own


def hold(holder: Any) -> None:
    """Let who begins with a holder's own columns share them, where nobody else has them."""
    for column in own_columns(holder):
        if column.holder is None:
            column.holder = holder


def give_up(holder: Any) -> None:
    """Let nobody share what a holder has any more."""
    for column in holder.columns:
        if column.holder is holder:
            column.holder = None
