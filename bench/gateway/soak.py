"""Whether a gateway's memory levels off: many short streams, one after the other.

`python -m bench.gateway.soak MINUTES` prints a table of the gateway's resident memory over time.
One client in eight leaves before its stream ends.
"""

import asyncio
import re
import sys
import time
from collections.abc import AsyncIterator

import httpx
import psutil
import uvloop
from grpc import aio

from bench.gateway.processes import running, wait_until
from bench.gateway.sse_readers import request_for
from bench.gateway.streams import gateway_settings, is_ready
from bench.gateway.synthetic_executor import LENGTH, EnginelessExecutor
from evenflow.executor.v1 import executor_pb2 as pb
from evenflow.executor.v1 import executor_pb2_grpc as pb_grpc
from lab.stack.ports import free_port
from services.kit.rpc import Context

NUM_READERS = 64  # at a time
NUM_TOKENS = 20  # of each stream
RATE_TPS = 100.0
LEAVING_EVERY = 8
NUM_SAMPLES = 15
_FULL_COLLECTIONS = re.compile(r'python_gc_collections_total\{generation="2"\} (\S+)')


class PromptExecutor(EnginelessExecutor):
    """Answers each request at once, with all of its tokens."""

    async def Stream(  # noqa: N802
        self, requests: AsyncIterator[pb.StreamRequest], context: Context
    ) -> AsyncIterator[pb.StreamResponse]:
        sequence = 0
        async for request in requests:
            if request.WhichOneof("message") == "submit":
                yield _answer(request.submit.request_id, sequence)
                sequence += 1


def _answer(request_id: str, sequence: int) -> pb.StreamResponse:
    return pb.StreamResponse(
        sequence=sequence,
        accepted=[pb.Accepted(request_id=request_id, num_prompt_tokens=1)],
        outputs=[
            pb.RequestOutput(
                request_id=request_id,
                tokens=[pb.Token(id=1, text=" word")] * NUM_TOKENS,
                ending=LENGTH,
            )
        ],
    )


class Readers:
    """Keeps `NUM_READERS` streams open, each on a connection of its own."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._request = request_for(RATE_TPS)
        self.num_streams = 0  # so far

    async def read(self) -> None:
        """Read streams one after the other, until cancelled."""
        while True:
            reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
            writer.write(self._request)
            status = await reader.readuntil(b"\r\n")
            assert b" 200 " in status, status
            self.num_streams += 1
            leaves = self.num_streams % LEAVING_EVERY == 0
            await (reader.readuntil(b"data: ") if leaves else reader.read())
            writer.close()


async def soak(minutes: float) -> None:
    executor_port, port = free_port(), free_port()
    server = aio.server()
    pb_grpc.add_ExecutorServiceServicer_to_server(PromptExecutor(), server)
    server.add_insecure_port(f"127.0.0.1:{executor_port}")
    await server.start()
    # One that has left counts until the gateway has noticed.
    settings = gateway_settings(port, [executor_port], 2 * NUM_READERS)
    with running("services.gateway", settings=settings) as front:
        await asyncio.to_thread(wait_until, lambda: is_ready(port), "the gateway")
        readers, gateway = Readers(port), psutil.Process(front.pid)
        reading = [asyncio.create_task(readers.read()) for _ in range(NUM_READERS)]
        print("| minutes | streams | MiB | full collections |\n|---|---|---|---|", flush=True)
        start_s = time.monotonic()
        for _ in range(NUM_SAMPLES):
            await asyncio.sleep(minutes * 60 / NUM_SAMPLES)
            assert not any(task.done() for task in reading), "a reader has failed"
            elapsed_minutes = (time.monotonic() - start_s) / 60
            mebibytes = gateway.memory_info().rss / 2**20
            full = await _num_full_collections(port)
            print(
                f"| {elapsed_minutes:.1f} | {readers.num_streams:,} | {mebibytes:.1f} | {full} |",
                flush=True,
            )
        for task in reading:
            task.cancel()
        await asyncio.wait(reading)
    await server.stop(0)


async def _num_full_collections(port: int) -> int:
    async with httpx.AsyncClient() as client:
        metrics = (await client.get(f"http://127.0.0.1:{port}/metrics", timeout=30)).text
    found = _FULL_COLLECTIONS.search(metrics)
    assert found is not None
    return int(float(found[1]))


if __name__ == "__main__":
    uvloop.run(soak(float(sys.argv[1])))
