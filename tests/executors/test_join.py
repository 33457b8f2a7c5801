"""`evenflow join`: a second executor of a stack that runs takes over what the first answers."""

import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from cli.client.endpoint import endpoint_at
from cli.client.fleet import Executor, read_fleet
from lab.models import exactness_model
from lab.stack.processes import START_TIMEOUT_S, wait_until
from tests.local_stack import LocalStack

ENGINE = (
    "--dtype float32 --max-model-len 2048 --max-num-seqs 8 --kv-cache-memory-bytes 64M "
    "--layerwise-kv --kv-host-memory 64M"
)
READ_TPS, FAST_TPS = 100.0, 1_000.0
NUM_TOKENS = 1_500  # far more than the first executor has made when it is killed
NUM_BEFORE = 12
HTTP_TIMEOUT_S = 300.0  # a guard against hangs

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(3_600)]


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[LocalStack]:
    """A stack with one executor."""
    stack = LocalStack(tmp_path / "run")
    try:
        started = stack.evenflow(f"serve {exactness_model()} {ENGINE} --detach")
        assert started.returncode == 0, started.stdout + started.stderr
        yield stack
        assert stack.evenflow("down").stdout == "stopped\n"
        stack.wait_gone()  # what has joined, too
    finally:
        stack.kill()


def fleet_of(stack: LocalStack) -> list[Executor]:
    return list(read_fleet(endpoint_at(stack.base_url, "")))


@contextmanager
def joined_to(stack: LocalStack, log: Path) -> Iterator["subprocess.Popen[str]"]:
    """Start a second executor; give it when the gateway has it."""
    joined = stack.start_in_foreground("join", log)

    def is_there() -> bool:
        assert joined.poll() is None, log.read_text()
        return gateway_log(stack).count('"executor_connected"') == 2

    try:
        wait_until(is_there, "the gateway has both executors", START_TIMEOUT_S)
        yield joined
    finally:
        joined.kill()
        joined.wait()


def joined_id(log: Path) -> str:
    return log.read_text().split()[1]


def gateway_log(stack: LocalStack) -> str:
    (log,) = Path(stack.environment["EVENFLOW_STATE_DIR"]).glob("*/logs/gateway.log")
    return log.read_text()


def answer(
    stack: LocalStack, *, rate_tps: float, after: Callable[[], None] = lambda: None
) -> tuple[str, dict[str, Any]]:
    """Return a text and what is said of it at its end; `after` is called amid the answer."""
    body = {
        "model": "exactness",
        "prompt": "Tell me of the sea.",
        "max_tokens": NUM_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "evenflow": {"consumption_rate_tps": rate_tps},
    }
    text, num_events, told = "", 0, dict[str, Any]()
    url = f"{stack.base_url}/v1/completions"
    with httpx.stream("POST", url, json=body, timeout=HTTP_TIMEOUT_S) as stream:
        assert stream.status_code == 200, stream.read()
        for line in stream.iter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            assert "error" not in event, event
            text += "".join(choice["text"] for choice in event["choices"])
            told |= event.get("evenflow") or {}
            num_events += 1
            if num_events == NUM_BEFORE:
                after()
    return text, told


def test_an_answer_goes_on_at_the_one_that_has_joined_when_the_one_that_gives_it_is_killed(
    stack: LocalStack, tmp_path: Path
) -> None:
    undisturbed, _ = answer(stack, rate_tps=FAST_TPS)
    (first,) = stack.pids(doing=("-m services.executor",))
    log = tmp_path / "join.log"
    with joined_to(stack, log) as joined:

        def kill_the_one_that_answers() -> None:
            def answering() -> list[Executor]:
                return [one for one in fleet_of(stack) if one["requests"]]

            wait_until(lambda: bool(answering()), "the tracker knows it", START_TIMEOUT_S)
            (one,) = answering()
            os.kill(joined.pid if one["executor_id"] == joined_id(log) else first, signal.SIGKILL)

        text, told = answer(stack, rate_tps=READ_TPS, after=kill_the_one_that_answers)

    assert text == undisturbed
    assert (told["moves"], told["continued"]) == (1, "identical")
