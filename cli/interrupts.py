"""Ctrl-C that is never lost.

Python looks for signals between two of its instructions. One that comes after its last look and
before a blocking call is noted, and interrupts nothing: the call blocks on until something else
ends it. So here it is sent again until it has been seen.
"""

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

AGAIN_S = 0.05
SAME_S = 0.5  # signals so close to each other are one Ctrl-C
DONE = b"\xff"  # no signal has this number


class _Listener:
    """Raises in the main thread what another thread insists on."""

    def __init__(self) -> None:
        self._main = threading.get_ident()
        self._seen_s = float("-inf")  # plain variables: a handler must not take a lock
        self.is_over = False

    def interrupt(self, number: int, frame: FrameType | None) -> None:
        now_s = time.monotonic()
        if not self.is_over and now_s - self._seen_s > SAME_S:
            self._seen_s = now_s
            raise KeyboardInterrupt

    def insist(self, notes: int) -> None:
        """Send each Ctrl-C that is noted again until it has been seen."""
        while (note := os.read(notes, 1)) != DONE:
            noted_s = time.monotonic()
            while note == bytes([signal.SIGINT]) and not self.is_over:
                time.sleep(AGAIN_S)
                if self._seen_s > noted_s - SAME_S:
                    break
                signal.pthread_kill(self._main, signal.SIGINT)


@contextmanager
def heard() -> Iterator[None]:
    """Raise KeyboardInterrupt in the block for Ctrl-C, whatever call it comes into.

    For the main thread; a process that ignores Ctrl-C goes on to.
    """
    before = signal.getsignal(signal.SIGINT)
    if before is signal.SIG_IGN:
        yield
        return
    listener = _Listener()
    notes, writer = os.pipe()
    os.set_blocking(writer, False)
    thread = threading.Thread(target=listener.insist, args=(notes,), daemon=True)
    thread.start()
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    signal.signal(signal.SIGINT, listener.interrupt)
    try:
        yield
    finally:
        listener.is_over = True
        signal.set_wakeup_fd(-1)
        os.write(writer, DONE)
        thread.join()
        signal.signal(signal.SIGINT, before)
        os.close(notes)
        os.close(writer)
