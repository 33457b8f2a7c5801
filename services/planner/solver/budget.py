"""How long a search may go on: a deadline live, a node count in replay.

A search asks `allows()` before each piece of work and reports what the piece cost, at least one
node. Then the nodes spent say exactly where it stopped, and a `NodeBudget` of that many nodes
stops the same search at the same place.
"""

from collections.abc import Callable
from typing import Protocol


class Budget(Protocol):
    @property
    def num_nodes(self) -> int:
        """Nodes spent so far."""

    def allows(self) -> bool:
        """Say whether another piece of work may start. A yes is followed by `spend`."""

    def spend(self, num_nodes: int) -> None:
        """Record finished work, >= 1 node."""


class DeadlineBudget:
    """Until a point in time."""

    def __init__(self, now_s: Callable[[], float], deadline_s: float) -> None:
        self._now_s, self._deadline_s = now_s, deadline_s
        self.num_nodes = 0

    def allows(self) -> bool:
        return self._now_s() < self._deadline_s

    def spend(self, num_nodes: int) -> None:
        self.num_nodes += num_nodes


class NodeBudget:
    """Until a number of nodes."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.num_nodes = 0

    def allows(self) -> bool:
        return self.num_nodes < self._limit

    def spend(self, num_nodes: int) -> None:
        self.num_nodes += num_nodes


class Share:
    """At most so many nodes of another budget."""

    def __init__(self, whole: Budget, limit: int) -> None:
        self._whole, self._limit = whole, limit
        self.num_nodes = 0

    def allows(self) -> bool:
        return self.num_nodes < self._limit and self._whole.allows()

    def spend(self, num_nodes: int) -> None:
        self.num_nodes += num_nodes
        self._whole.spend(num_nodes)
