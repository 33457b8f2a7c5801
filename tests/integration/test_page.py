"""The page at `/ui`, in a browser."""

import asyncio
import json
from pathlib import Path

import pytest

from evenflow.executor.v1 import executor_pb2 as pb
from simulator.device.hardware import device_names
from tests.chromium import PHONE, Page, needs_chromium
from tests.fake_executor import MODEL, FakeExecutor, Script
from tests.gateways import Client, gateway_for

pytestmark = needs_chromium

KEY = "a-good-key-of-thirty-two-characters"
KEYS = f'[[keys]]\nname = "alice"\nkey = "{KEY}"\n'
GROUND = "getComputedStyle(document.body).backgroundColor"
OVERFLOW = "document.documentElement.scrollWidth > innerWidth"


async def test_the_page_shows_what_is_served_and_loads_nothing_from_elsewhere(
    client: Client, page: Page
) -> None:
    await page.goto(f"{client.base_url}/ui")

    await page.until(f"document.body.innerText.includes({MODEL!r})")
    await page.until("document.querySelector('#gateway').innerText == 'ready'")
    await page.click("a[href='#Models']")
    await page.until("document.querySelector('td')?.innerText == " + repr(MODEL))
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


def place(letters: str) -> list["pb.Residency.ValueType"]:
    names = {
        "R": pb.RESIDENCY_RESIDENT,
        "O": pb.RESIDENCY_OFFLOADED,
        "B": pb.RESIDENCY_RESTORING,
    }
    return [names[letter] for letter in letters]


def make_observed(
    num_requests: int = 3, num_layers: int = 8, step: int = 1
) -> pb.WatchRequestsResponse:
    """Return a full engine: request 0 has its last layers on the host, 1 is parked."""
    away = "R" * (num_layers - 2) + "OB"
    requests = [
        pb.ObservedRequest(
            request_id=f"request-{index}:0123",
            state=pb.REQUEST_STATE_PARKED if index == 1 else pb.REQUEST_STATE_DECODING,
            num_prompt_tokens=3_000,
            num_computed_tokens=3_000 + step,
            num_generated_tokens=40 + step % 50,
            num_deposited_tokens=20,
            num_late_tokens=4,
            release_interval_s=0.2,
            residency=place(
                away if index == 0 else "O" * num_layers if index == 1 else "R" * num_layers
            ),
            why="in_hand",
            why_text="its reader has enough in hand",
        )
        for index in range(num_requests)
    ]
    shared = pb.ObservedPrefix(
        request_ids=["request-0:0123", "request-2:0123"],
        num_tokens=1_500,
        residency=place("R" * num_layers),
    )
    return pb.WatchRequestsResponse(
        requests=requests,
        prefixes=[shared],
        num_steps=step,
        observed_step_s=0.02 + step % 7 / 1e3,
        predicted_step_s=0.021,
        num_pool_blocks=1_000,
        num_free_pool_blocks=250,
        num_host_blocks=4_000,
        num_free_host_blocks=3_000,
        link_bytes_per_s=12e9,
        num_cached_tokens=640,
        tokens_per_step=2.414,
    )


def row(name: str) -> str:
    return f"document.querySelector('[data-request=\"{name}\"]')"


# The colour in the middle of a cell of a row's own half, as the browser has it.
PIXEL = """(() => {{
  const canvas = {row}.querySelector('canvas'), x = ({group} + 0.5) / 8 * canvas.width;
  return [...canvas.getContext('2d').getImageData(x, canvas.height / 4, 1, 1).data].slice(0, 3);
}})()"""
COLOUR = """(() => {{
  const probe = document.body.appendChild(document.createElement('i'));
  probe.style.color = 'var(--{name})';
  const told = getComputedStyle(probe).color.match(/\\d+/g).map(Number);
  probe.remove();
  return told;
}})()"""


async def test_the_map_shows_where_each_layer_is_and_why_a_request_waits(
    client: Client, executor: FakeExecutor, page: Page
) -> None:
    executor.observed = make_observed()
    await page.goto(f"{client.base_url}/ui")
    await page.until(row("request-0"))

    layers = f"{row('request-0')}.querySelector('canvas').dataset.layers"
    await page.until(f"{layers} == 'RRRRRROB'")
    label = await page.value(f"{row('request-0')}.querySelector('canvas').ariaLabel")
    assert label == (
        "layer groups shared: 1-8 in the pool; 1-6 in the pool, 7 on the host, 8 coming back"
    )
    for group, name in enumerate(["resident"] * 6 + ["offloaded", "restoring"]):
        drawn = await page.value(PIXEL.format(row=row("request-0"), group=group))
        assert drawn == await page.value(COLOUR.format(name=name)), group
    waits = await page.value(f"{row('request-1')}.innerText")
    assert "parked" in waits
    assert "its reader has enough in hand" in waits
    assert "its reader has" not in await page.value(f"{row('request-2')}.innerText")
    text = await page.text()
    for said in ("750 of 1,000 blocks", "1,000 of 4,000 blocks", "link 12.00 GB/s", "640 tokens"):
        assert said in text
    assert "predicted 21.0 ms" in text
    assert "by request-0, request-2" in text
    assert "2.41 tokens per request and step" in text

    executor.observed = make_observed(num_requests=1)
    executor.observed.ClearField("tokens_per_step")  # of an engine without drafts
    await page.until(f"!{row('request-1')}")
    assert "tokens per request and step" not in await page.text()


