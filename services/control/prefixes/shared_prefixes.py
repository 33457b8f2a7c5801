"""Which leading parts requests have in common, as far as the pool holds them once."""

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple


class Stretch(NamedTuple):
    """Leading blocks of a request: from the end of the stretch before it, or the beginning."""

    source: Hashable  # whose they are: the same source's blocks are the same
    end: int  # position behind the last one, in blocks


def behind(stretches: Sequence[Stretch], coming: Stretch | None) -> Sequence[Stretch]:
    """Return what a request begins with once what others compute of it is there."""
    if coming is None:
        return stretches
    kept = [one for one in stretches if one.source != coming.source]
    return [*kept, coming]


class SharedPrefixes(NamedTuple):
    """Parts of rows that several requests begin with, each once."""

    rows: tuple[int, ...]  # each part's blocks of one layer group
    of: tuple[tuple[int, ...], ...]  # by request: its parts, in order


def shared_prefixes(requests: Sequence[Sequence[Stretch]]) -> SharedPrefixes:
    """Return what requests share that begin with these stretches."""
    num_requests = Counter(source for stretches in requests for source, _ in stretches)
    if all(number == 1 for number in num_requests.values()):
        return SharedPrefixes(rows=(), of=((),) * len(requests))
    spans: defaultdict[Hashable, set[int]] = defaultdict(set)  # by source, where its parts meet
    for stretches in requests:
        for source, begin, end in _spans(stretches):
            spans[source] |= {begin, end}
    parts = {source: list(pairwise(sorted(ends))) for source, ends in spans.items()}
    used = [
        [
            (source, part)
            for source, _, end in _spans(one)
            for part in parts[source]
            if part[1] <= end
        ]
        for one in requests
    ]
    num_users = Counter(part for parts_of_one in used for part in parts_of_one)
    shared = [part for part, number in num_users.items() if number > 1]
    numbers = {part: number for number, part in enumerate(shared)}
    return SharedPrefixes(
        rows=tuple(end - begin for _, (begin, end) in shared),
        of=tuple(tuple(numbers[part] for part in one if part in numbers) for one in used),
    )


def _spans(stretches: Sequence[Stretch]) -> Iterable[tuple[Hashable, int, int]]:
    begin = 0
    for source, end in stretches:
        yield source, begin, end
        begin = end
