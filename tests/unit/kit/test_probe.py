"""The health probe says nothing about a process that serves, and why about any other."""

from services.kit.server import ServiceServer
from tests.probing import probed


async def test_the_probe_follows_the_servers_health() -> None:
    server = ServiceServer("127.0.0.1:0", [])
    address = f"127.0.0.1:{server.port}"
    await server.start()
    starting = await probed(address)
    await server.mark_serving()
    serving = await probed(address)
    await server.drain(0)
    gone = await probed(address)

    assert starting == (1, f"{address}: NOT_SERVING\n")
    assert serving == (0, "")
    assert gone[0] == 1
    assert "UNAVAILABLE" in gone[1]