async def test_a_stopped_engine_shows_as_such(
    client: Client, executor: FakeExecutor, page: Page
) -> None:
    executor.observed = make_observed()
    await page.goto(f"{client.base_url}/ui")
    status = "document.querySelector('.status')?.innerText"
    await page.until(f"{status} == 'live'")

    executor.observing.clear()
    await page.until(f"{status}?.startsWith('stopped: nothing heard for')")
    assert await page.value("getComputedStyle(document.querySelector('.requests')).opacity") < "1"
    executor.observing.set()
    await page.until(f"{status} == 'live'")
    await executor.kill()
    await page.until(f"{status} == 'not connected'")
    await page.until("document.querySelector('#gateway').innerText == 'no engine is connected'")


ANSWER = "document.querySelector('[data-kind=\"{kind}\"]')"
GAPS = ANSWER + ".querySelector('.histogram').dataset.counts"  # < 20, 50, 100, 200, 500 ms, ...


async def test_the_playground_streams_at_a_pace_that_its_slider_changes(
    client: Client, executor: FakeExecutor, page: Page
) -> None:
    words = [f"word{index} " for index in range(40)]
    executor.script = Script(texts=[pb.Token(reasoning="Well. "), *words])
    executor.script.ending.clear()
    paced, unpaced = ANSWER.format(kind="paced"), ANSWER.format(kind="unpaced")
    text = "".join(words).strip()
    await page.goto(f"{client.base_url}/ui#Playground")
    await page.until("document.querySelector('#model').value")
    await page.fill("#prompt", "Say much.")
    await page.fill("#pace", "4")
    await page.click("form.ask button")

    await page.until(f"{unpaced}?.querySelector('.text').innerText.trim() == {text!r}")
    assert await page.value(f"{paced}.querySelector('.thoughts').innerText") == "Well. "
    # Three gaps of a quarter of a second, and not yet all of the text.
    slow = f"JSON.parse({GAPS.format(kind='paced')}).slice(4).reduce((a, b) => a + b)"
    await page.until(f"{slow} >= 3")
    assert await page.value(f"{paced}.querySelector('.text').innerText.trim()") != text
    levels = [submit.service_level for submit in executor.submits]
    assert sorted(level.consumption_rate_tps for level in levels) == [0.0, 4.0]
    await page.fill("#pace", "60")
    await executor.until(lambda: bool(executor.paces))
    num_slow = await page.value(slow)
    await page.until(f"{paced}.querySelector('.text').innerText.trim() == {text!r}")
    executor.script.ending.set()
    await page.until(f"{paced}.dataset.state == 'read'")

    assert executor.paces[-1].service_level.consumption_rate_tps == 60.0
    counts = await page.value(f"JSON.parse({GAPS.format(kind='paced')})")
    assert sum(counts) == len(words)  # the thought came first
    assert sum(counts[:3]) > len(words) / 2  # most gaps are of the new pace
    assert sum(counts[4:]) <= num_slow + 3
    # The next question goes with what was said before.
    await page.fill("#prompt", "And more?")
    await page.click("form.ask button")
    await page.until("document.querySelectorAll('article').length == 2")
    await page.until(f"{paced}.dataset.state == 'read'")
    said = [message.content for message in executor.submits[-1].chat.messages]
    assert said == ["Say much.", "".join(words), "And more?"]


async def test_what_is_in_deposit_is_told_beside_the_text(
    client: Client, executor: FakeExecutor, page: Page
) -> None:
    executor.script = Script(texts=["word "] * 9)
    await page.goto(f"{client.base_url}/ui#Playground")
    await page.until("document.querySelector('#model').value")
    await page.fill("#prompt", "Say much.")
    await page.fill("#pace", "1")
    await page.click("form.ask button")
    await executor.until(lambda: len(executor.submits) == 2)
    paced = next(one for one in executor.submits if one.service_level.consumption_rate_tps == 1.0)
    request = pb.ObservedRequest(request_id=paced.request_id, num_generated_tokens=9)
    executor.observed = pb.WatchRequestsResponse(requests=[request])

    facts = f"{ANSWER.format(kind='paced')}.querySelector('.facts').innerText"
    await page.until(f"/[78] in deposit/.test({facts})")
    await page.click(".buttons button[type=button]")  # stop
    await page.until(f"{ANSWER.format(kind='paced')}.dataset.state == 'stopped'")
    await client.wait_idle()


OPEN = """(() => {{
  const files = new DataTransfer(), input = document.querySelector('#results');
  for (const [name, content] of Object.entries({files}))
    files.items.add(new File([content], name));
  input.files = files.files;
  input.dispatchEvent(new Event('change'));
}})()"""


