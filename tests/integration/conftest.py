"""A gateway in front of a fake executor, for the modules that test the gateway."""

from collections.abc import AsyncIterator

import pytest

from tests.fake_executor import FakeExecutor
from tests.gateways import Client, gateway_for


@pytest.fixture
async def executor() -> AsyncIterator[FakeExecutor]:
    executor = FakeExecutor()
    await executor.start()
    yield executor
    await executor.kill()


@pytest.fixture
async def client(executor: FakeExecutor) -> AsyncIterator[Client]:
    async with gateway_for(executor) as client:
        await client.wait_ready()
        yield client
