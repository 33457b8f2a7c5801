"""Answers as events, and the same body sent again with the ids that the client has of them."""

import json
import re
from typing import Any

from tests.gateways import Client

DONE = "[DONE]"

Body = dict[str, Any]


def with_ids(body: Body) -> Body:
    return body | {"return_token_ids": True}


def again(body: Body, ids: list[int], delivered: int | None = None) -> Body:
    resume = {"token_ids": ids} | ({} if delivered is None else {"delivered": delivered})
    return body | {"evenflow": body.get("evenflow", {}) | {"resume": resume}}


async def events_of(client: Client, path: str, body: Body) -> list[str]:
    answer = await client.http.post(path, json=body, headers={"x-request-id": "r"})
    assert answer.status_code == 200, answer.text
    return as_events(answer.text)


def as_events(text: str) -> list[str]:
    text = re.sub(r'"created":\d+', '"created":0', text)
    return [event.removeprefix("data: ") for event in text.split("\n\n") if event]


def ids_in(events: list[str]) -> list[int]:
    """Return the ids of the tokens that events tell."""
    told = [json.loads(event)["choices"] for event in events if event != DONE]
    return [id for choices in told for choice in choices for id in choice.get("token_ids", [])]


def behind(events: list[str], num_tokens: int) -> list[str]:
    """Return the events that come after so many tokens."""
    if not num_tokens:
        return events
    return next(events[k:] for k in range(len(events) + 1) if len(ids_in(events[:k])) == num_tokens)
