"""`evenflow size` over HTTP: the figures of the command, and faults by field."""

import asyncio
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from services.gateway.http import sizing
from services.gateway.http.sizing import SIZE_PATH
from simulator.cli import app
from tests.gateways import Client, gateway_for, until
from tests.model_configs import LLAMA_3_8B

ASKED = {
    "model": "llama-3-8b",
    "device": "a5000",
    "context": "200",
    "answer": 20,
    "policy": "evenflow",
    "max_readers": 2,
    "pool_tokens": 1_024,
}


async def test_the_form_says_what_the_command_says(client: Client) -> None:
    response = await client.http.post(SIZE_PATH, json=ASKED)
    options = [f"--{name.replace('_', '-')}={told}" for name, told in ASKED.items()]
    printed = CliRunner().invoke(app, ["size", *options]).output

    assert response.status_code == 200, response.text
    lines = [f"{word:20} {sentence}" for word, sentence in response.json()["said"]]
    assert lines == printed.splitlines()
    assert lines[0].startswith("room ")
    assert lines[-1].startswith("evenflow ")


async def test_a_config_is_a_model(client: Client) -> None:
    response = await client.http.post(SIZE_PATH, json={**ASKED, "model": "", "config": LLAMA_3_8B})

    assert response.status_code == 200, response.text
    told = dict(response.json()["said"])
    assert "8.03 G parameters" in told["model"]


async def test_a_fault_names_its_field(client: Client) -> None:
    for field, told in (("device", "no-such-device"), ("config", "text"), ("context", [8])):
        response = await client.http.post(SIZE_PATH, json={**ASKED, field: told})

        assert response.status_code == 400, response.text
        assert response.json()["error"]["param"] == field
        assert response.json()["error"]["message"]


@pytest.mark.logs("sizing_failed")
async def test_a_gateway_without_the_simulator_says_so(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sizing, "_PROGRAM", (sys.executable, "-m", "no_such_simulator"))
    response = await client.http.post(SIZE_PATH, json=ASKED)

    assert response.status_code == 503
    assert "the simulator is not installed" in response.json()["error"]["message"]


async def test_there_is_no_form_without_the_page(executor) -> None:
    async with gateway_for(executor, ui=False) as client:
        await client.wait_ready()

        assert (await client.http.post(SIZE_PATH, json=ASKED)).status_code == 404


def _waits(monkeypatch: pytest.MonkeyPatch, ready: Path) -> None:
    """Have a search last until it is killed. `ready` exists from when it runs."""
    program = f"import pathlib, time; pathlib.Path({str(ready)!r}).touch(); time.sleep(3600)"
    monkeypatch.setattr(sizing, "_PROGRAM", (sys.executable, "-c", program))


async def test_one_search_at_a_time_and_it_ends_when_its_asker_leaves(
    client: Client, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with monkeypatch.context() as slow:
        _waits(slow, tmp_path / "ready")
        first = asyncio.create_task(client.http.post(SIZE_PATH, json=ASKED))
        await until((tmp_path / "ready").exists)
        second = await client.http.post(SIZE_PATH, json=ASKED)
        first.cancel()
        await asyncio.wait([first])

    assert second.status_code == 429
    assert "another search" in second.json()["error"]["message"]
    async with asyncio.timeout(600.0):
        while (await client.http.post(SIZE_PATH, json={"context": "0"})).status_code == 429:  # noqa: ASYNC110
            await asyncio.sleep(0.1)


async def test_a_search_ends_after_its_time(
    client: Client, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    _waits(monkeypatch, tmp_path / "ready")
    monkeypatch.setattr(sizing, "TIMEOUT_S", 0.2)
    response = await client.http.post(SIZE_PATH, json=ASKED)

    assert response.status_code == 504
    assert "no size was found" in response.json()["error"]["message"]
