"""Which leading blocks live requests have in common, by the hashes that vLLM caches them by."""

from collections.abc import Hashable, Sequence
from typing import NamedTuple

from services.control.prefixes.shared_prefixes import Stretch


class _Block(NamedTuple):
    source: int  # the request that had it first
    num_users: int  # live requests that begin with it


class CommonPrefixes:
    """Prompts of live requests, paths in a tree: a hash stands for all blocks before it, too."""

    def __init__(self) -> None:
        self._blocks: dict[Hashable, _Block] = {}
        self._paths: dict[str, tuple[Sequence[Hashable], Sequence[Stretch]]] = {}
        self._num_sources = 0

    def add(self, request_id: str, hashes: Sequence[Hashable]) -> None:
        """Take in a request by the hashes of its prompt's full blocks."""
        self._num_sources += 1
        stretches = list[Stretch]()
        for number, one in enumerate(hashes, start=1):
            source, num_users = self._blocks.get(one, (self._num_sources, 0))
            self._blocks[one] = _Block(source, num_users + 1)
            if stretches and stretches[-1].source == source:
                stretches.pop()
            stretches.append(Stretch(source, number))
        self._paths[request_id] = hashes, stretches

    def knows(self, request_id: str) -> bool:
        return request_id in self._paths

    def stretches(self, request_id: str) -> Sequence[Stretch]:
        """Return what a request begins with, by whose it was first, in hashed blocks."""
        return self._paths[request_id][1]

    def remove(self, request_id: str) -> None:
        """Let a request end."""
        for one in self._paths.pop(request_id)[0]:
            source, num_users = self._blocks[one]
            if num_users > 1:
                self._blocks[one] = _Block(source, num_users - 1)
            else:
                del self._blocks[one]
