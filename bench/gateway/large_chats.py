"""How long a small chat takes to its first token beside conversations of 1 MB by others.

A real executor on the CPU, and a gateway; clients are told apart by their addresses. 30 chats that
cannot fit the context, or 15 conversations that are counted, are there when the small one comes.
"""

import asyncio
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx

from bench.document import Benchmark, Row
from bench.gateway.processes import ROOT, running, wait_until
from lab.stack.executor_process import ExecutorProcess
from lab.stack.ports import free_port

MODEL = "chats"
MODEL_DIRECTORY = ROOT / ".cache/models/smollm2-135m-instruct"
LARGE = "word " * 205_000
OWN, OTHER = "127.0.0.1", "127.0.0.2"  # both lead here
NUM_SMALL = 5
CHAT, COUNT = "/v1/chat/completions", "/tokenize"
CASES = (
    ("none", CHAT, 0, OTHER),
    ("30 chats of another client", CHAT, 30, OTHER),
    ("30 chats of the same client", CHAT, 30, OWN),
    ("15 counted, of another client", COUNT, 15, OTHER),
    ("15 counted, of the same client", COUNT, 15, OWN),
)


def measure() -> list[Row]:
    with tempfile.TemporaryDirectory() as directory:
        log = Path(directory) / "executor.log"
        executor = ExecutorProcess(
            log, MODEL=MODEL_DIRECTORY, SERVED_MODEL_NAME=MODEL, KV_CACHE_MEMORY_BYTES=1 << 30
        )
        with executor.serving():
            return _measured(executor)


def _measured(executor: ExecutorProcess) -> list[Row]:
    port = free_port()
    settings = {
        "EVENFLOW_GATEWAY_HTTP_PORT": port,
        "EVENFLOW_GATEWAY_GRPC_PORT": free_port(),
        "EVENFLOW_GATEWAY_EXECUTORS": executor.address,
        "EVENFLOW_GATEWAY_METRICS_PORT": 0,
        "EVENFLOW_GATEWAY_TRACKER": "",
    }
    url = f"http://127.0.0.1:{port}"
    with running("services.gateway", settings=settings):
        wait_until(lambda: _is_ready(url), "the gateway is ready")
        return [asyncio.run(_case(url, *case)) for case in CASES]


def _is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/ready").is_success
    except httpx.TransportError:
        return False


def _client(url: str, address: str) -> httpx.AsyncClient:
    transport = httpx.AsyncHTTPTransport(local_address=address)
    return httpx.AsyncClient(base_url=url, transport=transport, timeout=300)


def _body(content: str) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": content}]}


async def _case(url: str, name: str, path: str, num_large: int, address: str) -> Row:
    """Send `num_large` conversations, and small chats one after the other beside them."""
    async with _client(url, OWN) as own, _client(url, address) as others:
        await _small_s(own)
        begun_s = time.monotonic()
        large = [
            asyncio.create_task(others.post(path, json=_body(LARGE))) for _ in range(num_large)
        ]
        await asyncio.sleep(0.5 if large else 0)
        small_s = [await _small_s(own) for _ in range(NUM_SMALL)]
        answers = await asyncio.gather(*large)
        large_s = time.monotonic() - begun_s
    statuses = sorted({answer.status_code for answer in answers})
    return {"beside": name, "small_s": small_s, "large_s": large_s, "statuses": statuses}


async def _small_s(client: httpx.AsyncClient) -> float:
    begun_s = time.monotonic()
    answer = await client.post(CHAT, json=_body("Hello.") | {"max_tokens": 1})
    answer.raise_for_status()
    return time.monotonic() - begun_s


def table(rows: Sequence[Row]) -> list[list[str]]:
    lines = [["beside", "first small s", "longest small s", "all large s", "statuses"]]
    for row in rows:
        small_s = [f"{row['small_s'][0]:.2f}", f"{max(row['small_s']):.2f}"]
        large_s = f"{row['large_s']:.1f}" if row["statuses"] else ""
        statuses = ", ".join(map(str, row["statuses"]))
        lines.append([str(row["beside"]), *small_s, large_s, statuses])
    return lines


BENCHMARK = Benchmark(
    name="large-chats",
    title="A small chat beside conversations of 1 MB",
    definitions={
        "small s": "from sending a chat with max_tokens 1 to its whole answer; five, one after the "
        "other, the first 0.5 s after the large ones were sent",
        "all large s": "from sending the large ones to the last one's answer",
    },
    measure=measure,
    table=table,
)
