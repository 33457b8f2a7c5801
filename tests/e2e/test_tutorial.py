"""Every command of docs/tutorial.md, in its order, on a stack of its own."""

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from cli.local.settings import PORTS
from lab.stack.ports import free_port
from lab.stack.processes import ROOT
from tests.local_stack import LocalStack

TUTORIAL = (ROOT / "docs/tutorial.md").read_text()
COMMANDS = re.findall(r"^```bash\n(.*?)^```", TUTORIAL, re.MULTILINE | re.DOTALL)
# What stands there of a machine on which nothing else runs, and what it is here.
PORT, SECOND_PORT, RESULTS = "localhost:8000", "--port 8001", ".cache/tutorial"


def test_the_shell_understands_each_command() -> None:
    assert len(COMMANDS) == 7
    checked = subprocess.run(
        ["bash", "-n"], input="\n".join(COMMANDS), capture_output=True, text=True, check=False
    )

    assert (checked.returncode, checked.stderr) == (0, "")


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[list[str], Path]]:
    """What each step printed, and the folder of results."""
    run_dir, results = tmp_path_factory.mktemp("run"), tmp_path_factory.mktemp("results")
    stack, port = LocalStack(run_dir), free_port()
    for name in PORTS:
        del stack.environment[name]  # a user states none
    first = {"EVENFLOW_GATEWAY_HTTP_PORT": str(port)}  # 8000 may be another's
    answers = []
    try:
        for step in COMMANDS:
            here = step.replace(PORT, f"localhost:{port}").replace(RESULTS, str(results))
            here = here.replace(SECOND_PORT, f"--port {free_port()}")
            done = stack.shell(f"set +o pipefail  # a user's shell\n{here}", **first)
            first = {}
            assert done.returncode == 0, f"{here}\n{done.stdout}\n{done.stderr}"
            answers.append(done.stdout)
        stack.wait_gone()
        yield answers, results
    finally:
        stack.kill()


@pytest.mark.nightly
@pytest.mark.timeout(3_600)
def test_each_step_does_what_the_tutorial_says(said: tuple[list[str], Path]) -> None:
    (served, streamed, filled, watched, compared, reported, stopped), results = said

    pool = re.search(r"^KV pool +(\d+) tokens", served, re.MULTILINE)
    assert pool is not None, served
    assert 650 < int(pool[1]) < 750
    assert "policy       evenflow" in served
    assert "data: [DONE]" in streamed
    assert "tokens/s of 8" in streamed
    assert "What The Readers Felt" in filled
    assert "deposit" in watched
    assert "policy       vllm" in compared
    assert "room " in reported
    assert stopped == "stopped\n"
    for name in ("evenflow.json", "vllm.json"):
        assert json.loads((results / name).read_text())["completed"] == 8, name
    assert "<html" in (results / "report.html").read_text()
