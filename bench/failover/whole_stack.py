"""Two executors, two gateways, planner, tracker and Redis."""

import signal
from collections.abc import Sequence
from pathlib import Path

from bench.document import Row
from bench.failover.asked import Got, ask_all, load
from bench.failover.site import settings_of_load
from bench.gateway.heavy_requests import Edge
from lab.stack.logs import log_lines
from lab.stack.processes import MODEL, Stack, kind_of, wait_until

GATEWAYS = ("gateway", "gateway-2")
EXECUTORS = ("executor", "executor-2")
FURTHER = (GATEWAYS[1], EXECUTORS[1])
CONNECTIONS = [len(EXECUTORS)] * len(GATEWAYS)


def stack_in(folder: Path, **settings: object) -> Stack:
    """Return it all, not started; `settings` as of `Stack`."""
    of_load = {f"EXECUTOR_{name}": value for name, value in settings_of_load(folder).items()}
    return Stack(folder, further=FURTHER, **of_load, **settings)


def edges_of(stack: Stack) -> list[Edge]:
    return [Edge(stack.url(name), stack.address(name), MODEL) for name in GATEWAYS]


def start_all(stack: Stack) -> None:
    """Start everything, and wait until each gateway has all executors."""
    stack.start_all()
    wait_until(lambda: num_connected(stack) == CONNECTIONS, "all are connected")


async def undisturbed(edge: Edge, num_tokens: int) -> dict[str, Got]:
    """Return the answers of a load while nothing happens."""
    requests = load(MODEL, num_tokens=num_tokens)
    await ask_all(edge, requests)  # forms are compiled
    answers = await ask_all(edge, requests)
    assert not any(got.error for got in answers.values()), answers
    return answers


def restart(stack: Stack, name: str) -> None:
    """Ask a process to end, start it again, and wait until all others have it back."""
    before = num_connected(stack)
    stack.kill(name, signal.SIGTERM)
    start_again(stack, name, before)


def start_again(stack: Stack, name: str, before: Sequence[int]) -> None:
    """Start a process that has ended, and wait until others have it, `before` being
    `num_connected` before it ended.
    """
    stack.start(name)
    if kind_of(name) == "executor":
        wait_until(
            lambda: all(now > num for now, num in zip(num_connected(stack), before, strict=True)),
            "the executor is connected",
        )


def num_connected(stack: Stack) -> list[int]:
    """Return how often an executor was connected, by gateway."""
    return [len(told(stack, name, "executor_connected")) for name in GATEWAYS]


def told(stack: Stack, name: str, event: str) -> list[Row]:
    """Return what a process' log says of an event."""
    return [line for line in log_lines(stack.log(name)) if line.get("event") == event]
