"""A gateway's stream to the executor of a module."""

from collections.abc import AsyncIterator

import pytest

from lab.executor_client import GatewayStream
from lab.executor_process import ExecutorProcess


@pytest.fixture
async def gateway(executor: ExecutorProcess) -> AsyncIterator[GatewayStream]:
    async with GatewayStream(executor.address) as stream:
        yield stream
