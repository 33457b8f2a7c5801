"""Which requests to pause, so that the rest can keep its constraints: sets, the better ones first.

The order rests on one fact: where a rest certainly fails, so does every larger rest.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

from services.placement.types import RequestState

Victims: TypeAlias = list[RequestState]
Hopeless: TypeAlias = Callable[[Sequence[RequestState]], bool]  # of the rest without these


def growing_sets(
    ranked: Sequence[RequestState], *, num_running: int, is_hopeless: Hopeless
) -> Iterator[Victims]:
    """Yield longer and longer beginnings of a ranking, never all that run.

    Sets whose rest certainly fails are left out; they are found by halving. From the first hopeful
    one on the sets grow ever faster.
    """
    most = min(len(ranked), num_running - 1)
    low, high = 0, most + 1  # `low` victims are not enough
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if is_hopeless(ranked[:middle]) else (low, middle)
    growth = 1
    while high < most:
        yield list(ranked[:high])
        high, growth = high + growth, growth * 2
    if most > 0:
        yield list(ranked[:most])
