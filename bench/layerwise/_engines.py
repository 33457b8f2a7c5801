"""Several engines side by side, one process each, so that measurements take turns.

vLLM keeps one engine per process. An engine that is not measuring waits for its next order and
takes no CPU time.
"""

import multiprocessing
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

from lab.engine.step_runner import EngineCase, StepRunner

START_TIMEOUT_S = 300.0
MEASURE_TIMEOUT_S = 600.0


class EngineProcess:
    """One engine in a process of its own."""

    def __init__(self, case: EngineCase) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        # Not a daemon: an engine may start processes of its own.
        self._process = context.Process(target=_serve, args=(case, theirs))
        self._process.start()
        theirs.close()

    def wait_started(self) -> None:
        self._receive(START_TIMEOUT_S)

    def measure(self, function: Callable[..., Any], *args: Any) -> Any:
        """Return `function(runner, *args)`, called there; it must be importable."""
        self._connection.send((function, args))
        return self._receive(MEASURE_TIMEOUT_S)

    def _receive(self, timeout_s: float) -> Any:
        if not self._connection.poll(timeout_s):
            raise TimeoutError(f"no answer from an engine within {timeout_s} s")
        return self._connection.recv()

    def stop(self) -> None:
        self._connection.close()
        self._process.join(timeout=60)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


@contextmanager
def engines(cases: Mapping[str, EngineCase]) -> Iterator[dict[str, EngineProcess]]:
    """Start an engine per case, one after the other; all are stopped in the end."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    started: dict[str, EngineProcess] = {}
    try:
        for name, case in cases.items():
            started[name] = EngineProcess(case)
            started[name].wait_started()
        yield started
    finally:
        for process in started.values():
            process.stop()


def _serve(case: EngineCase, connection: Connection) -> None:
    runner = StepRunner(case)
    connection.send(None)
    try:
        while True:
            function, args = connection.recv()
            connection.send(function(runner, *args))
    except EOFError:
        pass
    finally:
        runner.close()
