"""Several gateways, as clients behind a load balancer find them."""

import asyncio
import itertools
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import httpx

from bench.failover.asked import Asked, Got, ask
from bench.gateway.heavy_requests import Edge

LOOK_INTERVAL_S, LOOK_TIMEOUT_S = 0.25, 2.0  # for which gateways are ready
PATIENCE_S = 60.0  # of a client that no gateway takes


@dataclass(slots=True, kw_only=True)
class Answer:
    """What became of one request."""

    asked: Asked
    expected: Got
    began_s: float
    ended_s: float = 0.0
    got: Got = field(default_factory=Got)
    refusals: list[str] = field(default_factory=list)  # before a gateway took it
    num_times_by_all: int = 0  # that gateways refused it one after the other
    url: str = ""  # of the gateway that was asked last

    @property
    def is_identical(self) -> bool:
        return not self.got.error and self.got.said == self.expected.said

    def overlaps(self, began_s: float, ended_s: float) -> bool:
        return self.began_s <= ended_s and began_s <= self.ended_s


class Doors:
    """The gateways, as a load balancer has them."""

    def __init__(self, edges: Sequence[Edge]) -> None:
        self._edges = edges
        self._ready = list(edges)
        self._turns = itertools.count()

    async def look(self) -> None:
        """Look which gateways are ready, until cancelled."""
        async with httpx.AsyncClient(timeout=LOOK_TIMEOUT_S) as client:
            while True:
                ready = [edge for edge in self._edges if await _is_ready(client, edge)]
                self._ready = ready or list(self._edges)
                await asyncio.sleep(LOOK_INTERVAL_S)

    async def ask(self, asked: Asked, expected: Got, had: Got | None = None) -> Answer:
        """`had`: what the reader of an answer that is sent again has of it."""
        answer = Answer(asked=asked, expected=expected, began_s=time.time())
        while not answer.ended_s:
            for edge in self._in_turn():
                got = Got() if had is None else had.as_it_was()
                answer.url, answer.got = edge.url, await ask(edge, asked, got)
                if answer.got.is_taken:
                    break
                answer.refusals.append(f"{edge.url}: {answer.got.error}")
            else:
                answer.num_times_by_all += 1
                await asyncio.sleep(LOOK_INTERVAL_S)
            if answer.got.is_taken or time.time() - answer.began_s > PATIENCE_S:
                answer.ended_s = time.time()
        return answer

    def _in_turn(self) -> list[Edge]:
        """Return those that are ready, by turns, and then the others."""
        turn = next(self._turns) % len(self._ready)
        others = [edge for edge in self._edges if edge not in self._ready]
        return [*self._ready[turn:], *self._ready[:turn], *others]


async def _is_ready(client: httpx.AsyncClient, edge: Edge) -> bool:
    with suppress(httpx.TransportError):
        return (await client.get(f"{edge.url}/ready")).is_success
    return False
