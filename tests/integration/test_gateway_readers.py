"""Readers that stop reading: generation is held, goes on, or is given up. Real sockets."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager

import pytest

from evenflow.gateway.v1 import gateway_pb2 as pb
from evenflow.gateway.v1 import gateway_pb2_grpc as pb_grpc
from evenflow.gateway.v1 import generation_pb2 as gen
from tests.fake_executor import EVENT_TIMEOUT_S, MODEL, FakeExecutor, Script
from tests.gateways import Client, chat_body, gateway_for, stream_body, until
from tests.slow_reader import SlowReader, ask_and_wait, text_of

# Far more bytes than the sockets on the way take.
NUM_TOKENS = 600
TEXTS = [f"<{number}>".ljust(8_192, "x") for number in range(NUM_TOKENS)]
MAX_UNDELIVERED_TOKENS = 16
NAME = "slow"
REST_TIMEOUT_S = 600.0


class ReaderClock:
    """The time by which a gateway judges its readers: the test's to advance."""

    def __init__(self, client: Client) -> None:
        self.now_s = 0.0
        self._num_looks = 0
        self._dispatcher = client.gateway.dispatcher
        self._dispatcher._clock = self._read  # of requests to come

    async def advance(self, by_s: float) -> None:
        """Advance, and return when the gateway has looked at its readers since."""
        self._dispatcher._clock = self._look  # only the watch over readers reads this one
        self.now_s += by_s
        num_looks = self._num_looks
        await until(lambda: self._num_looks > num_looks)

    def _read(self) -> float:
        return self.now_s

    def _look(self) -> float:
        self._num_looks += 1
        return self.now_s


@pytest.fixture
async def executor() -> AsyncIterator[FakeExecutor]:
    executor = FakeExecutor()
    executor.script = Script(texts=TEXTS, interval_s=0.001)  # a hold is in time for most of them
    await executor.start()
    yield executor
    await executor.kill()


def gateway_over(
    executor: FakeExecutor, *, reader_timeout_s: float = 300.0
) -> AbstractAsyncContextManager[Client]:
    return gateway_for(
        executor,
        max_undelivered_tokens=MAX_UNDELIVERED_TOKENS,
        reader_timeout_s=reader_timeout_s,
    )


def slow_reader(client: Client) -> AbstractAsyncContextManager[SlowReader]:
    return ask_and_wait(client.gateway.http_port, stream_body(), request_id=NAME)


async def test_a_reader_that_stops_has_generation_held_and_loses_nothing(executor) -> None:
    async with gateway_over(executor) as client:
        await client.wait_ready()
        async with slow_reader(client) as reader:
            await executor.until(lambda: executor.holds[:1] == [(NAME, True)])
            *events, last = await reader.rest(REST_TIMEOUT_S)

    assert executor.aborted == []
    # Held and let go in turn: nobody is left held.
    assert executor.holds == [(NAME, True), (NAME, False)] * (len(executor.holds) // 2)
    assert text_of(events) == "".join(TEXTS)
    assert json.loads(events[-1])["choices"][0]["finish_reason"] == "stop"
    assert last == "[DONE]"


async def test_of_a_held_request_most_is_not_generated(executor) -> None:
    executor.script.midway.clear()
    async with gateway_over(executor) as client:
        await client.wait_ready()
        async with slow_reader(client):
            await executor.until(lambda: executor.holds[-1:] == [(NAME, True)])
            executor.script.midway.set()
            for _ in range(10):
                await client.http.get("/health")  # others are served meanwhile

            assert not executor.session.tasks[executor.session.ids[NAME]].done()
            assert executor.delivered.get(NAME, 0) + MAX_UNDELIVERED_TOKENS < NUM_TOKENS


@pytest.mark.logs("reader_stopped")
async def test_a_reader_that_stays_away_is_given_up_and_told_so(executor) -> None:
    async with gateway_over(executor, reader_timeout_s=0.3) as client:
        await client.wait_ready()
        async with slow_reader(client) as reader:
            await executor.until(lambda: executor.aborted == [NAME])
            await client.wait_idle()
            *_, last = await reader.rest(EVENT_TIMEOUT_S)

    assert json.loads(last)["error"]["code"] == "reader_timeout"


async def test_a_reader_that_takes_its_time_is_not_given_up(executor) -> None:
    """Each pause is shorter than the timeout, all together are longer."""
    timeout_s = 0.2
    async with gateway_over(executor, reader_timeout_s=timeout_s) as client:
        await client.wait_ready()
        clock = ReaderClock(client)
        async with slow_reader(client) as reader:
            await executor.until(lambda: executor.holds[:1] == [(NAME, True)])
            reader.resume()
            for _ in range(3):
                await read_until_a_batch_is_taken(client, reader)
                await clock.advance(0.8 * timeout_s)
            *_, last = await reader.rest(REST_TIMEOUT_S)

    assert executor.aborted == []
    assert last == "[DONE]"


async def read_until_a_batch_is_taken(client: Client, reader: SlowReader) -> None:
    """Read until the gateway has handed over more than before."""
    (live,) = client.gateway.dispatcher._live.values()
    generation = live.generation
    num_written = generation._record.num_written
    async with asyncio.timeout(EVENT_TIMEOUT_S):
        while generation._record.num_written == num_written:
            await reader.reader.readexactly(1 << 13)
            await asyncio.sleep(0)  # the gateway's turn


async def test_over_grpc_a_reader_that_stops_is_held_and_given_up(executor) -> None:
    timeout_s = 0.3
    async with gateway_over(executor, reader_timeout_s=timeout_s) as client:
        await client.wait_ready()
        clock = ReaderClock(client)
        call = pb_grpc.GatewayServiceStub(client.channel).Chat(
            pb.ChatRequest(model=MODEL, messages=[gen.ChatMessage(role="user", content="Hi")]),
            metadata=(("x-request-id", NAME),),
        )
        await executor.until(lambda: (NAME, True) in executor.holds)
        assert executor.aborted == []
        while not executor.aborted:  # once the windows on the way are full
            await clock.advance(timeout_s)
            await client.http.get("/health")
        assert executor.aborted == [NAME]
        await client.wait_idle()
        call.cancel()


async def test_a_whole_answer_is_never_held_for_long(executor) -> None:
    executor.script = Script(texts=TEXTS)  # all at once
    async with gateway_over(executor) as client:
        await client.wait_ready()
        response = await client.http.post(
            "/v1/chat/completions", json=chat_body(), headers={"x-request-id": NAME}
        )
        await until(lambda: client.gateway.dispatcher.num_live == 0)

    assert response.json()["choices"][0]["message"]["content"] == "".join(TEXTS)
    assert executor.holds == [] or executor.holds[-1] == (NAME, False)
