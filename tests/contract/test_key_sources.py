"""What a file and Redis do alike as places of API keys."""

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import redis
from click.testing import CliRunner

from cli.keys import command
from lab.stack.redis_server import RedisServer
from services.gateway.access import key_sources
from services.gateway.access.api_keys import parse_api_keys
from services.gateway.access.key_sources import (
    REDIS_KEY,
    FileKeys,
    KeySource,
    KeysUnreadableError,
    RedisKeys,
)

TEXT = '[[keys]]\nname = "älice"\nkey = "sk-alice-0123456789"\n'


@dataclass(frozen=True)
class Place:
    """A source, and how its document is written and taken away."""

    source: KeySource
    write: Callable[[bytes], Any]
    remove: Callable[[], Any]
    options: list[str]  # that name it to the command


def file_place(tmp_path: Path) -> Place:
    file = tmp_path / "keys.toml"
    return Place(FileKeys(file), file.write_bytes, file.unlink, ["--file", str(file)])


def redis_place(server: RedisServer) -> Place:
    client = redis.Redis.from_url(server.url)
    client.flushdb()
    source = RedisKeys(server.url)
    return Place(
        source,
        lambda text: client.set(REDIS_KEY, text),
        lambda: client.delete(REDIS_KEY),
        ["--redis-url", server.url],
    )


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_sources, "REDIS_TIMEOUT_S", 60.0)


@pytest.fixture(params=["file", "redis"])
async def place(
    request: pytest.FixtureRequest, tmp_path: Path, redis_server: RedisServer
) -> AsyncIterator[Place]:
    place = file_place(tmp_path) if request.param == "file" else redis_place(redis_server)
    yield place
    await place.source.aclose()


async def test_the_document_is_read_as_it_is_now(place: Place) -> None:
    place.write(TEXT.encode())
    first = await place.source.read()
    place.write(b"")

    assert (first, await place.source.read()) == (TEXT, "")


async def test_what_is_not_there_is_unreadable_until_it_is(place: Place) -> None:
    with pytest.raises(KeysUnreadableError):
        await place.source.read()
    place.write(TEXT.encode())

    assert await place.source.read() == TEXT

    place.remove()
    with pytest.raises(KeysUnreadableError):
        await place.source.read()


async def test_what_is_no_text_is_unreadable(place: Place) -> None:
    place.write(b"\xff")

    with pytest.raises(KeysUnreadableError):
        await place.source.read()


async def test_a_redis_that_dies_is_unreadable_until_it_returns() -> None:
    with RedisServer() as server:
        place = redis_place(server)
        place.write(TEXT.encode())
        assert await place.source.read() == TEXT
        server.kill()
        with pytest.raises(KeysUnreadableError):
            await place.source.read()
        server.start()
        place.write(TEXT.encode())

        assert await place.source.read() == TEXT
        await place.source.aclose()


async def test_a_password_is_not_told() -> None:
    with RedisServer() as server:
        source = RedisKeys(server.url.replace("//", "//:sk-secret@"))
        server.kill()
        with pytest.raises(KeysUnreadableError) as unreadable:
            await source.read()
        await source.aclose()

    assert "secret" not in str(unreadable.value)
    assert unreadable.value.__cause__ is None


async def test_the_command_changes_what_gateways_read(place: Place) -> None:
    for arguments in (["add", "alice"], ["add", "bob"], ["revoke", "alice"]):
        assert CliRunner().invoke(command, [*place.options, *arguments]).exit_code == 0

    (key,) = parse_api_keys(await place.source.read())
    assert key.name == "bob"
