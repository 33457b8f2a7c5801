"""`evenflow serve` and its sisters: one command starts the stack, and leaves nothing behind."""

import json
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from cli.local.settings import PORTS, read_settings
from demo.snippets import snippets
from lab.models import exactness_model
from lab.stack.ports import free_port
from lab.stack.processes import START_TIMEOUT_S, wait_until
from services.kit.settings import BAD_SETTINGS_EXIT_CODE
from tests.local_stack import LocalStack

ENGINE = "--max-model-len 2048 --max-num-seqs 32 --kv-cache-memory-bytes 64M --max-logprobs 3"
HTTP_TIMEOUT_S = 300.0  # a guard against hangs

pytestmark = pytest.mark.timeout(3_600)


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalStack]:
    """A stack in the foreground, which Ctrl-C ends with all its processes."""
    run_dir = tmp_path_factory.mktemp("run")
    stack, log = LocalStack(run_dir), run_dir / "log"
    serving = stack.start_in_foreground(f"serve {exactness_model()} {ENGINE}", log)
    try:

        def is_ready() -> bool:
            assert serving.poll() is None, log.read_text()
            return "Ctrl-C stops it" in log.read_text()

        wait_until(is_ready, "serving", START_TIMEOUT_S)
        assert get(stack, "/ready").status_code == 200
        yield stack
        serving.send_signal(signal.SIGINT)
        assert serving.wait(timeout=START_TIMEOUT_S) == 0, log.read_text()
        assert log.read_text().endswith("stopped\n")
        stack.wait_gone()
    finally:
        stack.kill()


def services_of(stack: LocalStack) -> set[int]:
    """Return the process ids of supervisord and of what it has started, not of their helpers."""
    return stack.pids(doing=("supervisord", "redis-server", "-m services."))


def get(stack: LocalStack, path: str) -> httpx.Response:
    return httpx.get(f"{stack.base_url}{path}", timeout=HTTP_TIMEOUT_S)


def test_a_variable_that_the_model_s_template_does_not_read_is_named(stack: LocalStack) -> None:
    (model,) = get(stack, "/v1/models").json()["data"]
    turns = [{"role": "user", "content": "Hi"}]
    asked = {"model": model["id"], "messages": turns, "max_tokens": 1}

    answer = httpx.post(
        f"{stack.base_url}/v1/chat/completions",
        json={**asked, "chat_template_kwargs": {"no_such_variable": 1}},
        timeout=HTTP_TIMEOUT_S,
    )

    assert answer.status_code == 200, answer.text
    assert answer.headers["x-evenflow-ignored"] == "chat_template_kwargs.no_such_variable"


def test_options_of_vllm_reach_the_engine(stack: LocalStack) -> None:
    (model,) = get(stack, "/v1/models").json()["data"]
    asked = {"model": model["id"], "prompt": "Hello", "max_tokens": 1}

    answers = [
        httpx.post(
            f"{stack.base_url}/v1/completions",
            json={**asked, "logprobs": number},
            timeout=HTTP_TIMEOUT_S,
        )
        for number in (3, 4)
    ]

    assert (model["id"], model["max_model_len"]) == ("exactness", 2048)
    assert [answer.status_code for answer in answers] == [200, 400]  # --max-logprobs, no setting


def test_what_to_expect_is_said_at_the_start(stack: LocalStack) -> None:
    log = (Path(stack.environment["EVENFLOW_STATE_DIR"]) / "log").read_text()

    assert "policy       vllm: run order fcfs, no layer leaves the pool" in log
    assert "layer-wise KV off" in log


def test_the_snippets_that_the_demo_prints_work_when_pasted(stack: LocalStack) -> None:
    settings = read_settings({**stack.environment, "EVENFLOW_EXECUTOR_MODEL": "exactness"})
    commands = snippets(settings, "Hello?").partition("# curl")[2]

    pasted = stack.shell(f"#{commands}")

    assert pasted.returncode == 0, pasted.stdout + pasted.stderr
    assert "data: [DONE]" in pasted.stdout
    assert "[FINISH_REASON_LENGTH, 300 tokens]" in pasted.stderr  # the stubs' client


def test_the_engine_can_be_watched_until_the_watcher_leaves(stack: LocalStack) -> None:
    # Until the engine has forgotten the requests before it.
    watched = stack.shell("timeout 600 .venv/bin/evenflow watch | grep -m 1 '^step .*pool 0 of'")

    assert "pool 0 of" in watched.stdout, watched.stdout + watched.stderr


def test_an_engine_that_is_not_there_cannot_be_watched(stack: LocalStack) -> None:
    watched = stack.evenflow(f"watch --executor 127.0.0.1:{free_port()}")

    assert watched.returncode == 1
    assert "the executor cannot be watched" in watched.stderr


