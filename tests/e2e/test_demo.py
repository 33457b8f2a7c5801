"""The demo as `make demo` runs it, shorter: the real model, and each part of the show."""

import json
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from demo.model import DIRECTORY
from demo.readers import READERS
from demo.show import SHORT
from demo.stacks import POOL_TOKENS
from services.pacing.deposit import next_due_s
from tests.local_stack import LocalStack

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    run_dir = tmp_path_factory.mktemp("run")
    stack, seen = LocalStack(run_dir), run_dir / "seen.json"
    try:
        demo = stack.shell(f"{sys.executable} -m demo --short --json {seen}")
        assert demo.returncode == 0, demo.stdout + demo.stderr
        assert "evenflow chat" in demo.stdout
        yield {**json.loads(seen.read_text()), "stdout": demo.stdout, "stack": stack}
        assert stack.evenflow("down").stdout == "stopped\n"
        assert stack.pids() == set()
    finally:
        stack.kill()


def test_the_model_is_a_real_one_that_nobody_trained_here() -> None:
    config = json.loads((DIRECTORY / "config.json").read_text())

    assert (config["num_hidden_layers"], config["vocab_size"]) == (30, 49_152)


def test_the_first_answer_was_paced(shown: dict[str, Any]) -> None:
    arrived_s = shown["paced"]["arrived_s"]

    assert shown["paced"]["num_tokens"] == SHORT.num_tokens
    # Unpaced they would come in a fraction of that; a first token that is late shortens the rest.
    assert arrived_s[-1] - arrived_s[0] > 0.5 * (SHORT.num_tokens - 1) / 11


def test_the_long_prompt_was_answered_with_layers_offloaded(shown: dict[str, Any]) -> None:
    long = shown["long"]

    assert long["answer"]["num_prompt_tokens"] > 2.5 * POOL_TOKENS
    assert long["answer"]["num_tokens"] == SHORT.num_long_tokens
    assert long["during"]["num_offloaded"] > 0
    assert long["after"]["h2d_bytes"] > long["before"]["h2d_bytes"]


@pytest.mark.parametrize("whose", ["readers", "readers_on_stock"])
def test_four_readers_got_all_their_tokens_at_their_pace(shown: dict[str, Any], whose: str) -> None:
    assert [felt["reader"]["name"] for felt in shown[whose]] == [one.name for one in READERS]
    for felt in shown[whose]:
        arrived_s, rate_tps = felt["answer"]["arrived_s"], felt["reader"]["rate_tps"]
        assert felt["answer"]["num_tokens"] == SHORT.num_readers_tokens
        assert arrived_s[-1] - arrived_s[0] > 0.5 * (len(arrived_s) - 1) / rate_tps


def test_the_four_readers_were_in_time(shown: dict[str, Any]) -> None:
    # They read slower than the engine makes tokens, whatever this machine's speed.
    num_late = num_gaps = 0
    for felt in shown["readers"]:
        arrived_s, interval_s = felt["answer"]["arrived_s"], 1 / felt["reader"]["rate_tps"]
        due_s = arrived_s[0]
        for time_s in arrived_s[1:]:
            num_late += time_s > due_s + 2 * interval_s
            num_gaps += 1
            due_s = next_due_s(due_s, time_s, interval_s)

    assert num_late <= num_gaps / 4


def test_what_they_felt_stands_in_one_table_with_its_lambda(shown: dict[str, Any]) -> None:
    assert f"lambda {shown['link_share']:.0%}" in shown["stdout"]
    for reader in READERS:
        assert f"\u2502 {reader.name} " in shown["stdout"]
