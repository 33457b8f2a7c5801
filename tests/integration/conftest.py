"""A gateway in front of a fake executor, for the modules that test the gateway, and a browser."""

from collections.abc import AsyncIterator, Iterator

import pytest

from evenflow.gateway.v1 import generation_pb2 as gen
from services.gateway.http import sizing
from tests.chromium import Browser, Page
from tests.fake_executor import FakeExecutor, Script
from tests.gateways import Client, gateway_for
from tests.integration.calling import SAID


@pytest.fixture(autouse=True)
def sizes_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Search for sizes as readily as all else runs, not after suites that fill every core."""
    monkeypatch.setattr(sizing, "NICENESS", 0)


@pytest.fixture
async def executor() -> AsyncIterator[FakeExecutor]:
    executor = FakeExecutor()
    await executor.start()
    yield executor
    await executor.kill()


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    browser = Browser(tmp_path_factory.mktemp("chromium"))
    yield browser
    browser.stop()


@pytest.fixture
async def page(browser: Browser) -> AsyncIterator[Page]:
    async with browser.page() as page:
        yield page
        assert page.complaints == []


@pytest.fixture
async def client(executor: FakeExecutor) -> AsyncIterator[Client]:
    async with gateway_for(executor) as client:
        await client.wait_ready()
        yield client


@pytest.fixture
def calling(executor: FakeExecutor) -> FakeExecutor:
    """Return the executor, whose answers think, speak and call a function."""
    executor.script = Script(
        texts=SAID, finish_reason=gen.FINISH_REASON_TOOL_CALLS, num_reasoning_tokens=2
    )
    return executor
