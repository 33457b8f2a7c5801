"""The README's pictures of the page: `make pictures` takes them, of a scripted engine at work."""

import asyncio
import base64
import os
from pathlib import Path

import pytest

from evenflow.executor.v1 import executor_pb2 as pb
from lab.stack.processes import ROOT
from tests.chromium import Page, needs_chromium
from tests.fake_executor import FakeExecutor, Script
from tests.gateways import Client

STATED_FOLDER = os.environ.get("EVENFLOW_TEST_PICTURES")  # else they are thrown away
NUM_UPDATES = 240 if STATED_FOLDER else 3  # of the engine before its picture is taken
SIZE = (1180, 660)  # pixels
MAX_BYTES = 150_000
NUM_GROUPS = 24

PARKED, DECODING = pb.REQUEST_STATE_PARKED, pb.REQUEST_STATE_DECODING
PREFILL, QUEUED = pb.REQUEST_STATE_PREFILL, pb.REQUEST_STATE_QUEUED
IN_HAND = ("in_hand", "its reader has enough in hand")
NO_ROOM = ("no_room", "there is no room for it yet")


@pytest.fixture
async def page(page: Page) -> Page:
    await page.resize(*SIZE)
    await page.prefer("light")
    await page.command("Emulation.setScrollbarsHidden", hidden=True)
    return page


def residency(every: int) -> list["pb.Residency.ValueType"]:
    """Return where the groups are: each `every`-th on the host; 1: all, 0: none."""
    return [
        pb.RESIDENCY_OFFLOADED if every and group % every == 0 else pb.RESIDENCY_RESIDENT
        for group in range(1, NUM_GROUPS + 1)
    ]


def make_engine(step: int) -> pb.WatchRequestsResponse:
    """Return a full pool: requests that decode, one that begins, two parked and one that waits."""
    requests = []
    for name, state, num_prompt, num_deposited, every, why in (
        ("report-7f3a", DECODING, 11_800, 14, 4, None),
        ("chat-19c2", DECODING, 4_200, 31, 0, None),
        ("chat-a4e8", DECODING, 3_100, 9, 0, None),
        ("notes-52d0", DECODING, 6_400, 22, 8, None),
        ("chat-0b77", PARKED, 5_200, 48, 1, IN_HAND),
        ("chat-e31f", PARKED, 2_600, 57, 1, IN_HAND),
        ("mail-c908", PREFILL, 7_300, 0, 0, None),
        ("chat-66b5", QUEUED, 4_800, 0, None, NO_ROOM),
    ):
        runs = state == DECODING
        requests.append(
            pb.ObservedRequest(
                request_id=f"{name}:1",
                state=state,
                num_prompt_tokens=num_prompt,
                num_computed_tokens=0 if every is None else num_prompt // (2 - runs),
                num_generated_tokens=(num_deposited + 60 + step // 4 * runs) * (num_deposited > 0),
                num_deposited_tokens=num_deposited,
                release_interval_s=0.2,
                residency=[] if every is None else residency(every),
                **({"why": why[0], "why_text": why[1]} if why else {}),
            )
        )
    return pb.WatchRequestsResponse(
        requests=requests,
        num_steps=step,
        observed_step_s=0.0242 + (step * 7 % 11) / 9e3,
        predicted_step_s=0.0247,
        num_pool_blocks=6_000,
        num_free_pool_blocks=210 + step * 13 % 90,
        num_host_blocks=18_000,
        num_free_host_blocks=11_400,
        link_bytes_per_s=24e9,
        num_cached_tokens=1_920,
    )


async def keep(page: Page, name: str, folder: Path) -> None:
    """Take a picture, which is not too large for a document."""
    taken = await page.command("Page.captureScreenshot", format="png")
    picture = base64.b64decode(taken["data"])
    (folder / name).write_bytes(picture)

    assert picture.startswith(b"\x89PNG")
    assert len(picture) <= MAX_BYTES


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return ROOT / STATED_FOLDER if STATED_FOLDER else tmp_path


@needs_chromium
async def test_a_picture_of_the_engine(
    client: Client, executor: FakeExecutor, page: Page, folder: Path
) -> None:
    executor.observed = make_engine(1)
    await page.goto(f"{client.base_url}/ui")
    for step in range(2, NUM_UPDATES):
        executor.observed = make_engine(step)
        await asyncio.sleep(0.05)

    await page.until("document.querySelectorAll('[data-request]').length == 8")
    await page.until("document.querySelector('.status').innerText == 'live'")
    await keep(page, "engine.png", folder)


ANSWER = (
    "The sky looks blue because air scatters the light of the sun, and scatters its short blue "
    "waves far more than its long red ones. From every side of the sky some of that scattered "
    "light comes down to you, and most of it is blue. In the evening the light takes a longer "
    "way through the air: most of the blue is lost on it, and what is left is orange and red. "
)
PACED = "document.querySelector('[data-kind=\"paced\"]')"
UNPACED = "document.querySelector('[data-kind=\"unpaced\"]')"


@needs_chromium
async def test_a_picture_of_the_playground(
    client: Client, executor: FakeExecutor, page: Page, folder: Path
) -> None:
    words = [f"{word} " for word in ANSWER.split()]
    executor.script = Script(texts=words, interval_s=0.02)
    executor.script.ending.clear()
    await page.goto(f"{client.base_url}/ui#Playground")
    await page.until("document.querySelector('#model').value")
    await page.fill("#prompt", "Why is the sky blue, and red in the evening?")
    await page.fill("#pace", "10")
    await page.click("form.ask button")
    await executor.until(lambda: len(executor.submits) == 2)
    paced = next(one for one in executor.submits if one.service_level.consumption_rate_tps == 10.0)
    request = pb.ObservedRequest(request_id=paced.request_id, num_generated_tokens=len(words))
    executor.observed = pb.WatchRequestsResponse(requests=[request])

    await page.until(f"{UNPACED}?.querySelector('.text').innerText.trim() == {ANSWER.strip()!r}")
    await page.until(f"{PACED}.querySelector('.text').innerText.includes('every side')")
    await page.until(f"/in deposit/.test({PACED}.innerText)")
    await keep(page, "playground.png", folder)
    await page.click(".buttons button[type=button]")  # stop
    await page.until(f"{PACED}.dataset.state == 'stopped'")
    executor.script.ending.set()
    await client.wait_idle()


def test_the_readme_shows_pictures_that_are_small() -> None:
    for name in ("engine.png", "playground.png"):
        assert f"](docs/pictures/{name})" in (ROOT / "README.md").read_text()
        assert (ROOT / "docs/pictures" / name).stat().st_size <= MAX_BYTES
