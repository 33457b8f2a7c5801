"""The links to all executors, which come and go."""

import asyncio
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import combinations
from types import MappingProxyType

import structlog

from services.gateway.executors.discovery import Place, Source
from services.gateway.executors.link import ExecutorLink
from services.kit.errors import ServiceError

log = structlog.get_logger()

LOOK_INTERVAL_S = 5.0  # between two looks at where executors are


class Fleet:
    """Keeps a link to each executor while `run` runs.

    An executor that is not found any more gets no new request; its link ends once it has nothing
    in hand, or is lost. While a source does not answer, the links that it brought stay.
    """

    def __init__(
        self,
        stated: Iterable[str],
        sources: Sequence[Source],
        *,
        make_link: Callable[[Place], ExecutorLink],
        changed: Callable[[], None],
    ) -> None:
        """`stated` are addresses that are always there. `changed` is called when links have come or
        gone.
        """
        self._stated = tuple(map(Place, stated))
        self._found: dict[Source, Collection[Place]] = dict.fromkeys(sources, ())
        self._told: dict[Source, str] = {}  # what was logged last of each source
        self._make_link, self._changed = make_link, changed
        self._links = {place.address: make_link(place) for place in self._stated}
        self._outlasting: Sequence[Place] = ()  # those of connected links that outlast their places
        self._running: dict[str, asyncio.Task[None]] = {}
        self._warned: set[tuple[str, str, str]] = set()
        self.links: Mapping[str, ExecutorLink] = MappingProxyType(self._links)  # by address, live

    async def run(self) -> None:
        """Look for executors, and follow them, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            self._follow(tasks)
            while True:
                await asyncio.gather(*map(self._look, self._found))
                self._follow(tasks)
                self._compare()
                await asyncio.sleep(LOOK_INTERVAL_S)

    async def _look(self, source: Source) -> None:
        """Ask a source, and say so once when what it answers is news."""
        try:
            places, problem = await source.places(), ""
        except ServiceError as error:
            places, problem = self._found[source], str(error)
        except Exception as error:
            log.exception("discovery_crashed", source=source.name)
            places, problem = self._found[source], type(error).__name__
        self._found[source] = places
        addresses = sorted(place.address for place in places)
        told = problem or ",".join(addresses)
        if self._told.get(source) == told:
            return
        self._told[source] = told
        if problem or not addresses:
            log.warning(
                "executors_not_found", source=source.name, detail=problem or "none is there"
            )
        else:
            log.info("executors_found", source=source.name, addresses=addresses)

    def _follow(self, tasks: asyncio.TaskGroup) -> None:
        """Have a link for each place, and none for others once they are idle."""
        found = [*(one for places in self._found.values() for one in places), *self._stated]
        found.sort(key=lambda place: bool(place.server_name))  # what a certificate bears counts
        places = {one.address: one for one in found}
        places |= {one.address: one for one in self._outlasting if one.address not in places}
        self._outlasting = [
            one
            for one in places.values()
            if one.outlasts and (link := self._links.get(one.address)) and link.info is not None
        ]
        for address, place in places.items():
            link = self._links.get(address) or self._make_link(place)
            self._links[address] = link
            link.is_gone = False
            if address not in self._running:
                self._running[address] = tasks.create_task(link.run(), name=f"link-{address}")
        for address in self._links.keys() - places.keys():
            link = self._links[address]
            if not link.is_gone:
                link.is_gone = True
                log.info("executor_gone", address=address)
                self._changed()
            if link.is_idle:
                del self._links[address]
                self._running.pop(address).cancel()

    def _compare(self) -> None:
        """Warn, once, of executors that should be alike and are not, or seem to be one."""
        found = set(contradictions(self._links.values()))
        for one, other, differs in sorted(found - self._warned):
            log.warning("executors_contradict", addresses=[one, other], differs=differs)
        self._warned = found


def contradictions(links: Iterable[ExecutorLink]) -> Iterator[tuple[str, str, str]]:
    """Yield pairs of addresses, and what differs."""
    connected = [(link.address, link.info) for link in links if link.info is not None]
    connected.sort(key=lambda pair: pair[0])
    for (one, first), (other, second) in combinations(connected, 2):
        if first.executor_id == second.executor_id:
            yield one, other, f"the address alone: both are {first.executor_id}"
        if first.model == second.model and first.fingerprint != second.fingerprint:
            differs = f"{first.fingerprint or 'none'}, {second.fingerprint or 'none'}"
            yield one, other, f"the fingerprint of {first.model}: {differs}"