def test_up_again_leaves_a_running_stack_alone(stack: LocalStack) -> None:
    before = services_of(stack)

    again = stack.evenflow(f"serve {exactness_model()} {ENGINE} --detach")

    assert again.returncode == 0, again.stdout + again.stderr
    assert services_of(stack) == before


def test_a_second_one_in_the_foreground_is_refused(stack: LocalStack) -> None:
    before = services_of(stack)

    second = stack.evenflow(f"serve {exactness_model()}")

    assert second.returncode == 1
    assert "the stack exactness already runs at" in second.stderr
    assert services_of(stack) == before


def test_a_taken_port_is_named_with_the_setting_that_moves_it(
    stack: LocalStack, tmp_path: Path
) -> None:
    second = stack.evenflow(f"serve {exactness_model()} --detach", EVENFLOW_STATE_DIR=str(tmp_path))

    assert second.returncode == 1
    assert stack.environment["EVENFLOW_GATEWAY_HTTP_PORT"] in second.stderr
    assert "EVENFLOW_GATEWAY_HTTP_PORT" in second.stderr
    assert "Traceback" not in second.stderr


def test_a_stack_at_the_address_of_another_is_refused_with_what_to_do(stack: LocalStack) -> None:
    second = stack.evenflow(f"serve {exactness_model()} {ENGINE} --name other --detach")

    assert second.returncode == 1
    assert "is that of the stack exactness, which serves exactness: --port gives" in second.stderr


@pytest.mark.nightly
def test_a_second_stack_runs_beside_the_first_and_leaves_it_when_it_is_stopped(
    stack: LocalStack,
) -> None:
    first, port = services_of(stack), free_port()
    alone = {k: v for k, v in stack.environment.items() if k not in PORTS}

    def evenflow(command: str) -> subprocess.CompletedProcess[str]:
        return stack.shell(f"env -i {quoted(alone)} {sys.executable} -m cli {command}")

    started = evenflow(
        f"serve {exactness_model()} {ENGINE} --served-model-name other --port {port} --detach "
        "--layerwise-kv --kv-host-memory 32M"
    )
    try:
        assert started.returncode == 0, started.stdout + started.stderr
        assert services_of(stack) > first
        for told in (
            "KV pool ",
            "GB/s to the pool as measured; lambda ",
            "policy       evenflow: ",
        ):
            assert told in started.stdout
        assert "Layer-wise KV has " in started.stdout  # nothing to do, or little room
        asked = evenflow("chat --max-tokens 3")
        answers = [
            evenflow(f"chat --max-tokens 3 --rate 0 --name {name} <<< Hello")
            for name in ("exactness", "other")
        ]
        assert "several stacks run here; --name says which" in asked.stderr
        assert [one.returncode for one in answers] == [0, 0], answers
        assert all("3 tokens" in one.stdout for one in answers), answers
    finally:
        stopped = evenflow("down --name other")

    assert stopped.stdout == "stopped\n", stopped.stderr
    assert services_of(stack) == first
    assert get(stack, "/ready").status_code == 200
    assert "3 tokens" in evenflow("chat --max-tokens 3 --rate 0 <<< Hello").stdout


def quoted(environment: dict[str, str]) -> str:
    return " ".join(shlex.quote(f"{name}={value}") for name, value in environment.items())


def test_a_process_that_does_not_start_ends_all_with_its_own_last_words(tmp_path: Path) -> None:
    stack = LocalStack(tmp_path / "run")

    failed = stack.evenflow(f"serve {exactness_model()} --max-model-len 1000000")

    assert failed.returncode == 1
    assert "executor does not start:\n" in failed.stderr
    assert "max_model_len" in failed.stderr
    assert "Traceback" not in failed.stderr
    stack.wait_gone()


def test_a_model_of_a_kind_that_layerwise_kv_does_not_take_starts_nothing(tmp_path: Path) -> None:
    """All that there is of it is a `config.json`: nothing else is looked at."""
    stack = LocalStack(tmp_path / "run")
    config = {"num_hidden_layers": 4, "num_attention_heads": 4, "hidden_size": 64}
    (tmp_path / "config.json").write_text(json.dumps({**config, "sliding_window": 512}))

    refused = stack.evenflow(f"serve {tmp_path} --layerwise-kv")

    assert refused.returncode == BAD_SETTINGS_EXIT_CODE
    assert "error: layer-wise KV does not work with sliding windows only" in refused.stderr
    assert "serve it without --layerwise-kv" in refused.stderr
    assert "executor" not in refused.stdout
    stack.wait_gone()


def test_a_setting_that_a_process_refuses_is_named(tmp_path: Path) -> None:
    stack = LocalStack(tmp_path / "run")

    failed = stack.evenflow(f"serve {exactness_model()}", EVENFLOW_GATEWAY_SSE_KEEPALIVE_S="soon")

    assert failed.returncode == 1
    assert "gateway does not start:\n" in failed.stderr
    assert "EVENFLOW_GATEWAY_SSE_KEEPALIVE_S" in failed.stderr
    stack.wait_gone()
