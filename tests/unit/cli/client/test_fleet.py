"""What is shown of all executors."""

from typing import Any

from rich.console import Console

from cli.client.fleet import MAX_REQUESTS, fleet_picture


def make_executor(name: str = "e0", num_requests: int = 1, **load: float) -> dict[str, Any]:
    idle = {
        "num_running_reqs": 2,
        "num_newcomers": 3,
        "num_newcomer_tokens": 600,
        "prefill_tps": 400.0,
        "kv_unavailable_frac": 0.25,
        "deposit_s": 7.5,
        "reading_load_frac": 0.6,
    }
    request = {
        "gateway_id": "g1",
        "state": "decoding",
        "num_prompt_tokens": 11,
        "num_generated_tokens": 40,
        "num_delivered_tokens": 21,
        "num_deposited_tokens": 19,
    }
    return {
        "executor_id": name,
        "address": f"{name}:50051",
        "model": "m",
        "lease_ttl_s": 5.0,
        "load": idle | load,
        "requests": [request | {"request_id": f"{name}-r{k}"} for k in range(num_requests)],
    }


def shown(*executors: dict[str, Any]) -> list[list[str]]:
    """Return the words of each line."""
    console = Console(width=160, no_color=True)
    with console.capture() as capture:
        console.print(fleet_picture(executors))
    return [line.split() for line in capture.get().splitlines()]


def test_an_executor_and_its_requests_are_a_line_each() -> None:
    _, executor, _, request = shown(make_executor())

    assert executor == ["e0", "e0:50051", "m", "2", "3", "1.5", "s", "25%", "60%", "7.5", "s", "1"]
    assert request == ["e0-r0", "e0", "g1", "decoding", "11", "40", "21", "19"]


def test_what_was_not_measured_is_not_made_up() -> None:
    _, waiting, idle, *_ = shown(
        make_executor(prefill_tps=0.0), make_executor("e1", num_newcomer_tokens=0, prefill_tps=0.0)
    )

    assert waiting[5] == "?"
    assert idle[5:7] == ["0.0", "s"]


def test_of_many_requests_the_first_are_shown() -> None:
    lines = shown(make_executor(num_requests=MAX_REQUESTS + 2))

    assert lines[-1] == ["and", "2", "more"]
    assert len(lines) == 3 + MAX_REQUESTS + 1
