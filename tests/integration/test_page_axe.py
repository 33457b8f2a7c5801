"""No view of the page is hard to use for a part of its readers, as far as axe-core can tell."""

import json
from pathlib import Path

import pytest

from tests.chromium import PHONE, Page, needs_chromium
from tests.fake_executor import MODEL, FakeExecutor, Script
from tests.gateways import Client
from tests.integration.test_page import make_observed, row

AXE = Path(__file__).parents[2] / "ui/node_modules/axe-core/axe.min.js"
pytestmark = [
    needs_chromium,
    pytest.mark.skipif(not AXE.exists(), reason="axe-core is not here: `make test-ui` gets it"),
]
DESK = (1_280, 800)
SERIOUS = """axe.run().then((found) => found.violations
  .filter((one) => ['serious', 'critical'].includes(one.impact))
  .map((one) => [one.id, one.nodes.map((node) => node.html).slice(0, 3)]))"""


async def serious(page: Page) -> list[object]:
    found = await page.value(SERIOUS)
    assert isinstance(found, list)
    return found


@pytest.mark.parametrize("theme", ["light", "dark"])
async def test_axe_finds_no_serious_fault_in_any_view_at_any_width(
    client: Client, executor: FakeExecutor, page: Page, theme: str
) -> None:
    executor.observed = make_observed()
    executor.script = Script(texts=["word "] * 5)
    await page.prefer(theme)
    await page.goto(f"{client.base_url}/ui")
    await page.value(f"{AXE.read_text()}; 0")
    shown = {
        "Engine": row("request-0"),
        "Playground": "document.querySelector('#model').value",
        "Compare": "document.querySelector('#results')",
        "Size": "document.querySelector('form.size')",
        "Models": f"document.querySelector('td')?.innerText == {json.dumps(MODEL)}",
    }
    for width in (DESK, PHONE):
        await page.resize(*width)
        for view, is_there in shown.items():
            await page.click(f"a[href='#{view}']")
            await page.until(is_there)
            if view == "Playground":
                await page.fill("#prompt", "Say much.")
                await page.click("form.ask button")
                await page.until(
                    "document.querySelector('[data-kind=paced]').dataset.state == 'read'"
                )

            assert await serious(page) == [], (view, width)


async def test_axe_sees_a_field_without_a_label(client: Client, page: Page) -> None:
    await page.goto(f"{client.base_url}/ui#Size")
    await page.until("document.querySelector('form.size')")
    await page.value(f"{AXE.read_text()}; 0")
    await page.value("document.querySelector('label[for=context]').remove()")

    assert "label" in [one[0] for one in await serious(page)]
