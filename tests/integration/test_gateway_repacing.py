"""`PATCH /v1/streams/{id}` and gRPC's ChangePace: the pace of a stream that runs."""

import asyncio
import time
from typing import Any

import grpc
import pytest
from grpc import aio

from evenflow.gateway.v1 import gateway_pb2 as pb
from evenflow.gateway.v1 import gateway_pb2_grpc as pb_grpc
from tests.fake_executor import FakeExecutor, Script
from tests.gateways import Client, chat_body, gateway_for, stream_body, until

CHAT = "/v1/chat/completions"
NAME = {"x-request-id": "slow-one"}
SLOW, FAST = {"consumption_rate_tps": 0.5}, {"consumption_rate_tps": 1000.0}
PATH = "/v1/streams/slow-one"
NUM_TOKENS = 12
KEYS = "".join(
    f'[[keys]]\nname = "{name}"\nkey = "a-good-key-of-{name}-{"x" * 20}"\nmin_slo_tbt_s = 0.01\n'
    for name in ("alice", "bob")
)


def of(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer a-good-key-of-{name}-{'x' * 20}"}


@pytest.fixture
def executor(executor: FakeExecutor) -> FakeExecutor:
    executor.script = Script(texts=["word "] * NUM_TOKENS)
    return executor


async def read(client: Client, begun: asyncio.Event, **body: Any) -> int:
    """Read a stream to its end; return how many events had text."""
    num_texts = 0
    asked = stream_body(**body)
    async with client.http.stream("POST", CHAT, json=asked, headers=NAME) as response:
        async for line in response.aiter_lines():
            num_texts += '"content":"word ' in line
            if num_texts:
                begun.set()
    return num_texts


async def test_a_stream_that_would_take_a_minute_ends_at_once_when_its_pace_is_raised(
    client: Client, executor: FakeExecutor
) -> None:
    executor.script.ending.clear()
    begun, began_s = asyncio.Event(), time.monotonic()
    reading = asyncio.create_task(read(client, begun, evenflow={**SLOW, "pace_tail": True}))
    await begun.wait()

    response = await client.http.patch(PATH, json=FAST)

    await executor.until(lambda: bool(executor.paces))
    executor.script.ending.set()
    assert response.json() == {"id": "slow-one", "slo_tpot_ms": None, "slo_tbt_ms": None, **FAST}
    assert await reading == NUM_TOKENS
    assert time.monotonic() - began_s < 2 * (NUM_TOKENS - 1)  # at its first pace
    assert [pace.service_level.consumption_rate_tps for pace in executor.paces] == [1_000.0]
    assert executor.paces[0].service_level.pace_tail


async def test_a_pace_can_be_set_where_there_was_none_changed_in_part_and_taken_off(
    client: Client, executor: FakeExecutor
) -> None:
    executor.script.midway.clear()
    begun = asyncio.Event()
    reading = asyncio.create_task(read(client, begun))
    await begun.wait()

    told = []
    for change in (
        {"consumption_rate_tps": 5.0, "slo_tpot_ms": 300.0},
        {"slo_tbt_ms": 250.0},
        {"consumption_rate_tps": 0, "slo_tbt_ms": 0, "slo_tpot_ms": 0.0},
        {"consumption_rate_tps": None},
    ):
        response = await client.http.patch(PATH, json=change)
        assert response.status_code == 200
        told.append([response.json()[name] for name in ("consumption_rate_tps", "slo_tbt_ms")])
    executor.script.midway.set()

    assert told == [[5.0, None], [5.0, 250.0], [None, None], [None, None]]
    assert await reading == NUM_TOKENS
    assert not executor.paces[-1].service_level.ListFields()


@pytest.mark.parametrize(
    ("change", "status", "parameter"),
    [
        ({"consumption_rate_tps": 0.4}, 400, "consumption_rate_tps"),
        ({"slo_tbt_ms": 0.5}, 400, "slo_tbt_ms"),
        ({"consumption_rate_tps": 2.0, "slo_tbt_ms": 100.0}, 400, "consumption_rate_tps"),
        ({"slo_ttft_ms": 100.0}, 400, "slo_ttft_ms"),
    ],
)
async def test_what_is_out_of_range_changes_nothing(
    client: Client, executor: FakeExecutor, change, status, parameter
) -> None:
    executor.script.midway.clear()
    begun = asyncio.Event()
    reading = asyncio.create_task(read(client, begun))
    await begun.wait()

    response = await client.http.patch(PATH, json=change)

    assert (response.status_code, response.json()["error"]["param"]) == (status, parameter)
    executor.script.midway.set()
    await reading
    assert executor.paces == []


async def test_only_a_stream_that_runs_and_is_the_caller_s_has_a_pace_to_change(
    executor: FakeExecutor, tmp_path
) -> None:
    (tmp_path / "keys.toml").write_text(KEYS)
    executor.script.ending.clear()
    async with gateway_for(executor, api_keys_file=tmp_path / "keys.toml") as client:
        await client.wait_ready()
        headers = NAME | of("alice")
        for body in (stream_body(), chat_body()):
            asking = asyncio.create_task(client.http.post(CHAT, json=body, headers=headers))
            await until(lambda: client.num_generated() == [NUM_TOKENS])
            seen = [
                (await client.http.patch(PATH, json=change, headers=of(name))).status_code
                for name, change in (("bob", {}), ("alice", FAST), ("alice", SLOW))
            ]
            # The key may not have 1 ms between two tokens; a whole answer has no pace.
            assert seen == ([404, 400, 200] if "stream" in body else [404, 404, 404])
            executor.script.ending.set()
            await asking
            await client.wait_idle()
            executor.script.ending.clear()
        assert (await client.http.patch(PATH, json=FAST, headers=of("alice"))).status_code == 404
        assert (await client.http.patch(PATH, json=FAST)).status_code == 401


async def test_grpc_changes_it_too(client: Client, executor: FakeExecutor) -> None:
    stub = pb_grpc.GatewayServiceStub(client.channel)
    begun = asyncio.Event()
    reading = asyncio.create_task(read(client, begun, evenflow={**SLOW, "pace_tail": True}))
    await begun.wait()

    for change, interval_s in (({"slo_tpot_s": 3.0}, 2.0), ({"consumption_rate_tps": 0}, 3.0)):
        asked = pb.ChangePaceRequest(request_id="slow-one", **change)
        assert (await stub.ChangePace(asked)).release_interval_s == interval_s
    await stub.ChangePace(pb.ChangePaceRequest(request_id="slow-one", slo_tpot_s=0))

    assert await reading == NUM_TOKENS
    for asked, code in (
        (pb.ChangePaceRequest(request_id="slow-one"), grpc.StatusCode.NOT_FOUND),
        (pb.ChangePaceRequest(), grpc.StatusCode.INVALID_ARGUMENT),
    ):
        with pytest.raises(aio.AioRpcError) as refused:
            await stub.ChangePace(asked)
        assert refused.value.code() is code
