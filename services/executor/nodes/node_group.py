"""The leader's view of its engine's nodes: which have joined, and whether one was lost."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass

import structlog

from services.executor.nodes.node_facts import differences
from services.executor.nodes.types import NodesDifferError, NodesMissingError
from services.kit.errors import ConflictError, InvalidRequestError, UnavailableError

log = structlog.get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A follower that asks to be part of the engine."""

    rank: int
    host: str
    facts: Mapping[str, str]  # of `facts_of`


class NodeGroup:
    """`lost` is set when a node goes that the engine was begun with. Make it in a running loop."""

    def __init__(self, num_nodes: int) -> None:
        self.lost = asyncio.Event()
        self._ranks = frozenset(range(1, num_nodes))
        self._joined: dict[int, Node] = {}
        self._changed = asyncio.Event()
        loop = asyncio.get_running_loop()
        self._facts: asyncio.Future[Mapping[str, str]] = loop.create_future()
        self._rendezvous_port: asyncio.Future[int] = loop.create_future()  # done: begun
        self._difference = ""
        self._over = asyncio.Event()

    @property
    def missing(self) -> list[int]:
        """Return the ranks that have not joined."""
        return sorted(self._ranks - self._joined.keys())

    async def gather(self, facts: Mapping[str, str], *, timeout_s: float) -> None:
        """Return when all nodes have joined that have the leader's `facts`.

        Raises NodesDifferError with the first that has others, and NodesMissingError.
        """
        self._facts.set_result(facts)
        if self.missing:
            log.info("nodes_awaited", missing=self.missing, timeout_s=timeout_s)
            try:
                async with asyncio.timeout(timeout_s):
                    while self.missing and not self._difference:
                        self._changed.clear()
                        await self._changed.wait()
            except TimeoutError:
                raise NodesMissingError(
                    f"no word of nodes {self.missing} within {timeout_s:g} s"
                ) from None
        if self._difference:
            raise NodesDifferError(self._difference)

    def begin(self, rendezvous_port: int) -> None:
        """Let the nodes load their ranks."""
        self._rendezvous_port.set_result(rendezvous_port)

    def close(self) -> None:
        """Let the followers go: the engine is ending."""
        self._over.set()

    async def join(self, node: Node) -> None:
        """Take a node in; `leave` must follow. Raises InvalidRequestError if it does not fit,
        ConflictError if its rank is taken, UnavailableError if the engine has begun.
        """
        facts = await asyncio.shield(self._facts)
        if self._rendezvous_port.done() or self._over.is_set():
            raise UnavailableError("the engine has all its nodes")
        if node.rank not in self._ranks:
            self._refuse(f"node {node.rank} of {len(self._ranks) + 1} nodes", node)
        if different := differences(facts, node.facts, rank=node.rank):
            self._refuse("; ".join(different), node)
        if node.rank in self._joined:
            raise ConflictError(
                f"node {node.rank} is there already: {self._joined[node.rank].host}"
            )
        self._joined[node.rank] = node
        log.info("node_joined", node_rank=node.rank, host=node.host, missing=self.missing)
        self._changed.set()

    def _refuse(self, difference: str, node: Node) -> None:
        self._difference = f"{node.host}: {difference}"
        self._changed.set()
        raise InvalidRequestError(difference)

    async def begun(self) -> int:
        """Return the rendezvous port, when the engine begins."""
        return await asyncio.shield(self._rendezvous_port)

    async def over(self) -> None:
        """Return when the engine ends."""
        await self._over.wait()

    def leave(self, node: Node) -> None:
        """Take note that a node has gone; one that is not there changes nothing."""
        if self._joined.get(node.rank) is not node:
            return
        del self._joined[node.rank]
        if not self._rendezvous_port.done():
            log.info("node_left", node_rank=node.rank, host=node.host, missing=self.missing)
        elif not self._over.is_set():
            log.error("node_lost", node_rank=node.rank, host=node.host)
            self.lost.set()
