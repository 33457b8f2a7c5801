"""Ctrl-C that is never lost.

Python looks for signals between two of its instructions. One that comes after its last look and
before a blocking call is noted, and interrupts nothing: the call blocks on until something else
ends it. So here it is sent again until it has been seen.
"""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

AGAIN_S = 0.05
DONE = b"\xff"  # no signal has this number


@contextmanager
def heard() -> Iterator[None]:
    """Raise KeyboardInterrupt in the block for Ctrl-C, whatever call it comes into.

    For the main thread.
    """
    main, seen = threading.get_ident(), threading.Event()

    def interrupt(number: int, frame: FrameType | None) -> None:
        if not seen.is_set():
            seen.set()
            raise KeyboardInterrupt

    def insist() -> None:
        while os.read(notes, 1) != DONE:
            while not seen.wait(AGAIN_S):
                signal.pthread_kill(main, signal.SIGINT)

    notes, writer = os.pipe()
    os.set_blocking(writer, False)
    before = signal.signal(signal.SIGINT, interrupt)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    thread = threading.Thread(target=insist, daemon=True)
    thread.start()
    try:
        yield
    finally:
        seen.set()
        signal.set_wakeup_fd(-1)
        os.write(writer, DONE)
        thread.join()
        signal.signal(signal.SIGINT, before)
        os.close(notes)
        os.close(writer)
