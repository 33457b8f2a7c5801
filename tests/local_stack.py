"""`evenflow` and `python -m demo` as a user runs them, on free ports, in a directory of its own."""

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil

from cli.local.settings import PORTS
from lab.stack.ports import free_port
from lab.stack.processes import ROOT, command_of, wait_until

TIMEOUT_S = 3_000  # a guard against hangs


class LocalStack:
    """Commands with ports and a run directory of their own."""

    def __init__(self, run_dir: Path) -> None:
        ports = {name: str(free_port()) for name in PORTS}
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("EVENFLOW_")}
        self.environment = inherited | {
            **ports,
            "EVENFLOW_STATE_DIR": str(run_dir),
            "HF_HUB_OFFLINE": "1",
        }

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.environment['EVENFLOW_GATEWAY_HTTP_PORT']}"

    def evenflow(self, command: str, **changes: str) -> subprocess.CompletedProcess[str]:
        return self.shell(f"{sys.executable} -m cli {command}", **changes)

    def shell(self, script: str, **changes: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", "-euo", "pipefail", "-c", script],
            cwd=ROOT,
            env=self.environment | changes,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )

    def start_in_foreground(self, command: str, log: Path) -> "subprocess.Popen[str]":
        """Start a command that stays; what it prints goes to `log`."""
        with log.open("w") as output:
            return subprocess.Popen(
                [sys.executable, "-m", "cli", *command.split()],
                cwd=ROOT,
                env=self.environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )

    def pids(self, doing: tuple[str, ...] = ("",)) -> set[int]:
        """Return every process that was started from this directory, and has one of `doing` in its
        command.
        """
        own = self.environment["EVENFLOW_STATE_DIR"]
        return {
            p.pid
            for p in psutil.process_iter()
            if _run_dir_of(p).startswith(own) and any(part in command_of(p) for part in doing)
        }

    def kill(self) -> None:
        """Leave nothing, whatever has happened."""
        for pid in self.pids():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def wait_gone(self) -> None:
        """Wait until none of its processes is left."""
        wait_until(lambda: self.pids() == set(), "all processes have ended")


def _run_dir_of(process: psutil.Process) -> str:
    try:
        return str(process.environ().get("EVENFLOW_RUN_DIR", ""))
    except psutil.Error:
        return ""
