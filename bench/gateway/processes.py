"""Processes of a benchmark: started on chosen cores, measured from outside, ended at the end."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import psutil

ROOT = Path(__file__).parents[2]
START_TIMEOUT_S = 240.0


@contextmanager
def running(
    module: str,
    *arguments: str,
    settings: Mapping[str, object] | None = None,
    cores: Sequence[int] = (),
    log: IO[Any] | None = None,
) -> Iterator[subprocess.Popen[str]]:
    """Run `python -m module` on `cores` (all by default) while the block runs; its standard output
    can be read, the rest goes to `log`.
    """
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("EVENFLOW_")}
    paths = os.pathsep.join([str(ROOT), str(ROOT / "protos")])
    own = {name: str(value) for name, value in (settings or {}).items()}
    with pinned(cores):
        process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            cwd=ROOT,
            env=inherited | {"PYTHONPATH": paths} | own,
            stdout=subprocess.PIPE if log is None else log,
            stderr=log or subprocess.DEVNULL,
            text=True,
        )
    try:
        yield process
    finally:
        _end(process)


@contextmanager
def pinned(cores: Sequence[int]) -> Iterator[None]:
    """Run on `cores` only, as do processes that the block starts; nothing changes if empty."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores or before)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _end(process: "subprocess.Popen[str]") -> None:
    children = (
        psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
    )
    process.terminate()
    try:
        process.wait(timeout=30)
    except subprocess.TimeoutExpired:
        process.kill()
    for child in children:
        if child.is_running():
            child.kill()


def wait_until(condition: Callable[[], bool], what: str) -> None:
    """Poll until `condition` holds. Raises TimeoutError naming `what`."""
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while not condition():
        if time.monotonic() > deadline_s:
            raise TimeoutError(what)
        time.sleep(0.1)


def cpu_s(processes: Sequence[psutil.Process]) -> float:
    """Return the CPU time of processes so far, user and system."""
    times = [process.cpu_times() for process in processes]
    return sum(t.user + t.system for t in times)


def tree(pid: int) -> list[psutil.Process]:
    """Return a process and all below it."""
    front = psutil.Process(pid)
    return [front, *front.children(recursive=True)]
