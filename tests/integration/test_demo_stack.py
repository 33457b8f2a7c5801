"""The local stack under supervisor: it starts once, answers, and leaves nothing behind."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from demo.settings import PORTS, read_settings
from demo.snippets import snippets
from tests.models import exactness_model
from tests.redis_server import free_port

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.timeout(600)


class LocalStack:
    """`python -m demo ...` with ports and a run directory of its own."""

    def __init__(self, run_dir: Path) -> None:
        ports = {name: str(free_port()) for name in PORTS}
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("EVENFLOW_")}
        self.environment = inherited | {
            **ports,
            "EVENFLOW_RUN_DIR": str(run_dir),
            "EVENFLOW_MODEL": str(exactness_model()),
            "HF_HUB_OFFLINE": "1",
        }

    def demo(self, command: str, **changes: str) -> subprocess.CompletedProcess[str]:
        return self.shell(f"{sys.executable} -m demo {command}", **changes)

    def shell(self, script: str, **changes: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", "-euo", "pipefail", "-c", script],
            cwd=ROOT,
            env=self.environment | changes,
            capture_output=True,
            text=True,
            timeout=500,
            check=False,
        )

    def pids(self) -> set[int]:
        """Return every process that was started with this run directory."""
        own = f"EVENFLOW_RUN_DIR={self.environment['EVENFLOW_RUN_DIR']}"
        return {p.pid for p in psutil.process_iter() if own in _environment_of(p)}


def _environment_of(process: psutil.Process) -> list[str]:
    try:
        return [f"{name}={value}" for name, value in process.environ().items()]
    except psutil.Error:
        return []


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalStack]:
    stack = LocalStack(tmp_path_factory.mktemp("run"))
    up = stack.demo("up")
    try:
        assert up.returncode == 0, up.stdout + up.stderr
        yield stack
    finally:
        down = stack.demo("down")
    assert down.stdout == "stopped\n"
    assert stack.pids() == set()


def test_the_snippets_that_the_demo_prints_work_when_pasted(stack: LocalStack, monkeypatch) -> None:
    for name, value in stack.environment.items():
        monkeypatch.setenv(name, value)

    pasted = stack.shell("\n".join(snippets(read_settings(), "Hello?").splitlines()[3:]))

    assert pasted.returncode == 0, pasted.stdout + pasted.stderr
    assert "data: [DONE]" in pasted.stdout
    assert "[FINISH_REASON_LENGTH, 300 tokens]" in pasted.stderr  # the stubs' client


def test_the_engine_can_be_watched_until_the_watcher_leaves(stack: LocalStack) -> None:
    watched = stack.shell(f"timeout 30 {sys.executable} -m demo watch | grep -m 1 '^step '")

    assert "pool 0 of" in watched.stdout, watched.stdout + watched.stderr


def test_an_engine_that_is_not_there_cannot_be_watched(stack: LocalStack) -> None:
    watched = stack.demo("watch", EVENFLOW_EXECUTOR_GRPC_PORT=str(free_port()))

    assert watched.returncode == 1
    assert "the executor cannot be watched" in watched.stderr


def test_up_again_leaves_a_running_stack_alone(stack: LocalStack) -> None:
    before = stack.pids()

    again = stack.demo("up")

    assert again.returncode == 0, again.stdout + again.stderr
    assert stack.pids() == before


def test_a_taken_port_is_named_with_the_setting_that_moves_it(
    stack: LocalStack, tmp_path: Path
) -> None:
    second = stack.demo("up", EVENFLOW_RUN_DIR=str(tmp_path))

    assert second.returncode == 1
    assert stack.environment["EVENFLOW_GATEWAY_HTTP_PORT"] in second.stderr
    assert "EVENFLOW_GATEWAY_HTTP_PORT" in second.stderr
