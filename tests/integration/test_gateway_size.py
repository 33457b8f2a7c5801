"""`evenflow size` over HTTP: the figures of the command, and faults by field."""

import sys

import pytest
from typer.testing import CliRunner

from services.gateway.http import sizing
from services.gateway.http.sizing import SIZE_PATH
from simulator.cli import app
from tests.gateways import Client, gateway_for
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
