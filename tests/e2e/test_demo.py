"""The demo as `make demo` runs it, shorter: the real model, and each part of the show."""

import json
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from demo.model import DIRECTORY
from demo.readers import READERS
from demo.show import READING_RATE_TPS, SHORT
from demo.stacks import POOL_TOKENS
from services.pacing.deposit import next_due_s
from tests.local_stack import LocalStack

pytestmark = [pytest.mark.timeout(3_600), pytest.mark.nightly]


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
        stack.wait_gone()
    finally:
        stack.kill()


@pytest.mark.usefixtures("shown")  # the demo makes it
def test_the_model_is_a_real_one_that_nobody_trained_here() -> None:
    config = json.loads((DIRECTORY / "config.json").read_text())

    assert (config["num_hidden_layers"], config["vocab_size"]) == (30, 49_152)


def test_the_first_answer_was_paced(shown: dict[str, Any]) -> None:
    assert shown["paced"]["num_tokens"] == SHORT.num_tokens
    assert_paced(shown["paced"], READING_RATE_TPS)


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
        assert felt["answer"]["num_tokens"] == SHORT.num_readers_tokens
        assert_paced(felt["answer"], felt["reader"]["rate_tps"])


def assert_paced(answer: dict[str, Any], rate_tps: float) -> None:
    """No token came before it was due, which is not before its place after the request."""
    for k, arrived_s in enumerate(answer["arrived_s"]):
        assert arrived_s - answer["sent_s"] >= k / rate_tps


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


def test_it_says_where_the_page_is_and_a_line_for_each_phase(shown: dict[str, Any]) -> None:
    lines = shown["stdout"].splitlines()
    gateway = shown["stack"].environment["EVENFLOW_GATEWAY_HTTP_PORT"]

    assert any(line.startswith(f"a page       http://127.0.0.1:{gateway}/ui") for line in lines)
    assert len([line for line in lines if line.startswith("first token after ")]) == 2
    assert [line for line in lines if line.startswith("step ")] == []  # nothing of each second
    assert lines[-1].startswith("\u2514")  # the table comes last


def test_what_they_felt_stands_in_one_table_with_its_lambda(shown: dict[str, Any]) -> None:
    assert f"lambda {shown['link_share']:.0%}" in shown["stdout"]
    for reader in READERS:
        assert f"\u2502 {reader.name} " in shown["stdout"]
