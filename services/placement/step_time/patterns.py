"""Offload patterns: which layers of a request leave, and how far ahead they are fetched.

OrbitFlow's search space (section 3.3.2) is the evenly spaced distances. Counts that no distance
gives are added as balanced layouts, and each pattern also with a second prefetch buffer: one more
buffer lets the copy of the next offloaded layer start before the present one has been consumed.
Layers count from 0 in code; the papers count from 1.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cache


class PatternSpace(Enum):
    EVEN = "even"  # OrbitFlow's: even distances, one buffer
    FULL = "full"  # even distances and balanced counts, one or two buffers


@dataclass(frozen=True, slots=True)
class Pattern:
    """Where the layers of one request are."""

    offloaded: tuple[int, ...]  # layers in host memory, ascending, counted from 0
    num_buffers: int  # layers in flight or in use at once (m); 0 iff nothing is offloaded

    @property
    def num_offloaded(self) -> int:
        return len(self.offloaded)


RESIDENT = Pattern((), 0)


def even_distances(num_layers: int) -> tuple[int, ...]:
    """Return the distances worth trying, ascending: the largest for each offload count, and 1.

    Distance k offloads layers k, 2k, ... (counted from 1); of two distances that offload equally
    many layers, the larger leaves the first copy more time. There are D(L) of them above 1
    (OrbitFlow, section 3.3.2).
    """
    largest = {num_layers // k: k for k in range(1, num_layers + 1)}
    return tuple(sorted(largest.values()))


def even_layers(num_layers: int, distance: int) -> tuple[int, ...]:
    return tuple(range(distance - 1, num_layers, distance))


def balanced_layers(num_layers: int, num_offloaded: int) -> tuple[int, ...]:
    """Return `num_offloaded` layers whose gaps differ by at most one, the last one included."""
    return tuple(math.ceil(j * num_layers / num_offloaded) - 1 for j in range(1, num_offloaded + 1))


def make_pattern(offloaded: tuple[int, ...], num_buffers: int) -> Pattern:
    """Return a pattern with no more buffers than it has offloaded layers."""
    return Pattern(offloaded, min(num_buffers, len(offloaded)))


@cache
def balanced_pattern(num_layers: int, num_offloaded: int) -> Pattern:
    """Return the balanced layout with one buffer; nothing offloaded is `RESIDENT`."""
    if not num_offloaded:
        return RESIDENT
    return make_pattern(balanced_layers(num_layers, num_offloaded), 1)


def spread_over(groups: Sequence[int], space: PatternSpace) -> tuple[Pattern, ...]:
    """Return patterns that offload nothing but `groups`: all, every second, third, ... of them.

    The even distances of a request of which only these layers may leave the pool.
    """
    depths = (1,) if space is PatternSpace.EVEN else (1, 2)
    layouts = [tuple(groups[k - 1 :: k]) for k in even_distances(len(groups))]
    return tuple(dict.fromkeys(make_pattern(layout, m) for m in depths for layout in layouts))


@cache
def pattern_space(num_layers: int, space: PatternSpace) -> tuple[Pattern, ...]:
    """Return every pattern of a space once: nothing offloaded first, even ones before balanced."""
    layouts = [even_layers(num_layers, distance) for distance in even_distances(num_layers)[::-1]]
    depths: tuple[int, ...] = (1,)
    if space is PatternSpace.FULL:
        layouts += [balanced_layers(num_layers, n) for n in range(1, num_layers + 1)]
        depths = (1, 2)
    patterns = {RESIDENT: None}
    for depth in depths:
        patterns |= {make_pattern(layout, depth): None for layout in layouts}
    return tuple(patterns)
