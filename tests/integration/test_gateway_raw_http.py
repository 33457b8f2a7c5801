"""HTTP as it goes over the wire: what clients' libraries write, byte by byte."""

import asyncio
import gzip
import json
import zlib

import pytest

from services.gateway.types import RequestId
from tests.coming_back import Reading
from tests.fake_executor import EVENT_TIMEOUT_S
from tests.gateways import Client, chat_body, gateway_for, stream_body, until

CHAT = "/v1/chat/completions"
WHOLE = json.dumps(chat_body()).encode()
STREAMED = json.dumps(stream_body()).encode()
GETS = ["/", "/health", "/ping", "/ready", "/v1/models", "/v1/models/test-model", "/version"]
H2C = (
    b"connection: Upgrade, HTTP2-Settings\r\nhttp2-settings: AAEAAEAAAAIAAAAAAAMAAABkAAQAoAAA\r\n"
    b"upgrade: h2c\r\n"
)


def rendered(
    method: str,
    path: str,
    body: bytes = b"",
    *,
    lines: bytes = b"host: localhost\r\n",
    version: str = "1.1",
) -> bytes:
    """Return a request whose body, if there is one, has a length."""
    if body:
        lines += b"content-type: application/json\r\ncontent-length: %d\r\n" % len(body)
    return f"{method} {path} HTTP/{version}\r\n".encode() + lines + b"\r\n" + body


def chunked(path: str, body: bytes, *, lines: bytes) -> bytes:
    """Return a POST whose body comes in two chunks."""
    lines += b"content-type: application/json\r\ntransfer-encoding: chunked\r\n"
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in (body[:9], body[9:]))
    return f"POST {path} HTTP/1.1\r\n".encode() + lines + b"\r\n" + chunks + b"0\r\n\r\n"


async def answers(client: Client, *pieces: bytes, ends: bool = False) -> bytes:
    """Send pieces, each of which the gateway reads by itself; return all that comes before the end
    of the connection. With `ends` the client closes its side once all is sent.
    """
    reader, writer = await asyncio.open_connection("127.0.0.1", client.gateway.http_port)
    try:
        async with asyncio.timeout(EVENT_TIMEOUT_S):
            for piece in pieces[:-1]:
                writer.write(piece)
                await client.http.get("/health")
            writer.write(pieces[-1])
            if ends:
                writer.write_eof()
            return await reader.read()
    finally:
        writer.close()


def statuses(answered: bytes) -> list[int]:
    return [int(part[:3]) for part in answered.split(b"HTTP/1.1 ")[1:]]


def head_of(answered: bytes) -> bytes:
    return answered.partition(b"\r\n\r\n")[0].lower()


# A client that asks for another protocol goes on with HTTP/1.1.

LAST = b"host: localhost\r\nconnection: close\r\n"
ASKS = b"host: localhost\r\n" + H2C


@pytest.mark.parametrize(
    "asked",
    [
        rendered("POST", CHAT, WHOLE, lines=ASKS),
        rendered("POST", CHAT, WHOLE, lines=ASKS.replace(b"upgrade: h2c", b"Upgrade: TLS/1.3")),
        rendered("POST", CHAT, WHOLE, lines=ASKS.replace(b"upgrade: h2c", b"upgrade: websocket")),
        chunked(CHAT, WHOLE, lines=ASKS),
        rendered("GET", "/v1/models", lines=ASKS),
    ],
    ids=["length", "tls", "websocket", "chunks", "get"],
)
async def test_an_upgrade_is_ignored_and_the_body_read(client, asked) -> None:
    """As a client sends it at once, in pieces, and again on the same connection."""
    last = rendered("POST", CHAT, WHOLE, lines=LAST)
    at_once = await answers(client, asked + asked + last)
    cut = len(asked) - 40
    in_pieces = await answers(client, asked[:30], asked[30:cut], asked[cut:], asked, last)

    assert statuses(at_once) == statuses(in_pieces) == [200, 200, 200]
    assert b"upgrade" not in at_once.lower()


async def test_a_stream_begins_on_a_connection_that_asked_for_an_upgrade(client) -> None:
    asked = rendered("POST", CHAT, STREAMED, lines=ASKS)

    answered = await answers(client, asked + rendered("GET", "/health", lines=LAST))

    assert statuses(answered) == [200, 200]
    assert b"data: [DONE]" in answered


async def test_very_many_upgrades_in_one_piece_are_all_ignored(client) -> None:
    asked = rendered("GET", "/health", lines=b"host: x\r\nconnection: upgrade\r\nupgrade: a\r\n")

    answered = await answers(client, asked * 900 + rendered("GET", "/health", lines=LAST))

    assert statuses(answered) == [200] * 901


