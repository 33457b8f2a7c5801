"""The local stack: start, watch and stop the processes of supervisord.conf."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, cast
from xmlrpc.client import Fault, ServerProxy

import psutil
from supervisor.xmlrpc import SupervisorTransport

from cli.local.last_words import last_words
from cli.local.preflight import PreflightError, require_free_ports
from cli.local.settings import ROOT, StackSettings

READY_TIMEOUT_S = 1_800.0  # a model from the hub is downloaded first
STOP_TIMEOUT_S = 150.0
POLL_S = 0.25
FAILED_STATES = ("BACKOFF", "EXITED", "FATAL")
ENDED_STATES = ("STOPPED", "EXITED", "FATAL")


class StackError(Exception):
    """The stack cannot be brought up, or does not stay up; the message is for the user."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """One supervised process."""

    name: str
    state: str  # supervisor's: STOPPED, STARTING, RUNNING, BACKOFF, STOPPING, EXITED, FATAL
    pid: int  # 0: not running
    spawn_error: str


class Stack:
    """The processes that run from one run directory."""

    def __init__(self, settings: StackSettings) -> None:
        self.settings = settings

    def start(self) -> None:
        """Start the processes, or leave them as they are if they run with the same settings.

        With other settings they are stopped first. Raises StackError, of a port that is taken.
        """
        environment = self.settings.environment()
        wanted = {k: v for k, v in environment.items() if k.startswith("EVENFLOW_")}
        if self.processes():
            if self._started_with() == wanted:
                self._start_missing()
                return
            self.stop()
        self._end_left_over()
        try:
            require_free_ports(self.settings.ports)
            self._put_old_logs_aside()
            self.settings.supervisor_socket.unlink(missing_ok=True)
        except PreflightError as error:
            raise StackError(str(error)) from error
        except OSError as error:
            raise StackError(f"{self.settings.run_dir} cannot be written: {error}") from error
        subprocess.run(
            [sys.executable, "-m", "supervisor.supervisord", "-c", str(ROOT / "supervisord.conf")],
            env=environment,
            cwd=ROOT,
            check=True,
        )
        self._keep(wanted)  # only now: a record is of a supervisord that listens

    def stop(self) -> bool:
        """Stop every process, engines included; False if nothing ran.

        Interrupted (Ctrl-C) it kills them. Raises StackError if supervisord does not end.
        """
        is_running = bool(self.processes())
        if is_running:
            self._shut_down()
        self._end_left_over()
        self.settings.state_file.unlink(missing_ok=True)
        return is_running

    def _shut_down(self) -> None:
        supervisor_pid = int(self._rpc().getPID())
        try:
            self._rpc().shutdown()
            deadline_s = time.monotonic() + STOP_TIMEOUT_S
            while _is_alive(supervisor_pid):
                if time.monotonic() > deadline_s:
                    raise StackError(f"supervisord (pid {supervisor_pid}) does not stop")
                time.sleep(POLL_S)
        except KeyboardInterrupt:
            os.kill(supervisor_pid, signal.SIGKILL)

    def _end_left_over(self) -> None:
        """Kill what a supervisord that has ended left running."""
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                own = process.environ().get("EVENFLOW_RUN_DIR") == str(self.settings.run_dir)
                if own and process.pid != os.getpid():
                    process.kill()

    def wait_ready(self, report: Callable[[str], None]) -> None:
        """Wait until the gateway is ready; `report` gets what is waited for, as it changes.

        Raises StackError with a process's own last words when it fails, once is enough.
        """
        deadline_s = time.monotonic() + READY_TIMEOUT_S
        last, first_pids = "", dict[str, int]()
        while not self._is_ready():
            found = self.processes()
            for process in found:
                if process.pid:
                    first_pids.setdefault(process.name, process.pid)
                died = process.pid != first_pids.get(process.name, process.pid)
                if died or process.state in FAILED_STATES:
                    raise self._failure(process, "does not start")
            if time.monotonic() > deadline_s:
                raise StackError(
                    f"not ready after {READY_TIMEOUT_S:.0f} s; see {self.settings.log_dir}"
                )
            status = _status(found)
            if status != last:
                report(status)
                last = status
            time.sleep(POLL_S)

    def watch_over(self, report: Callable[[str], None]) -> None:
        """Stay until a process is given up; `report` gets each one that was started again.

        Raises StackError with that process's last words.
        """
        pids = {process.name: process.pid for process in self.processes()}
        while True:
            time.sleep(POLL_S)
            found = self.processes()
            if not found:
                raise StackError("supervisord has ended")
            for process in found:
                if process.state == "FATAL":
                    raise self._failure(process, "does not stay up")
                if process.pid and process.pid != pids.get(process.name):
                    pids[process.name] = process.pid
                    report(f"{process.name} was started again:\n{self._last_words(process)}")

    def processes(self) -> list[Process]:
        """Return the supervised processes; none if supervisord does not run."""
        try:
            found = cast(list[dict[str, Any]], self._rpc().getAllProcessInfo())
        except (OSError, Fault):
            return []
        return [
            Process(
                name=info["name"],
                state=info["statename"],
                pid=int(info["pid"]),
                spawn_error=str(info["spawnerr"]),
            )
            for info in found
        ]

    def _failure(self, process: Process, what: str) -> StackError:
        return StackError(f"{process.name} {what}:\n{self._last_words(process)}")

    def _last_words(self, process: Process) -> str:
        path = self.settings.log_dir / f"{process.name}.log"
        lines = path.read_text(errors="replace").splitlines() if path.exists() else []
        said = last_words(lines) or [process.spawn_error or "(it said nothing)"]
        return "\n".join(f"  {process.name} | {line}" for line in said)

    def _start_missing(self) -> None:
        wanted = {"redis": not self.settings.redis_url, "planner": self.settings.asks_planner}
        for process in self.processes():
            if process.state in ENDED_STATES and wanted.get(process.name, True):
                self._rpc().startProcess(process.name, False)

    def _is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.settings.base_url}/ready", timeout=2) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def _rpc(self) -> Any:
        transport = SupervisorTransport(None, None, f"unix://{self.settings.supervisor_socket}")
        return ServerProxy("http://127.0.0.1", transport=transport).supervisor

    def _put_old_logs_aside(self) -> None:
        self.settings.log_dir.mkdir(parents=True, exist_ok=True)
        for log in self.settings.log_dir.glob("*.log"):
            log.replace(log.with_suffix(".log.previous"))

    def _keep(self, wanted: dict[str, str]) -> None:
        """Write down what the stack runs with, whole or not; there may be a password in it."""
        unfinished = self.settings.state_file.with_suffix(".new")
        unfinished.touch(mode=0o600)
        unfinished.write_text(json.dumps(wanted))
        unfinished.replace(self.settings.state_file)

    def _started_with(self) -> dict[str, str]:
        try:
            return cast(dict[str, str], json.loads(self.settings.state_file.read_text()))
        except (OSError, ValueError):
            return {}


def _status(found: Iterable[Process]) -> str:
    return ", ".join(f"{p.name} {p.state.lower()}" for p in found if p.state != "STOPPED")


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