async def test_results_are_opened_compared_and_zoomed_into(client: Client, page: Page) -> None:
    cells = [
        {"policy": policy, "rate_per_s": rate, "seed": seed, "tbt": share + seed / 10, "ttft_s": 9}
        for policy, share in (("vllm", 0.5), ("evenflow", 0.8))
        for rate in (1, 2, 4)
        for seed in (0, 1)
    ]
    bench = {"duration": 12.5, "ttfts": [0.1, 0.2, 0.4], "itls": [[0.01, 0.03], [0.02]]}
    files = {
        "simulated.json": json.dumps({"cells": cells}),
        "run.json": json.dumps(bench),
        "else.json": "{",
    }
    await page.goto(f"{client.base_url}/ui#Compare")
    await page.value(OPEN.format(files=json.dumps(files)))

    await page.until("document.querySelectorAll('figure canvas').length == 3")
    text = await page.text()
    for said in (
        "no such results: else.json",
        "vllm",
        "evenflow",
        "time to first token, s",
        "12.5",
    ):
        assert said in text
    figures = "[...document.querySelector('#figure').options].map((one) => one.value)"
    assert await page.value(figures) == ["tbt", "ttft_s"]
    await page.hover("figure .u-over", 0.5, 0.5)
    await page.until("document.querySelector('figure .u-value').innerText == '2'")
    hovered = "[...document.querySelectorAll('figure .u-legend')[0].querySelectorAll('.u-value')]"
    values = await page.value(f"{hovered}.map((one) => one.innerText)")
    assert values == ["2", "0.55", "0.85"]  # means over seeds
    await page.drag("figure .u-over", (0.6, 0.5), (1.0, 0.5))  # the rates 2 and 1 are out of it
    await page.hover("figure .u-over", 0.5, 0.6)
    await page.until("document.querySelector('figure .u-value').innerText == '4'")


@pytest.mark.nightly
async def test_64_requests_ten_times_a_second_leave_30_frames_a_second(
    client: Client, executor: FakeExecutor, page: Page
) -> None:
    async def go_on() -> None:
        for step in range(10_000):
            executor.observed = make_observed(64, num_layers=32, step=step)
            for request in executor.observed.requests:  # each row is drawn anew
                request.residency[step % 32] = pb.RESIDENCY_OFFLOADED
            await asyncio.sleep(0.1)

    going = asyncio.create_task(go_on())
    await page.goto(f"{client.base_url}/ui")
    await page.until("document.querySelectorAll('[data-request]').length == 65")
    frames_per_s = await page.value(FRAMES_PER_S)
    going.cancel()

    assert frames_per_s >= 30


FRAMES_PER_S = """new Promise((resolve) => {
  let frames = 0, began = performance.now();
  requestAnimationFrame(function count(now) {
    frames += 1;
    if (now - began < 5000) requestAnimationFrame(count);
    else resolve(1000 * frames / (now - began));
  });
})"""


async def test_both_themes_and_a_phone_have_room_for_all(
    client: Client, executor: FakeExecutor, page: Page
) -> None:
    executor.observed = make_observed()
    grounds = set()
    for theme in ("light", "dark"):
        await page.prefer(theme)
        await page.goto(f"{client.base_url}/ui")
        await page.until(f"document.body.innerText.includes({MODEL!r})")
        grounds.add(await page.value(GROUND))
    await page.click("#theme")
    assert await page.value(GROUND) in grounds
    assert len(grounds) == 2
    await page.until(row("request-0"))
    await page.resize(*PHONE)
    for view, shown in (
        ("Engine", MODEL),
        ("Models", MODEL),
        ("Playground", MODEL),
        ("Compare", "evenflow bench"),
        ("Size", "reading rate"),
    ):
        await page.click(f"a[href='#{view}']")
        await page.until(f"document.querySelector('main').innerHTML.includes({shown!r})")

        assert not await page.value(OVERFLOW), view


async def test_the_form_of_size_tells_faults_by_field_and_then_the_room(
    client: Client, page: Page
) -> None:
    await page.goto(f"{client.base_url}/ui#Size")
    await page.until("document.querySelector('form.size')")
    devices = await page.value(
        "[...document.querySelector('#devices').options].map((o) => o.value)"
    )
    assert set(devices) <= set(device_names())
    for name, value in (("context", "0"), ("answer", "20"), ("max_readers", "2")):
        await page.fill(f"#{name}", value)
    await page.fill("#pool_tokens", "1024")
    await page.click("form.size button")
    await page.until("document.querySelector('#context-fault').innerText")
    assert await page.value("document.querySelectorAll('form.size ~ div td').length") == 0

    await page.fill("#context", "200")
    await page.click("form.size button")
    await page.until("document.querySelectorAll('form.size ~ div td').length")
    assert await page.value("document.querySelector('#context-fault').innerText") == ""
    assert "requests of 220 tokens are read at once" in await page.text()
