"""What a gateway tells of what holds the KV of its executors, and to whom."""

import asyncio
from pathlib import Path

import pytest

from cli.client.endpoint import RefusedError, endpoint_at
from cli.client.kv_holders import read_holders
from evenflow.executor.v1 import executor_pb2 as pb
from services.kit.rpc import own_request_id
from tests.fake_executor import MODEL, FakeExecutor
from tests.gateways import chat_body, gateway_for, until

URL, KV = "/v1/chat/completions", "/v1/evenflow/kv"
ALICE, ADMIN = "sk-alice-0123456789", "sk-admin-0123456789"
KEYS = f"""
[[keys]]
name = "alice"
key = "{ALICE}"

[[keys]]
name = "operator"
key = "{ADMIN}"
admin = true
"""
HOLDER = pb.Holder(account="alice", session_id="s", request_class="agent")
PARKED = pb.HoldingRequest(
    request_id=own_request_id("r"),
    holder=HOLDER,
    state=pb.REQUEST_STATE_PARKED,
    priority=2,
    why="no_room",
    why_text="there is no room for it yet",
    waited_s=1.5,
    num_host_tokens=96,
    num_recomputed_tokens=7,
)
SHARE = pb.HoldingShare(
    account="alice",
    request_class="agent",
    num_requests=1,
    num_waiting=1,
    num_host_tokens=96,
    num_recomputed_tokens=7,
)
COUNTED = pb.HoldingSession(
    account="alice",
    session_id="s",
    num_retained_tokens=64,
    num_pool_tokens=0,
    num_host_tokens=32,
    retained_for_s=9.5,
)
LARGE = pb.HoldingSession(account="alice", session_id="t", num_retained_tokens=640)


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def test_accounts_of_all_executors_are_joined(executor: FakeExecutor) -> None:
    other = FakeExecutor()
    await other.start()
    runs = pb.HoldingRequest(
        request_id=own_request_id("q"), state=pb.REQUEST_STATE_DECODING, num_pool_tokens=5
    )
    executor.holders = pb.GetKVHoldersResponse(
        requests=[PARKED],
        sessions=[COUNTED],
        shares=[SHARE],
        num_requests=1,
        num_sessions=1,
    )
    other.holders = pb.GetKVHoldersResponse(
        requests=[runs], sessions=[LARGE], shares=[SHARE], num_requests=9, num_sessions=8
    )
    try:
        async with gateway_for(executor, other) as client:
            await until(lambda: len(client.gateway.dispatcher.placing._candidates()) == 2)
            first, second = executor.address, other.address
            answer = await client.http.get(KV)
            cut = await client.http.get(KV, params={"limit": 1})
            by_command = await asyncio.to_thread(read_holders, endpoint_at(client.base_url))
            await other.kill()
            without = await client.http.get(KV)
    finally:
        await other.kill()

    told = answer.json()
    assert by_command == told
    assert {one["executor"]: one["num_requests"] for one in told["executors"]} == {
        first: 1,
        second: 9,
    }
    assert [one["request_id"] for one in told["requests"]] == ["q", "r"]
    assert told["requests"][1] == {
        "request_id": "r",
        "executor": first,
        "api_key": "alice",
        "session_id": "s",
        "request_class": "agent",
        "priority": 2,
        "state": "parked",
        "why": "no_room",
        "why_text": "there is no room for it yet",
        "waited_s": 1.5,
        "num_pool_tokens": 0,
        "num_host_tokens": 96,
        "num_shared_tokens": 0,
        "num_recomputed_tokens": 7,
    }
    (share,) = told["shares"]
    assert (share["num_requests"], share["num_host_tokens"]) == (2, 192)
    large, counted = told["sessions"]
    assert (large["session_id"], large["num_host_tokens"]) == ("t", None)
    assert counted["retained_for_s"] == 9.5
    assert (counted["num_pool_tokens"], counted["num_host_tokens"]) == (0, 32)
    assert len(cut.json()["requests"]) == len(cut.json()["sessions"]) == 1
    assert {one["executor"]: one["is_connected"] for one in without.json()["executors"]} == {
        first: True,
        second: False,
    }


async def test_an_admin_s_key_is_needed_where_keys_are(
    executor: FakeExecutor, tmp_path: Path
) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(KEYS)
    async with gateway_for(executor, api_keys_file=file) as client:
        await client.wait_ready()
        answers = {
            name: await client.http.get(KV, headers=bearer(key) if key else {})
            for name, key in (("admin", ADMIN), ("alice", ALICE), ("none", ""))
        }
        with pytest.raises(RefusedError, match="admin = true"):
            await asyncio.to_thread(read_holders, endpoint_at(client.base_url, ALICE))
        body = chat_body(session_id="s")
        await client.http.post(URL, json=body, headers=bearer(ALICE))

    assert {name: answer.status_code for name, answer in answers.items()} == {
        "admin": 200,
        "alice": 403,
        "none": 401,
    }
    assert answers["alice"].json()["error"]["code"] == "admin_key_needed"
    assert executor.submits[-1].holder == HOLDER


@pytest.mark.parametrize("limit", ["0", "-1", "1001", "x", "1.5", ""])
async def test_a_limit_is_a_number_in_its_range(client, limit: str) -> None:
    answer = await client.http.get(KV, params={"limit": limit})

    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "limit")


async def test_the_limit_reaches_the_executors(client, executor: FakeExecutor) -> None:
    for limit in ("1", "1000"):
        assert (await client.http.get(KV, params={"limit": limit})).status_code == 200
    await client.http.get(KV)

    assert executor.holder_limits == [1, 1_000, 100]


async def test_a_request_says_its_class(client, executor: FakeExecutor) -> None:
    asked = [{}, {"priority": 1}, {"evenflow": {"consumption_rate_tps": 5}, "stream": True}]
    for more in asked:
        await client.http.post(URL, json=chat_body(**more))

    classes = [submit.holder.request_class for submit in executor.submits]
    assert classes == ["unpaced", "batch", "paced"]
    assert executor.submits[0].model == MODEL
