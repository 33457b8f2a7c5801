"""A client of resumable streams that leaves and comes back."""

import random
import re
from dataclasses import dataclass, field

import httpx

from tests.gateways import Client

GONE, NOTHING_MORE = 410, 204


@dataclass
class Reading:
    """What one client has of a stream: whole events, as an `EventSource` takes them."""

    client: Client
    request_id: str
    events: list[bytes] = field(default_factory=list)
    num_cuts: int = 0

    @property
    def last_event_id(self) -> str:
        """Return the id of the last event; empty before the first."""
        return event_id(self.events[-1]) if self.events else ""

    @property
    def text(self) -> bytes:
        return b"".join(self.events)

    async def begin(self, path: str, body: dict[str, object], num_events: int) -> None:
        """Ask, and leave after so many events, if there are."""
        headers = {"x-request-id": self.request_id}
        async with self.client.http.stream("POST", path, json=body, headers=headers) as answer:
            assert answer.status_code == 200, await answer.aread()
            await self._take(answer, num_events)

    async def go_on(self, num_events: int) -> bool:
        """Come back, and leave after so many more events. Returns whether that was all."""
        headers = {"last-event-id": self.last_event_id} if self.events else {}
        path = f"/v1/streams/{self.request_id}"
        async with self.client.http.stream("GET", path, headers=headers) as answer:
            if answer.status_code == NOTHING_MORE:
                return True
            assert answer.status_code == 200, await answer.aread()
            return await self._take(answer, num_events)

    async def finish(self, draws: random.Random, most: int) -> None:
        """Come back and leave at random until all is there."""
        while not await self.go_on(draws.randint(0, most)):
            pass

    async def _take(self, answer: httpx.Response, num_events: int) -> bool:
        """Take so many events; what comes after them was lost on its way. Returns whether the
        stream ended before.
        """
        unread, most = b"", len(self.events) + num_events
        if not num_events:
            self.num_cuts += 1
            return False
        async for piece in answer.aiter_bytes():
            *events, unread = (unread + piece).split(b"\n\n")
            for event in events:
                if not event.startswith(b":"):
                    self.events.append(event + b"\n\n")
                if len(self.events) == most:
                    self.num_cuts += 1
                    return False
        assert not unread
        return True


def event_id(event: bytes) -> str:
    (found,) = re.findall(rb"^id: (.+)$", event, re.MULTILINE)
    return str(found.decode())


def without_times(said: bytes) -> bytes:
    return re.sub(rb'("created\w*"):\d+', rb"\1:0", said)


def without_moves(said: bytes) -> bytes:
    return re.sub(rb',"evenflow":\{"moves":[^}]*\}', b"", without_times(said))


def by_answer(said: bytes) -> list[bytes]:
    """Return the events without ids, those of each answer together: the others may come between
    them otherwise in another run.
    """
    events = re.sub(rb"^id: .+\n", b"", without_times(said), flags=re.MULTILINE).split(b"\n\n")
    return sorted(events, key=_answer_of)


def _answer_of(event: bytes) -> int:
    found = re.search(rb'"choices":\[\{"index":(\d+)', event)
    return int(found[1]) if found else 1 << 30