async def test_a_tunnel_is_refused(client) -> None:
    lines = b"host: localhost:1\r\n"

    assert statuses(
        await answers(client, b"CONNECT localhost:1 HTTP/1.1\r\n" + lines + b"\r\n")
    ) == [400]


# The head.


@pytest.mark.parametrize(
    ("version", "lines", "status"),
    [
        ("1.1", b"connection: close\r\n", 400),
        ("1.1", b"host: localhost\r\nhost: localhost\r\nconnection: close\r\n", 400),
        ("1.1", LAST, 200),
        ("1.0", b"", 200),
    ],
)
async def test_a_request_names_its_host_once(client, version, lines, status) -> None:
    asked = rendered("GET", "/health", lines=lines, version=version)

    answered = await answers(client, asked)

    assert statuses(answered) == [status]
    if status == 400:
        assert b"host" in answered.partition(b"\r\n\r\n")[2]


@pytest.mark.parametrize("path", GETS)
async def test_what_can_be_got_can_be_asked_for_without_its_body(client, path) -> None:
    got = await client.http.get(path)
    head = await client.http.head(path)

    assert (got.status_code, head.status_code, head.content) == (200, 200, b"")
    assert head.headers["content-length"] == str(len(got.content))
    assert head.headers["content-type"] == got.headers["content-type"]


@pytest.mark.parametrize(
    ("path", "allowed"),
    [
        ("/ping", {"GET", "HEAD", "POST"}),
        ("/health", {"GET", "HEAD"}),
        ("/v1/models", {"GET", "HEAD"}),
        (CHAT, {"POST"}),
    ],
)
async def test_a_405_says_what_is_allowed(client, path, allowed) -> None:
    response = await client.http.put(path)

    assert response.status_code == 405
    assert set(response.headers["allow"].split(", ")) == allowed


@pytest.mark.parametrize("path", ["/v1/models", "/health", "/ping"])
async def test_a_slash_at_the_end_of_a_path_means_nothing(client, path) -> None:
    plain, slashed = await client.http.get(path), await client.http.get(path + "/")
    chat = await client.http.post(CHAT + "/", json=chat_body())

    assert (slashed.status_code, slashed.json()) == (200, plain.json())
    assert chat.status_code == 200


# HTTP/1.0.


async def test_a_stream_to_a_client_of_http_1_0_is_not_chunked(client) -> None:
    asked = {
        version: rendered("POST", CHAT, STREAMED, lines=LAST, version=version)
        for version in ("1.0", "1.1")
    }

    old, new = await answers(client, asked["1.0"]), await answers(client, asked["1.1"])

    body = old.partition(b"\r\n\r\n")[2]
    assert b"transfer-encoding" not in head_of(old)
    assert b"connection: close" in head_of(old)
    assert body.startswith(b"data: {")
    assert body.endswith(b"data: [DONE]\n\n")
    assert b"transfer-encoding: chunked" in head_of(new)
    assert body.count(b"data: ") == new.count(b"data: ")


# A client that closes its side, and one that leaves.


@pytest.mark.parametrize("path", ["/health", "/v1/models"])
async def test_a_get_is_answered_after_its_client_has_closed_its_side(client, path) -> None:
    answered = await answers(client, rendered("GET", path), ends=True)

    assert statuses(answered) == [200]


@pytest.mark.parametrize("body", [WHOLE, STREAMED], ids=["whole", "streamed"])
async def test_a_generation_ends_when_its_client_closes_its_side(client, executor, body) -> None:
    """A client that has gone looks the same."""
    executor.script.ending.clear()
    reader, writer = await asyncio.open_connection("127.0.0.1", client.gateway.http_port)
    writer.write(rendered("POST", CHAT, body))
    await executor.until(lambda: bool(executor.submits))

    writer.write_eof()
    await client.wait_idle()

    await reader.read()
    writer.close()


async def test_a_stream_that_is_read_on_ends_when_its_client_closes_its_side(
    client, executor
) -> None:
    """What is read with GET is short, but for streams: nothing may ever be written there again."""
    executor.script.midway.clear()
    reading = Reading(client, "r")
    await reading.begin(CHAT, stream_body(evenflow={"resumable": True}), 1)
    stream = client.gateway.streams.named(RequestId("r"))
    await until(lambda: stream.is_detached)

    reader, writer = await asyncio.open_connection("127.0.0.1", client.gateway.http_port)
    writer.write(rendered("GET", "/v1/streams/r"))
    await reader.readuntil(b"id: r/1")
    assert not stream.is_detached
    writer.write_eof()
    await until(lambda: stream.is_detached)
    async with asyncio.timeout(EVENT_TIMEOUT_S):
        await reader.read()
    writer.close()

    assert not await answers(client, rendered("GET", "/v1/streams/r"), ends=True)
    executor.script.midway.set()
    await reading.go_on(1 << 30)
    assert reading.text.endswith(b"[DONE]\n\n")


