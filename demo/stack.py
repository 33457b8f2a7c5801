"""Start, watch and stop the processes of supervisord.conf."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast
from xmlrpc.client import Fault, ServerProxy

from supervisor.xmlrpc import SupervisorTransport

from demo.settings import LOG_DIR, PORTS, ROOT, RUN_DIR, StackSettings, supervisor_socket

READY_TIMEOUT_S = 600.0  # a model from the hub is downloaded first
STOP_TIMEOUT_S = 90.0
POLL_S = 0.25
NUM_LOG_LINES = 25
FAILED_STATES = ("BACKOFF", "EXITED", "FATAL")


class StackError(Exception):
    """The stack cannot be brought up; the message is for the user."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """One supervised process."""

    name: str
    state: str  # supervisor's: STOPPED, STARTING, RUNNING, BACKOFF, STOPPING, EXITED, FATAL
    pid: int  # 0: not running


def start(settings: StackSettings, environment: dict[str, str]) -> None:
    """Start the stack, or leave it as it is if it runs with the same settings.

    With other settings it is stopped first. Raises StackError if a port is taken.
    """
    wanted = {k: v for k, v in environment.items() if k.startswith(("EVENFLOW_", "VLLM_", "HF_"))}
    if processes():
        if _started_with() == wanted:
            _start_missing(settings)
            return
        stop()
    _require_free_ports(settings)
    LOG_DIR.mkdir(parents=True, exist_ok=True)
    supervisor_socket().unlink(missing_ok=True)
    subprocess.run(
        [sys.executable, "-m", "supervisor.supervisord", "-c", str(ROOT / "supervisord.conf")],
        env=environment,
        cwd=ROOT,
        check=True,
    )
    (RUN_DIR / "started_with.json").write_text(json.dumps(wanted))


def stop() -> bool:
    """Stop every process, engines included; False if nothing ran.

    Raises StackError if supervisord does not end.
    """
    running = processes()
    if not running:
        return False
    supervisor_pid = _rpc().getPID()
    groups = [process.pid for process in running if process.pid]
    _rpc().shutdown()
    deadline_s = time.monotonic() + STOP_TIMEOUT_S
    while _is_alive(supervisor_pid):
        if time.monotonic() > deadline_s:
            raise StackError(f"supervisord (pid {supervisor_pid}) does not stop")
        time.sleep(POLL_S)
    for group in groups:  # every process leads a group of its own; nothing of it may stay
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)
    return True


def wait_ready(settings: StackSettings, report: Callable[[str], None]) -> None:
    """Wait until the gateway is ready; `report` gets each change of what is waited for.

    Raises StackError with the last lines of its log when a process fails, once is enough.
    """
    deadline_s = time.monotonic() + READY_TIMEOUT_S
    last, first_pids = "", dict[str, int]()
    while not _is_ready(settings):
        found = processes()
        for process in found:
            if process.pid:
                first_pids.setdefault(process.name, process.pid)
            died = process.pid != first_pids.get(process.name, process.pid)
            if died or process.state in FAILED_STATES:
                raise StackError(f"{process.name} does not start:\n{log_tail(process.name)}")
        if time.monotonic() > deadline_s:
            raise StackError(f"not ready after {READY_TIMEOUT_S:.0f} s; see {LOG_DIR}")
        status = ", ".join(f"{p.name} {p.state.lower()}" for p in found if p.state != "STOPPED")
        if status != last:
            report(status)
            last = status
        time.sleep(POLL_S)


def processes() -> list[Process]:
    """Return the supervised processes; none if supervisord does not run."""
    try:
        found = cast(list[dict[str, Any]], _rpc().getAllProcessInfo())
    except (OSError, Fault):
        return []
    return [
        Process(name=info["name"], state=info["statename"], pid=int(info["pid"])) for info in found
    ]


def log_tail(name: str, num_lines: int = NUM_LOG_LINES) -> str:
    """Return the last lines that a process logged."""
    path = LOG_DIR / f"{name}.log"
    lines = path.read_text(errors="replace").splitlines() if path.exists() else []
    return "\n".join(f"  {name} | {line}" for line in lines[-num_lines:])


def _start_missing(settings: StackSettings) -> None:
    for process in processes():
        if process.state in ("STOPPED", "EXITED", "FATAL") and not (
            process.name == "redis" and settings.redis_url
        ):
            _rpc().startProcess(process.name, False)


def _require_free_ports(settings: StackSettings) -> None:
    for variable, port in settings.ports.items():
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError as error:
                raise StackError(
                    f"port {port} is taken by another program: stop it, or set {variable} "
                    f"to a free port (default {PORTS[variable]})"
                ) from error


def _is_ready(settings: StackSettings) -> bool:
    try:
        with urllib.request.urlopen(f"{settings.base_url}/ready", timeout=2) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def _rpc() -> Any:
    transport = SupervisorTransport(None, None, f"unix://{supervisor_socket()}")
    return ServerProxy("http://127.0.0.1", transport=transport).supervisor


def _started_with() -> dict[str, str]:
    try:
        return cast(dict[str, str], json.loads((RUN_DIR / "started_with.json").read_text()))
    except (OSError, ValueError):
        return {}


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
