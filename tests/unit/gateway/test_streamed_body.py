"""How chunks of a body come to the socket."""

import asyncio

from uvicorn.protocols.http.flow_control import FlowControl

from services.gateway.http.protocol import StreamedBody


class Socket(asyncio.Transport):
    """Writes down what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.writes: list[bytes] = []
        self._is_closing = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.writes.append(bytes(data))

    def is_closing(self) -> bool:
        return self._is_closing

    def close(self) -> None:
        self._is_closing = True


def make_body() -> tuple[StreamedBody, Socket]:
    socket = Socket()
    return StreamedBody(socket, FlowControl(socket)), socket


async def test_chunks_of_one_turn_go_out_together_when_it_ends() -> None:
    body, socket = make_body()
    body.write(b"one")
    body.write(b"")
    body.write(b"two more")
    assert socket.writes == []

    await asyncio.sleep(0)
    body.write(b"3")
    await asyncio.sleep(0)

    assert socket.writes == [b"3\r\none\r\n8\r\ntwo more\r\n", b"1\r\n3\r\n"]


async def test_what_was_flushed_does_not_go_out_again() -> None:
    body, socket = make_body()
    body.write(b"one")
    body.flush()
    await asyncio.sleep(0)

    assert socket.writes == [b"3\r\none\r\n"]


async def test_a_client_that_does_not_take_what_was_just_written_is_waited_for() -> None:
    """It pauses the flow when the bytes come to its socket, not when they are written."""
    socket = Socket()
    flow = FlowControl(socket)
    body = StreamedBody(socket, flow)
    socket.write = lambda data: flow.pause_writing()  # type: ignore[method-assign]
    body.write(b"one")
    waiting = asyncio.create_task(body.opened())
    await asyncio.sleep(0)
    assert not waiting.done()

    flow.resume_writing()
    await asyncio.wait_for(waiting, 60)


async def test_nothing_goes_out_to_a_client_that_is_gone() -> None:
    body, socket = make_body()
    body.write(b"one")
    socket.close()
    await asyncio.sleep(0)

    assert socket.writes == []
