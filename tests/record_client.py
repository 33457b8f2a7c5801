"""Write down what a client sends: `python -m tests.record_client --help`.

The client runs as a command. `$BASE_URL`, in its arguments and in its environment, is a proxy that
notes each request and hands it to a gateway with a fake executor; the model is `test-model`.
"""

import argparse
import asyncio
import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import uvicorn

from lab.stack.ports import free_port
from tests.client_session import Call, Session, Step, model_that_calls, without_prose
from tests.fake_executor import FakeExecutor
from tests.gateways import gateway_for, until

OF_THE_CONNECTION = {"host", "content-length", "transfer-encoding", "date", "server"}
SECRET = {"authorization", "proxy-authorization", "x-api-key", "api-key", "cookie"}
LONGEST_HEADER = 400  # characters; a longer one is a client's own account of itself


class Recorder:
    """An ASGI application that hands requests on and notes them."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self.steps: list[Step] = []
        self._http = http

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        body = await _whole_body(receive)
        headers = {name.decode(): value.decode() for name, value in scope["headers"]}
        path = "?".join(filter(None, [scope["path"], scope["query_string"].decode()]))
        self.steps.append(make_step(scope["method"], path, headers, body))
        passed = {name: told for name, told in headers.items() if name not in OF_THE_CONNECTION}
        asked = self._http.stream(scope["method"], path, headers=passed, content=body)
        async with asked as answer:
            print(scope["method"], path, answer.status_code, flush=True)
            await _hand_back(answer, send)


def make_step(method: str, path: str, headers: dict[str, str], body: bytes) -> Step:
    """Return a step without secrets, and without prose."""
    kept = {name: told for name, told in headers.items() if name not in OF_THE_CONNECTION}
    kept |= {name: "unused" for name in SECRET & kept.keys()}
    kept |= {name: "left out" for name, told in kept.items() if len(told) > LONGEST_HEADER}
    told = without_prose(json.loads(body)) if body else None
    return Step(method=method, path=path, headers=kept, body=told)


async def _whole_body(receive: Any) -> bytes:
    body, more = b"", True
    while more:
        message = await receive()
        body += message.get("body", b"")
        more = message.get("more_body", False)
    return body


async def _hand_back(answer: httpx.Response, send: Any) -> None:
    headers = [pair for pair in answer.headers.raw if pair[0].lower() != b"transfer-encoding"]
    await send({"type": "http.response.start", "status": answer.status_code, "headers": headers})
    async for part in answer.aiter_raw():
        await send({"type": "http.response.body", "body": part, "more_body": True})
    await send({"type": "http.response.body"})


@asynccontextmanager
async def recorder(call: Call | None, context: int) -> AsyncIterator[tuple[Recorder, str]]:
    """Serve a recorder before a gateway whose model has `context` tokens; yield its address too."""
    executor = FakeExecutor(max_model_len=context)
    executor.script_for = model_that_calls(call)
    await executor.start()
    try:
        async with gateway_for(executor) as client:
            await client.wait_ready()
            application = Recorder(client.http)
            async with served(application) as base_url:
                yield application, base_url
    finally:
        await executor.kill()


@asynccontextmanager
async def served(application: Recorder) -> AsyncIterator[str]:
    """Serve it on a free port; yield the address."""
    port = free_port()
    # h11 takes the body of a request that asks for an upgrade as well.
    config = uvicorn.Config(application, port=port, http="h11", ws="none", log_level="error")
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server.serve())
    await until(lambda: server.started)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        await serving


async def run(command: list[str], base_url: str) -> int:
    """Run the client to its end; return its exit status."""
    arguments = [word.replace("$BASE_URL", base_url) for word in command]
    environment = {key: told.replace("$BASE_URL", base_url) for key, told in os.environ.items()}
    environment["BASE_URL"] = base_url
    process = await asyncio.create_subprocess_exec(
        *arguments, env=environment, stdin=asyncio.subprocess.DEVNULL
    )
    return await process.wait()


async def record(asked: argparse.Namespace) -> int:
    call = Call(name=asked.call[0], arguments=json.loads(asked.call[1])) if asked.call else None
    async with recorder(call, max(asked.context)) as (taken, base_url):
        status = await run(asked.command, base_url)
    session = Session(client=asked.client, contexts=asked.context, call=call, steps=taken.steps)
    session.write(asked.out)
    return status


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.record_client", description=__doc__)
    parser.add_argument("--client", required=True, help="its name and version")
    parser.add_argument("--out", type=Path, required=True, help="the session's file")
    parser.add_argument("--call", nargs=2, metavar=("TOOL", "JSON"), help="what the model calls")
    parser.add_argument("--context", type=int, nargs="+", default=[8192, 32768], help="tokens")
    parser.add_argument("command", nargs="+", help="after --: the client")
    return parser


def main() -> int:
    return asyncio.run(record(make_parser().parse_args()))


if __name__ == "__main__":
    raise SystemExit(main())
