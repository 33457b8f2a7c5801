"""`python -m tests.tick_server KEEPALIVE_S`: prints its port, streams bytes to whoever asks."""

import asyncio
import sys
from collections.abc import AsyncIterator

import grpc

from services.kit.rpc import Context
from services.kit.server import ServiceServer
from services.kit.transport import Transport

METHOD = "/evenflow.tests.Ticks/Watch"


async def ticks(request: bytes, context: Context) -> AsyncIterator[bytes]:
    while True:
        yield b"tick" * 50
        await asyncio.sleep(0.01)


async def main(keepalive_s: float) -> None:
    server = ServiceServer("127.0.0.1:0", [], transport=Transport(keepalive_s=keepalive_s))
    _, service, method = METHOD.split("/")
    watch = grpc.unary_stream_rpc_method_handler(ticks)
    handler = grpc.method_handlers_generic_handler(service, {method: watch})
    server.grpc.add_generic_rpc_handlers([handler])
    await server.start()
    print(server.port, flush=True)
    await server.grpc.wait_for_termination()


if __name__ == "__main__":
    asyncio.run(main(float(sys.argv[1])))
