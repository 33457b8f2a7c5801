"""vLLM tells which blocks of its own prefix cache come and go, to whoever chooses pods by them."""

import asyncio
from collections.abc import Iterator

import pytest
import zmq
import zmq.asyncio
from vllm.distributed.kv_events import BlockStored, KVEventBatch
from vllm.v1.serial_utils import MsgpackDecoder

from evenflow.gateway.v1 import generation_pb2 as gen
from lab.executor_client import ANSWER_TIMEOUT_S, GatewayStream
from lab.stack.executor_process import ExecutorProcess

pytestmark = pytest.mark.timeout(3_600)


@pytest.fixture
def executor(plain_executor: ExecutorProcess) -> ExecutorProcess:
    return plain_executor


@pytest.fixture
def listener(executor: ExecutorProcess) -> Iterator[zmq.asyncio.Socket]:
    endpoint = str(executor.settings["KV_EVENTS_ENDPOINT"]).replace("*", "127.0.0.1")
    with zmq.asyncio.Context() as context, context.socket(zmq.SUB) as listener:
        listener.setsockopt(zmq.LINGER, 0)
        listener.setsockopt(zmq.SUBSCRIBE, b"kv@")
        listener.connect(endpoint)
        yield listener


async def heard(listener: zmq.asyncio.Socket) -> tuple[bytes, BlockStored]:
    """Return what has been computed for the first time, and under which topic."""
    decoder = MsgpackDecoder(KVEventBatch)
    while True:
        topic, _, payload = await listener.recv_multipart()
        for event in decoder.decode(payload).events:
            if isinstance(event, BlockStored):
                return topic, event


async def test_a_listener_hears_of_the_blocks_of_prompts(
    gateway: GatewayStream, listener: zmq.asyncio.Socket
) -> None:
    hearing = asyncio.create_task(heard(listener))
    number = 0
    async with asyncio.timeout(ANSWER_TIMEOUT_S):
        while not hearing.done():  # what is told before it is connected is told to nobody
            number += 1
            prompt = list(range(100 + number, 400 + number))
            asked = {"token_ids": gen.TokenIds(ids=prompt), "sampling": {"max_tokens": 1}}
            await gateway.ask(f"events-{number}", **asked)
            await asyncio.wait([hearing], timeout=0.2)
        topic, event = await hearing

    assert topic == b"kv@127.0.0.1@exactness"
    first = event.token_ids[0]
    assert event.token_ids == list(range(first, first + len(event.token_ids)))
    assert len(event.block_hashes) == len(event.token_ids) // event.block_size > 0
