"""An HTTP client that asks for a stream and reads nothing of it until it is told to."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

RECEIVE_BUFFER_BYTES = 64 << 10


class SlowReader:
    """Made by `ask_and_wait`."""

    def __init__(self, reader: asyncio.StreamReader, transport: asyncio.ReadTransport) -> None:
        self.reader = reader
        self._transport = transport

    def resume(self) -> None:
        """Begin to read."""
        self._transport.resume_reading()

    async def rest(self, timeout_s: float) -> list[str]:
        """Read to the end and return the data of all events."""
        self.resume()
        answer = (await asyncio.wait_for(self.reader.read(), timeout_s)).decode()
        prefix = "data: "
        lines = answer.splitlines()
        return [line.removeprefix(prefix) for line in lines if line.startswith(prefix)]


def text_of(events: list[str]) -> str:
    """Return the text of a stream's chunks."""
    chunks = [json.loads(event) for event in events if event != "[DONE]"]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    return "".join(choice["delta"].get("content") or "" for choice in choices)


@asynccontextmanager
async def ask_and_wait(
    port: int,
    body: dict[str, object],
    *,
    request_id: str,
    receive_buffer_bytes: int = RECEIVE_BUFFER_BYTES,
) -> AsyncIterator[SlowReader]:
    """Post a chat request through a socket that takes little, and read nothing yet."""
    content = json.dumps(body).encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\nx-request-id: {request_id}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(content)}\r\n"
        "connection: close\r\n\r\n"
    )
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer_bytes)
    connection.connect(("127.0.0.1", port))
    connection.setblocking(False)
    reader, writer = await asyncio.open_connection(sock=connection, limit=1 << 15)
    transport = writer.transport
    assert isinstance(transport, asyncio.ReadTransport)
    transport.pause_reading()
    writer.write(head.encode() + content)
    await writer.drain()
    try:
        yield SlowReader(reader, transport)
    finally:
        writer.close()
