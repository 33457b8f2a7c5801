"""Connections that promise a request and do not send it, beside streams that are read."""

import asyncio
import json

import pytest
from grpc import aio

from evenflow.gateway.v1 import gateway_pb2 as pb
from evenflow.gateway.v1 import gateway_pb2_grpc as pb_grpc
from tests.fake_executor import EVENT_TIMEOUT_S, MODEL, FakeExecutor, Script
from tests.gateways import Client, gateway_for, stream_body

HALF_OPEN = [
    b"",
    b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\n",
    b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100\r\n\r\n{",
]


async def time_until_end_s(client: Client, begin: bytes, *, after_s: float = 0.0) -> float:
    """Send the beginning of a request; return how long the gateway keeps the connection."""
    await asyncio.sleep(after_s)
    begun_s = asyncio.get_running_loop().time()
    reader, writer = await asyncio.open_connection("127.0.0.1", client.gateway.http_port)
    writer.write(begin)
    async with asyncio.timeout(EVENT_TIMEOUT_S):
        await reader.read()
    writer.close()
    return asyncio.get_running_loop().time() - begun_s


async def read_stream(client: Client, body: dict[str, object]) -> list[float]:
    """Return when each token of a stream came."""
    loop, times_s = asyncio.get_running_loop(), []
    async with client.http.stream("POST", "/v1/chat/completions", json=body) as response:
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                if event["choices"][0]["delta"].get("content"):
                    times_s.append(loop.time())
    return times_s


async def test_half_open_connections_end_and_streams_outlast_them(executor) -> None:
    """The stream is gRPC's: over HTTP a machine that stands still for 0.2 s would end it too."""
    executor.script.midway.clear()
    limits = {"http_head_timeout_s": 0.2, "http_body_timeout_s": 0.2}
    async with gateway_for(executor, **limits) as client:
        await client.wait_ready()
        request = pb.GenerateRequest(model=MODEL, text="Hi")
        stream = pb_grpc.GatewayServiceStub(client.channel).Generate(request)
        responses = [await stream.read()]

        await asyncio.gather(*(time_until_end_s(client, begin) for begin in HALF_OPEN * 20))
        executor.script.midway.set()
        while (response := await stream.read()) is not aio.EOF:
            responses.append(response)

    texts = [token.text for response in responses for token in response.tokens]
    assert texts == list(executor.script.texts)


@pytest.mark.nightly
async def test_three_hundred_half_open_connections_end_in_time_and_disturb_no_stream() -> None:
    """Beside 256 streams of 2 tokens per second, whose client is in this process too."""
    alone_s, _ = await lateness_p99_s([])
    beside_s, longest_s = await lateness_p99_s(HALF_OPEN * 100)

    assert longest_s < 20  # of which the timeout is 10
    assert beside_s < 2 * alone_s + 1.0


async def lateness_p99_s(half_open: list[bytes]) -> tuple[float, float]:
    """Return how late tokens of streams came, and for how long a connection was kept at most."""
    executor, interval_s, num_tokens = FakeExecutor(), 0.5, 24
    executor.script = Script(texts=["x"] * num_tokens)
    executor.script.generating.clear()
    await executor.start()
    limits = {"http_head_timeout_s": 10.0, "http_body_timeout_s": 10.0}
    async with gateway_for(executor, **limits) as client:
        await client.wait_ready()
        paced = {"consumption_rate_tps": 1 / interval_s, "pace_tail": True}
        body = stream_body(evenflow=paced)
        streams = [asyncio.create_task(read_stream(client, body)) for _ in range(256)]
        await executor.until(lambda: len(executor.submits) == 256)

        executor.script.generating.set()
        times_s = await asyncio.gather(
            *(
                time_until_end_s(client, begin, after_s=0.02 * number)
                for number, begin in enumerate(half_open)
            )
        )
        arrivals_s = await asyncio.gather(*streams)
    await executor.kill()

    late_s = sorted(
        at_s - stream_s[0] - k * interval_s
        for stream_s in arrivals_s
        for k, at_s in enumerate(stream_s)
    )
    assert len(late_s) == 256 * num_tokens
    return late_s[int(0.99 * len(late_s))], max(times_s, default=0.0)
