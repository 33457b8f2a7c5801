"""The gateway as the process that an operator runs."""

import asyncio
import os
import signal
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from lab.stack.ports import free_port
from tests.fake_executor import FakeExecutor
from tests.gateways import stream_body

REPO = Path(__file__).parents[2]
TIMEOUT_S = 180.0
SERVICE = "evenflow.gateway.v1.GatewayService"
# What a gateway that drains gives its last events: 2 s are short on a busy machine.
PATIENT = "from services.gateway import app; app.CLOSE_MARGIN_S = 60; app.main()"

pytestmark = pytest.mark.timeout(1_200)


def environment(**settings: object) -> dict[str, str]:
    ours = {f"EVENFLOW_GATEWAY_{name.upper()}": str(value) for name, value in settings.items()}
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("EVENFLOW_")}
    return inherited | {"PYTHONPATH": f"{REPO}:{REPO / 'protos'}"} | ours


async def start(*command: str, stderr: int = DEVNULL, **settings: object) -> Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        *(command or ("-m", "services.gateway")),
        env=environment(**settings),
        cwd=REPO,
        stderr=stderr,
    )


@asynccontextmanager
async def running_gateway(
    executor: FakeExecutor, *command: str, **settings: Any
) -> AsyncIterator[tuple[Process, httpx.AsyncClient, int]]:
    """Yield the process, a client of its HTTP port, and its gRPC port, once it is ready."""
    http_port, grpc_port = free_port(), free_port()
    process = await start(
        *command,
        http_port=http_port,
        grpc_port=grpc_port,
        executors=executor.address,
        **({"tracker": "", "metrics_port": 0} | settings),
    )
    base_url = f"http://127.0.0.1:{http_port}"
    try:
        async with httpx.AsyncClient(base_url=base_url, timeout=TIMEOUT_S) as http:
            await until_ready(http)
            yield process, http, grpc_port
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def until_ready(http: httpx.AsyncClient) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        while True:
            try:
                if (await http.get("/ready")).status_code == 200:
                    return
            except httpx.TransportError:
                pass
            await asyncio.sleep(0.05)


async def until_keys_are_read(http: httpx.AsyncClient, key: str) -> int:
    """Return how often the gateway was asked for that."""
    headers = {"authorization": f"Bearer {key}"}
    num_asked = 1
    async with asyncio.timeout(TIMEOUT_S):
        while (await http.get("/v1/models", headers=headers)).status_code != 200:
            num_asked += 1
            await asyncio.sleep(0.05)
    return num_asked


async def exit_code(process: Process) -> int:
    async with asyncio.timeout(TIMEOUT_S):
        return await process.wait()


async def ends_or_says_not_serving(health: Any) -> bool:
    """Read the next of a watch, which a gateway that drains gives a second only."""
    try:
        update = await health.read()
    except aio.AioRpcError:
        return True
    return update is aio.EOF or update.status == health_pb2.HealthCheckResponse.NOT_SERVING


async def test_sigterm_lets_live_streams_end_and_then_exits(executor) -> None:
    executor.script.ending.clear()
    ids = [f"r{k}" for k in range(22)]
    async with (
        running_gateway(executor) as (process, http, grpc_port),
        aio.insecure_channel(f"127.0.0.1:{grpc_port}") as channel,
    ):
        health = health_pb2_grpc.HealthStub(channel).Watch(
            health_pb2.HealthCheckRequest(service=SERVICE), timeout=TIMEOUT_S
        )
        assert (await health.read()).status == health_pb2.HealthCheckResponse.SERVING
        streams = [
            asyncio.create_task(
                http.post("/v1/chat/completions", json=stream_body(), headers={"x-request-id": id})
            )
            for id in ids
        ]
        await executor.until(lambda: executor.delivered == dict.fromkeys(ids, 3))

        process.send_signal(signal.SIGTERM)
        assert await ends_or_says_not_serving(health)
        ready = await http.get("/ready")
        executor.script.ending.set()
        answers = await asyncio.gather(*streams)

        assert ready.status_code == 503
        assert all(answer.text.endswith("data: [DONE]\n\n") for answer in answers)
        assert await exit_code(process) == 0


async def test_sigterm_ends_a_stream_that_does_not_end(executor) -> None:
    executor.script.ending.clear()
    async with running_gateway(executor, "-c", PATIENT, drain_timeout_s=0.2) as (process, http, _):
        stream = asyncio.create_task(
            http.post("/v1/chat/completions", json=stream_body(), headers={"x-request-id": "r"})
        )
        await executor.until(lambda: executor.delivered.get("r", 0) == 3)

        process.send_signal(signal.SIGTERM)
        answer = await stream

        assert '"error"' in answer.text
        assert "[DONE]" not in answer.text
        assert await exit_code(process) == 0


async def test_the_process_serves_without_executor_and_tracker() -> None:
    http_port = free_port()
    process = await start(
        http_port=http_port,
        grpc_port=0,
        executors=f"127.0.0.1:{free_port()}",
        tracker=f"127.0.0.1:{free_port()}",
    )
    base_url = f"http://127.0.0.1:{http_port}"
    try:
        async with httpx.AsyncClient(base_url=base_url, timeout=TIMEOUT_S) as http:
            async with asyncio.timeout(TIMEOUT_S):
                while True:
                    try:
                        answer = await http.get("/health")
                        break
                    except httpx.TransportError:
                        await asyncio.sleep(0.05)
            refused = await http.post("/v1/chat/completions", json=stream_body())
        process.terminate()

        assert (answer.status_code, refused.status_code) == (200, 503)
        assert await exit_code(process) == 0
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def test_a_bad_setting_stops_the_process_with_its_name() -> None:
    process = await start(stderr=PIPE, executors="nowhere")
    async with asyncio.timeout(TIMEOUT_S):
        _, message = await process.communicate()

    assert process.returncode == 78
    assert b"EVENFLOW_GATEWAY_EXECUTORS" in message


async def test_no_key_and_no_text_of_a_request_is_logged(executor, tmp_path) -> None:
    good, wrong, prompt = "sk-good-0123456789", "sk-wrong-0123456789", "a prompt of mine"
    file = tmp_path / "keys.toml"
    file.write_text(f'[[keys]]\nname = "alice"\nkey = "{good}"\n')
    executor.script.texts = ("an answer ", "of yours")
    body = stream_body(messages=[{"role": "user", "content": prompt}])
    options = {"api_keys_file": file, "log_level": "debug", "stderr": PIPE}
    async with running_gateway(executor, **options) as (process, http, _):
        num_asked = await until_keys_are_read(http, good)
        statuses = [
            (await http.post("/v1/chat/completions", json=body, headers=headers)).status_code
            for headers in (
                {"authorization": f"Bearer {good}"},
                {"authorization": f"Bearer {wrong}"},
            )
        ]
        process.send_signal(signal.SIGTERM)
        _, logged = await process.communicate()

    assert statuses == [200, 401]
    assert logged.count(b"http_served") == num_asked + 2
    for text in (good, wrong, prompt, "an answer", "of yours"):
        assert text.encode() not in logged


async def test_metrics_have_a_port_of_their_own(executor: FakeExecutor) -> None:
    port = free_port()
    async with (
        running_gateway(executor, metrics_port=port),
        httpx.AsyncClient(timeout=TIMEOUT_S) as client,
    ):
        answer = await client.get(f"http://127.0.0.1:{port}/metrics")

    assert "evenflow_gateway_live_requests 0.0" in answer.text
