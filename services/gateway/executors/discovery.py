"""Where executors are found, beside addresses that are stated."""

import asyncio
import socket
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from services.kit.errors import UnavailableError

RESOLVE_TIMEOUT_S = 4.0
NOWHERE = frozenset({socket.EAI_NONAME, getattr(socket, "EAI_NODATA", socket.EAI_NONAME)})

# Takes a host's name and a port; returns addresses as "host:port". Raises UnavailableError if
# nothing is known of the name for now.
Resolver: TypeAlias = Callable[[str, int], Awaitable[Collection[str]]]


@dataclass(frozen=True, slots=True)
class Place:
    """Where an executor is said to be."""

    address: str  # "host:port"
    server_name: str = ""  # that its certificate must bear; empty: the address' own
    outlasts: bool = False  # the link stays while connected, though its source has it no more


class Source(Protocol):
    """Tells where executors are at the moment."""

    @property
    def name(self) -> str:
        """Return what settings call it."""

    async def places(self) -> Collection[Place]:
        """Return all. Raises ServiceError if that is not known: links stay as they are."""


async def resolve(host: str, port: int) -> Collection[str]:
    """Return a name's addresses as the system finds them: of one family, or an executor that has
    an address of each would be two. None, if there is no such name.
    """
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(RESOLVE_TIMEOUT_S):
            found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        if error.errno in NOWHERE:
            return ()
        raise UnavailableError(error.strerror or str(error)) from error
    except UnicodeError:  # no name of a host: a part of it is empty, or too long
        return ()
    except TimeoutError:
        raise UnavailableError("the name was not resolved in time") from None
    family = min(entry[0] for entry in found)
    hosts = {str(entry[4][0]) for entry in found if entry[0] == family}
    return {f"[{one}]:{port}" if ":" in one else f"{one}:{port}" for one in hosts}


class DnsSource:
    """The addresses of a name, such as a headless Service has: one for each executor."""

    def __init__(self, host: str, port: int, *, resolver: Resolver) -> None:
        self._host, self._port = host, port
        self._resolver = resolver

    @property
    def name(self) -> str:
        return f"dns:{self._host}:{self._port}"

    async def places(self) -> Collection[Place]:
        addresses = await self._resolver(self._host, self._port)
        return [Place(address, server_name=self._host) for address in addresses]
