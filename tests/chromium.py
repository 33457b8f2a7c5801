"""Headless Chromium, as the machine has it, driven over the DevTools protocol."""

import asyncio
import json
import os
import shutil
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from websockets.asyncio.client import ClientConnection, connect

EXECUTABLE = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)
needs_chromium = pytest.mark.skipif(EXECUTABLE is None, reason="there is no Chromium here")

TIMEOUT_S = 120.0  # against hangs only
_OPTIONS = [
    "--headless=new",
    "--no-sandbox",  # tests may run as root
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-extensions",
    "--remote-debugging-port=0",
]
PHONE = (390, 844)  # pixels


class Page:
    """One page. Whatever it complains of is in `complaints`: of scripts and of its policy."""

    def __init__(self, socket: ClientConnection) -> None:
        self._socket = socket
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self.complaints: list[str] = []
        self.fetched: list[str] = []  # addresses

    async def read(self) -> None:
        """Take in what the browser says until it has ended."""
        async for said in self._socket:
            message = json.loads(said)
            if "id" in message:
                self._answers.pop(message["id"]).set_result(message)
            else:
                self._hear(message["method"], message["params"])

    def _hear(self, event: str, told: dict[str, Any]) -> None:
        if event == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(told["exceptionDetails"]))
        if event == "Log.entryAdded" and told["entry"]["source"] == "security":
            self.complaints.append(told["entry"]["text"])
        if event == "Network.requestWillBeSent":
            self.fetched.append(told["request"]["url"])

    async def command(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Have the browser do something; AssertionError if it cannot."""
        number = max(self._answers, default=0) + 1
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        await self._socket.send(json.dumps({"id": number, "method": method, "params": parameters}))
        async with asyncio.timeout(TIMEOUT_S):
            message = await answer
        assert "error" not in message, message
        result: dict[str, Any] = message["result"]
        return result

    async def goto(self, url: str) -> None:
        await self.command("Page.navigate", url=url)
        await self.until(f"location.href == {json.dumps(url)} && document.readyState == 'complete'")

    async def value(self, expression: str) -> Any:
        """Return what JavaScript comes to, promises awaited."""
        told = await self.command(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in told, told
        return told["result"].get("value")

    async def until(self, expression: str) -> None:
        """Wait until JavaScript comes to something true."""
        async with asyncio.timeout(TIMEOUT_S):
            while not await self.value(f"Boolean({expression})"):  # noqa: ASYNC110
                await asyncio.sleep(0.02)

    async def text(self) -> str:
        return str(await self.value("document.body.innerText"))

    async def click(self, selector: str) -> None:
        await self.value(f"document.querySelector({json.dumps(selector)}).click()")

    async def fill(self, selector: str, value: str) -> None:
        """Enter a value as its reader would, events and all."""
        await self.value(
            f"(e => {{ e.value = {json.dumps(value)};"
            "for (const kind of ['input', 'change'])"
            " e.dispatchEvent(new Event(kind, {bubbles: true})); })"
            f"(document.querySelector({json.dumps(selector)}))"
        )

    async def hover(self, selector: str, x: float, y: float) -> None:
        """Move the mouse to a place in an element, in fractions of its size."""
        await self._mouse("mouseMoved", selector, (x, y), button="none")

    async def drag(
        self, selector: str, begin: tuple[float, float], end: tuple[float, float]
    ) -> None:
        """Move the mouse through an element with its button down."""
        await self._mouse("mousePressed", selector, begin)
        await self._mouse("mouseMoved", selector, end)
        await self._mouse("mouseReleased", selector, end)

    async def _mouse(
        self, kind: str, selector: str, place: tuple[float, float], *, button: str = "left"
    ) -> None:
        rect = await self.value(
            f"(r => [r.x, r.y, r.width, r.height])"
            f"(document.querySelector({json.dumps(selector)}).getBoundingClientRect())"
        )
        x, y = (rect[axis] + place[axis] * (rect[2 + axis] - 1) for axis in (0, 1))
        await self.command(
            "Input.dispatchMouseEvent", type=kind, x=x, y=y, button=button, clickCount=1
        )

    async def resize(self, width: int, height: int) -> None:
        await self.command(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )

    async def prefer(self, theme: str) -> None:
        """Have the reader's machine be "light" or "dark"."""
        feature = {"name": "prefers-color-scheme", "value": theme}
        await self.command("Emulation.setEmulatedMedia", features=[feature])


class Browser:
    """A browser's process."""

    def __init__(self, profile: Path) -> None:
        """Start one that writes into `profile` only."""
        assert EXECUTABLE is not None
        self._process = subprocess.Popen(
            [EXECUTABLE, *_OPTIONS, f"--user-data-dir={profile}", "about:blank"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=os.environ | {"HOME": str(profile)},
            start_new_session=True,
        )
        self._port_file = profile / "DevToolsActivePort"

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait()

    @asynccontextmanager
    async def page(self) -> AsyncIterator[Page]:
        """Show one more page while the block runs."""
        port, path = await self._endpoint()
        base = f"ws://127.0.0.1:{port}"
        async with connect(f"{base}{path}", proxy=None) as browser:
            opening = {"id": 1, "method": "Target.createTarget", "params": {"url": "about:blank"}}
            await browser.send(json.dumps(opening))
            target = json.loads(await browser.recv())["result"]["targetId"]
        async with connect(f"{base}/devtools/page/{target}", max_size=None, proxy=None) as socket:
            page = Page(socket)
            reading = asyncio.create_task(page.read())
            for domain in ("Page", "Runtime", "Log", "Network"):
                await page.command(f"{domain}.enable")
            try:
                yield page
                await page.command("Page.close")
            finally:
                reading.cancel()
                await asyncio.wait([reading])

    async def _endpoint(self) -> tuple[str, str]:
        """Return the port and the path at which a browser that starts is spoken to."""
        async with asyncio.timeout(TIMEOUT_S):
            while not (said := self._said()).count("\n"):  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        port, path = said.split("\n")[:2]
        return port, path

    def _said(self) -> str:
        return self._port_file.read_text() if self._port_file.exists() else ""
