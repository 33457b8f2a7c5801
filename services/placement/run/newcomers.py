"""In which order newcomers are taken."""

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from heapq import heapify, heapreplace
from typing import NamedTuple, TypeVar

from services.placement.run.types import RunRequest

UNSTATED_TTFT_S = 60.0  # the TTFT SLO of one that states none, as far as its place in line goes
T = TypeVar("T")


class Claim(NamedTuple):
    """What the place of a request depends on where fairness ids have shares."""

    fairness_id: str
    attained: float  # of its id, as in `RunRequest`
    num_tokens: int  # that it will hold once it comes in, >= 1


def in_line(queue: Iterable[RunRequest], *, ahead_s: float = 0.0) -> list[RunRequest]:
    """Return newcomers in the order in which they are taken: whose first token is due first; where
    fairness ids have shares, by these first.

    A request without a TTFT SLO stands where one of `UNSTATED_TTFT_S` would: so those with an SLO
    pass it, and none of its id that came more than `UNSTATED_TTFT_S` later does.
    """
    line = sorted(queue, key=_first_due_s)
    return in_shares(line, _claim, ahead_s=ahead_s) if ahead_s else line


def in_shares(line: Sequence[T], claim: Callable[[T], Claim], *, ahead_s: float) -> list[T]:
    """Return a line with each place given to the id that has attained least.

    What is taken counts as attained by its id: its tokens, for `ahead_s`. Requests of one id stay
    in the line's order, and so do ids that have attained the same.
    """
    queues = defaultdict[str, deque[tuple[int, T]]](deque)
    attained = dict[str, float]()
    for place, one in enumerate(line):
        whose = claim(one)
        queues[whose.fairness_id].append((place, one))
        attained.setdefault(whose.fairness_id, whose.attained)
    heads = [(attained[name], queue[0][0], name) for name, queue in queues.items()]
    heapify(heads)
    taken = list[T]()
    while len(taken) < len(line):
        share, _, name = heads[0]
        queue = queues[name]
        _, one = queue.popleft()
        taken.append(one)
        share = max(share, 0.0) + claim(one).num_tokens * ahead_s
        heapreplace(heads, (share, queue[0][0], name) if queue else _SERVED)
    return taken


_SERVED = (float("inf"), 0, "")  # an id that has no more in the line


def _claim(request: RunRequest) -> Claim:
    return Claim(request.fairness_id, request.attained, request.num_tokens)


def _first_due_s(request: RunRequest) -> float:
    slo_s = UNSTATED_TTFT_S if request.slo_ttft_s is None else request.slo_ttft_s
    return slo_s - request.arrival_age_s
