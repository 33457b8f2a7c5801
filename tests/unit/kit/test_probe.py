"""The health probe says nothing about a process that serves, and why about any other."""

import asyncio

from services.kit.probe import problem_of
from services.kit.server import ServiceServer


async def test_the_probe_follows_the_servers_health() -> None:
    server = ServiceServer("127.0.0.1:0", [])
    address = f"127.0.0.1:{server.port}"
    await server.start()
    starting = await asyncio.to_thread(problem_of, address)
    await server.mark_serving()
    serving = await asyncio.to_thread(problem_of, address)
    await server.drain(0)
    gone = await asyncio.to_thread(problem_of, address)

    assert (starting, serving) == ("NOT_SERVING", "")
    assert gone.startswith("UNAVAILABLE")
