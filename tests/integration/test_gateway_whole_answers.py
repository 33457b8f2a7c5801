"""Answers that are kept until they are complete."""

import pytest

from services.gateway.http import answers
from tests.gateways import chat_body

URL = "/v1/chat/completions"
SCORED = {"logprobs": True, "top_logprobs": 4}  # six entries for each of three tokens


@pytest.mark.parametrize(("most", "status"), [(36, 200), (35, 400)])
async def test_what_is_kept_is_bounded_over_all_answers(
    client, executor, monkeypatch, most, status
) -> None:
    monkeypatch.setattr(answers, "MAX_WHOLE_ENTRIES", most)

    whole = await client.http.post(URL, json=chat_body(n=2, **SCORED))
    streamed = await client.http.post(URL, json=chat_body(n=2, stream=True, **SCORED))
    await client.wait_idle()

    assert whole.status_code == status
    if status == 400:
        assert whole.json()["error"]["param"] == "stream"
    assert streamed.text.endswith("data: [DONE]\n\n")


async def test_large_answers_are_written_as_small_ones_are(client, monkeypatch) -> None:
    small = await client.http.post(URL, json=chat_body(n=2, **SCORED))
    monkeypatch.setattr(answers, "LARGE_WHOLE_ENTRIES", 1)
    large = await client.http.post(URL, json=chat_body(n=2, **SCORED))

    assert large.json()["choices"] == small.json()["choices"]
    assert large.json()["usage"] == small.json()["usage"]
