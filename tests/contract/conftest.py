"""A real Redis for the contract suites."""

from collections.abc import Iterator

import pytest

from lab.stack.redis_server import RedisServer


@pytest.fixture(scope="session")
def redis_server() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server
