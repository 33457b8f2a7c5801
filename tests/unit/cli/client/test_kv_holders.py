"""What is shown of what holds KV."""

from copy import deepcopy
from typing import Any

from rich.console import Console

from cli.client.kv_holders import holders_picture
from services.gateway.executors.kv_holders import EXAMPLE


def shown(holders: Any) -> list[str]:
    """Return the lines, with one space between two words."""
    console = Console(width=200, no_color=True)
    with console.capture() as capture:
        console.print(holders_picture(holders))
    return [" ".join(line.split()) for line in capture.get().splitlines()]


def test_executors_classes_requests_and_sessions_are_a_line_each() -> None:
    _, executor, _, share, _, request, _, session = shown(EXAMPLE)

    assert executor == "executor-0:50051 1 1"
    assert share == "alice agent 1 1 0 8192 0 12"
    assert request == (
        "9f2c4e alice agent-7 agent parked 1.5 s 0 8192 0 12 there is no room for it yet"
    )
    assert session == "agent-3 alice 4096 512 4096 280 s"


def test_what_is_not_known_is_not_made_up() -> None:
    holders: Any = deepcopy(EXAMPLE)
    holders["executors"][0]["is_connected"] = False
    holders["shares"][0] |= {"api_key": "", "request_class": ""}
    holders["sessions"][0] |= {
        "session_id": "",
        "num_pool_tokens": None,
        "num_host_tokens": None,
        "retained_for_s": None,
    }

    _, executor, _, share, *_, session = shown(holders)

    assert executor == "executor-0:50051 ? ?"
    assert share.startswith("- - 1")
    assert session == "- alice 4096 ? ? ?"