async def test_half_a_request_behind_a_get_ends_with_its_client_s_side(client, caplog) -> None:
    answered = await answers(client, rendered("GET", "/v1/models") + b"GET /he", ends=True)

    assert statuses(answered) == [200]
    assert not caplog.records


async def test_a_connection_ends_with_its_client_s_side_between_two_requests(client) -> None:
    asked = rendered("GET", "/health")
    reader, writer = await asyncio.open_connection("127.0.0.1", client.gateway.http_port)
    writer.write(asked)
    await reader.readuntil(b"}")

    writer.write_eof()

    async with asyncio.timeout(EVENT_TIMEOUT_S):
        assert await reader.read() == b""
    writer.close()


# Bodies that are compressed.


async def test_a_compressed_body_is_read(client, executor) -> None:
    for coding, content in (
        ("gzip", gzip.compress(WHOLE)),
        ("X-GZIP", gzip.compress(WHOLE)),
        ("deflate", zlib.compress(WHOLE)),
        ("identity", WHOLE),
    ):
        headers = {"content-encoding": coding, "content-type": "application/json"}
        response = await client.http.post(CHAT, content=content, headers=headers)

        assert response.status_code == 200, response.text
    assert len(executor.submits) == 4


@pytest.mark.parametrize("coding", ["br", "zstd", "gzip, gzip", "x"])
async def test_a_body_of_another_coding_is_a_415_that_says_what_is_read(client, coding) -> None:
    headers = {"content-encoding": coding, "content-type": "application/json"}
    response = await client.http.post(CHAT, content=WHOLE, headers=headers)

    assert response.status_code == 415
    assert response.headers["accept-encoding"] == "gzip, deflate"
    assert response.json()["error"]["code"] == "unsupported_media_type"


@pytest.mark.parametrize(
    "content",
    [
        WHOLE,
        gzip.compress(WHOLE)[:-3],
        gzip.compress(WHOLE) + b"more",
        gzip.compress(WHOLE)[:20] + bytes(20),
        b"",
    ],
    ids=["plain", "cut", "more", "broken", "empty"],
)
async def test_a_body_that_is_not_of_its_coding_is_a_400(client, content) -> None:
    headers = {"content-encoding": "gzip", "content-type": "application/json"}
    response = await client.http.post(CHAT, content=content, headers=headers)

    assert response.status_code == 400
    assert "gzip" in response.json()["error"]["message"]


async def test_a_body_is_bounded_after_its_compression(client) -> None:
    """16 MiB of spaces are 16 KiB, and the limit is 1 MiB."""
    headers = {"content-encoding": "gzip", "content-type": "application/json"}
    fits = WHOLE + b" " * ((1 << 20) - len(WHOLE))
    good = await client.http.post(CHAT, content=gzip.compress(fits), headers=headers)
    large = await client.http.post(CHAT, content=gzip.compress(fits + b" "), headers=headers)
    bomb = await client.http.post(CHAT, content=gzip.compress(b" " * (16 << 20)), headers=headers)

    assert (good.status_code, large.status_code, bomb.status_code) == (200, 413, 413)


async def test_any_good_credential_lets_a_call_in(executor, tmp_path) -> None:
    key = "a-good-key-of-thirty-two-characters"
    keys = tmp_path / "keys.toml"
    keys.write_text(f'[[keys]]\nname = "alice"\nkey = "{key}"\n')
    shown = [
        ({"authorization": "Bearer dummy", "x-api-key": key}, 200),
        ({"authorization": f"Bearer {key}", "x-api-key": "dummy"}, 200),
        ({"authorization": "Basic dXNlcg==", "x-api-key": key}, 200),
        ({"authorization": "Bearer dummy", "x-api-key": "dummy"}, 401),
        ({}, 401),
    ]
    async with gateway_for(executor, api_keys_file=keys) as client:
        await client.wait_ready()
        for headers, status in shown:
            assert (await client.http.get("/v1/models", headers=headers)).status_code == status
        assert (await client.http.head("/")).status_code == 200
