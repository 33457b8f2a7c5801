"""The page at `/ui`, in a browser."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.chromium import PHONE, Page, chromium, needs_chromium
from tests.fake_executor import MODEL, FakeExecutor
from tests.gateways import Client, gateway_for

pytestmark = needs_chromium

KEY = "a-good-key-of-thirty-two-characters"
KEYS = f'[[keys]]\nname = "alice"\nkey = "{KEY}"\n'
GROUND = "getComputedStyle(document.body).backgroundColor"
OVERFLOW = "document.documentElement.scrollWidth > innerWidth"


@pytest.fixture
async def page(tmp_path: Path) -> AsyncIterator[Page]:
    async with chromium(tmp_path / "profile") as page:
        yield page
        assert page.complaints == []


async def test_the_page_shows_what_is_served_and_loads_nothing_from_elsewhere(
    client: Client, page: Page
) -> None:
    await page.goto(f"{client.base_url}/ui")

    await page.until(f"document.body.innerText.includes({MODEL!r})")
    await page.until("document.querySelector('#gateway').innerText == 'ready'")
    assert len(page.fetched) > 3
    assert [url for url in page.fetched if not url.startswith((client.base_url, "data:"))] == []
    # Its policy holds: a script of the page's own text does not run.
    await page.value(
        "document.body.append(Object.assign(document.createElement('script'),"
        " {textContent: 'window.injected = true'}))"
    )
    assert not await page.value("window.injected")
    assert "script" in page.complaints.pop().lower()


async def test_where_keys_are_on_the_page_asks_for_one(
    executor: FakeExecutor, page: Page, tmp_path: Path
) -> None:
    (tmp_path / "keys.toml").write_text(KEYS)
    async with gateway_for(executor, api_keys_file=tmp_path / "keys.toml") as client:
        await client.wait_ready()
        await page.goto(f"{client.base_url}/ui")
        for key in ("a-key-that-nobody-here-has-seen", KEY):
            await page.until("document.querySelector('#key')")
            assert MODEL not in await page.text()
            await page.fill("#key", key)
            await page.click(".key button")

        await page.until(f"document.body.innerText.includes({MODEL!r})")
        assert await page.value("localStorage.length") == 0  # the key goes with the tab


async def test_both_themes_and_a_phone_have_room_for_all(client: Client, page: Page) -> None:
    grounds = set()
    for theme in ("light", "dark"):
        await page.prefer(theme)
        await page.goto(f"{client.base_url}/ui")
        await page.until(f"document.body.innerText.includes({MODEL!r})")
        grounds.add(await page.value(GROUND))
    await page.click("#theme")
    assert await page.value(GROUND) in grounds
    assert len(grounds) == 2
    await page.resize(*PHONE)

    assert not await page.value(OVERFLOW)
