"""A gate in place of a link's time: copies pass when the test says so, however slow the machine."""

import threading
from typing import Any

import pytest

from services.executor.copies.device.cpu_device import LinkStream

MANY = 1 << 20


class LinkGate:
    """Holds each chunk of a `CpuDevice` where it would wait until the link has carried it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Shut the gate of all engines until the end of the test."""
        self._arrived = threading.Semaphore(0)
        self._admitted = threading.Semaphore(0)
        monkeypatch.setattr(LinkStream, "_pass_time", lambda stream: self._hold(stream))

    def _hold(self, stream: Any) -> None:
        self._arrived.release()
        while not self._admitted.acquire(timeout=0.1):
            if stream._closing.is_set():
                return

    def await_chunk(self) -> None:
        """Return once one more chunk has come to the gate."""
        self._arrived.acquire()

    def admit(self, num_chunks: int) -> None:
        self._admitted.release(num_chunks)

    def open(self) -> None:
        self.admit(MANY)
