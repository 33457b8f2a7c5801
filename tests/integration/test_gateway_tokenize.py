"""Tokenising takes its turn: it is admitted and charged as requests are."""

import pytest

from services.gateway.live import dispatcher
from tests.fake_executor import MODEL
from tests.gateways import gateway_for

KEY = {"authorization": "Bearer sk-alice-0123456789"}
KEYS = """
[[keys]]
name = "alice"
key = "sk-alice-0123456789"
tokens_per_minute = 100
"""
PATHS = {"/tokenize": {"prompt": "x" * 400}, "/detokenize": {"tokens": [97] * 100}}


@pytest.mark.parametrize(("path", "body"), PATHS.items())
async def test_it_counts_for_a_key(executor, tmp_path, path, body) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(KEYS)
    async with gateway_for(executor, api_keys_file=file) as client:
        await client.wait_ready()
        answers = [
            await client.http.post(path, json={"model": MODEL} | body, headers=KEY)
            for _ in range(2)
        ]

    assert [answer.status_code for answer in answers] == [200, 429]


@pytest.mark.parametrize(("path", "body"), PATHS.items())
async def test_above_so_many_at_a_time_and_in_a_drain_it_is_refused(
    client, monkeypatch, path, body
) -> None:
    monkeypatch.setattr(dispatcher, "MAX_ASIDE", 0)
    too_many = await client.http.post(path, json={"model": MODEL} | body)
    monkeypatch.undo()
    taken = await client.http.post(path, json={"model": MODEL} | body)
    client.gateway.dispatcher.start_draining()
    draining = await client.http.post(path, json={"model": MODEL} | body)

    assert [too_many.status_code, taken.status_code, draining.status_code] == [429, 200, 503]


@pytest.mark.parametrize(
    ("path", "longest", "too_long"),
    [
        ("/tokenize", {"prompt": "x" * 8_192 * 4}, {"prompt": "x" * 8_193 * 4}),
        ("/detokenize", {"tokens": [97] * 8_192}, {"tokens": [97] * 8_193}),
    ],
)
async def test_it_takes_about_two_contexts(client, path, longest, too_long) -> None:
    """The context has 4,096 tokens, and text is taken for a token per four characters."""
    taken = await client.http.post(path, json={"model": MODEL} | longest)
    refused = await client.http.post(path, json={"model": MODEL} | too_long)

    assert (taken.status_code, refused.status_code) == (200, 400)
    assert refused.json()["error"]["code"] == "context_length_exceeded"
