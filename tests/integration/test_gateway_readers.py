"""Readers that stop reading: generation is held, goes on, or is given up. Real sockets."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from evenflow.gateway.v1 import gateway_pb2 as pb
from evenflow.gateway.v1 import gateway_pb2_grpc as pb_grpc
from evenflow.gateway.v1 import generation_pb2 as gen
from tests.fake_executor import EVENT_TIMEOUT_S, MODEL, FakeExecutor, Script
from tests.gateways import Client, chat_body, gateway_for, stream_body, until

# Far more bytes than the sockets on the way take.
NUM_TOKENS = 600
TEXTS = [f"<{number}>".ljust(8_192, "x") for number in range(NUM_TOKENS)]
RECEIVE_BUFFER_BYTES = 64 << 10
MAX_UNDELIVERED_TOKENS = 16
NAME = "slow"


@pytest.fixture
async def executor() -> AsyncIterator[FakeExecutor]:
    executor = FakeExecutor()
    executor.script = Script(texts=TEXTS, interval_s=0.001)  # a hold is in time for most of them
    await executor.start()
    yield executor
    await executor.kill()


def gateway_over(executor: FakeExecutor, *, reader_timeout_s: float = 300.0):
    return gateway_for(
        executor,
        max_undelivered_tokens=MAX_UNDELIVERED_TOKENS,
        reader_timeout_s=reader_timeout_s,
    )


@asynccontextmanager
async def http_reader(client: Client) -> AsyncIterator[asyncio.StreamReader]:
    """Ask for a streamed answer through a socket that takes little, and read nothing of it yet."""
    body = json.dumps(stream_body()).encode()
    with socket.create_connection(("127.0.0.1", client.gateway.http_port)) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER_BYTES)
        connection.setblocking(False)
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nhost: test\r\nx-request-id: {NAME}\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n"
            "connection: close\r\n\r\n"
        )
        await asyncio.get_running_loop().sock_sendall(connection, head.encode() + body)
        reader, writer = await asyncio.open_connection(sock=connection.dup(), limit=1 << 15)
        reader._transport.pause_reading()  # type: ignore[attr-defined]
        try:
            yield reader
        finally:
            writer.close()


def resume(reader: asyncio.StreamReader) -> None:
    reader._transport.resume_reading()  # type: ignore[attr-defined]


async def rest_of(reader: asyncio.StreamReader) -> str:
    resume(reader)
    return (await asyncio.wait_for(reader.read(), EVENT_TIMEOUT_S)).decode()


async def test_a_reader_that_stops_has_generation_held_and_loses_nothing(executor) -> None:
    async with gateway_over(executor) as client:
        await client.wait_ready()
        async with http_reader(client) as reader:
            await executor.until(lambda: executor.holds == [(NAME, True)])
            answer = await rest_of(reader)

    assert executor.aborted == []
    # Held and let go in turn: nobody is left held.
    assert executor.holds == [(NAME, True), (NAME, False)] * (len(executor.holds) // 2)
    events = [line for line in answer.splitlines() if line.startswith("data: {")]
    choices = [json.loads(event.removeprefix("data: "))["choices"][0] for event in events]
    assert "".join(c["delta"].get("content", "") for c in choices) == "".join(TEXTS)
    assert choices[-1]["finish_reason"] == "stop"


async def test_a_held_reader_gets_no_more_than_the_bound_and_what_is_under_way(executor) -> None:
    async with gateway_over(executor) as client:
        await client.wait_ready()
        async with http_reader(client):
            await executor.until(lambda: executor.holds == [(NAME, True)])

            # The rest of the answer stays with the executor.
            assert not executor.session.tasks[NAME].done()
            assert executor.delivered.get(NAME, 0) + MAX_UNDELIVERED_TOKENS < NUM_TOKENS


async def test_a_reader_that_stays_away_is_given_up_and_told_so(executor) -> None:
    async with gateway_over(executor, reader_timeout_s=0.3) as client:
        await client.wait_ready()
        async with http_reader(client) as reader:
            await executor.until(lambda: executor.aborted == [NAME])
            await client.wait_idle()
            answer = await rest_of(reader)

    *_, last = [line for line in answer.splitlines() if line.startswith("data: ")]
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "reader_timeout"


async def test_a_reader_that_takes_its_time_is_not_given_up(executor) -> None:
    """Each pause is shorter than the timeout, all together are longer."""
    timeout_s = 2.0
    async with gateway_over(executor, reader_timeout_s=timeout_s) as client:
        await client.wait_ready()
        async with http_reader(client) as reader:
            resume(reader)
            for _ in range(6):
                await reader.readexactly(1 << 18)
                await asyncio.sleep(timeout_s / 4)
            answer = await rest_of(reader)

    assert executor.aborted == []
    assert answer.rstrip("\r\n0").endswith("data: [DONE]")


async def test_over_grpc_a_reader_that_stops_is_held_and_given_up(executor) -> None:
    async with gateway_over(executor, reader_timeout_s=0.3) as client:
        await client.wait_ready()
        call = pb_grpc.GatewayServiceStub(client.channel).Chat(
            pb.ChatRequest(model=MODEL, messages=[gen.ChatMessage(role="user", content="Hi")]),
            metadata=(("x-request-id", NAME),),
        )
        await executor.until(lambda: (NAME, True) in executor.holds)
        await executor.until(lambda: executor.aborted == [NAME])
        await client.wait_idle()
        call.cancel()


async def test_a_whole_answer_is_never_held(executor) -> None:
    async with gateway_over(executor) as client:
        await client.wait_ready()
        response = await client.http.post(
            "/v1/chat/completions", json=chat_body(), headers={"x-request-id": NAME}
        )
        await until(lambda: client.gateway.dispatcher.num_live == 0)

    assert response.json()["choices"][0]["message"]["content"] == "".join(TEXTS)
    assert executor.holds == [] or executor.holds[-1] == (NAME, False)
