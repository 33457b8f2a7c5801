"""The HTTP client of Java's own library, on which LangChain4j and others stand."""

import asyncio
import json
import shutil
from pathlib import Path

import pytest

from tests.fake_executor import EVENT_TIMEOUT_S
from tests.gateways import Client, chat_body, stream_body

PROGRAM = Path(__file__).parent / "JavaClient.java"
JAVA = shutil.which("java")


@pytest.mark.skipif(JAVA is None, reason="there is no `java` to run the client with")
async def test_the_jdk_s_client_posts_and_reads_streams(client: Client) -> None:
    assert JAVA is not None
    bodies = [json.dumps(body) for body in (chat_body(), stream_body())]
    running = await asyncio.create_subprocess_exec(
        JAVA, str(PROGRAM), client.base_url, *bodies, stdout=asyncio.subprocess.PIPE
    )
    async with asyncio.timeout(EVENT_TIMEOUT_S):
        told, _ = await running.communicate()

    *statuses, streamed = told.decode().split("\n", 4)
    assert statuses == ["200"] * 4
    assert "Hello" in streamed
    assert streamed.endswith("data: [DONE]\n")
