"""Ctrl-C reaches the main thread though it interrupted none of its calls."""

import os
import signal
import threading
import time

import pytest

from cli.interrupts import heard


def test_a_signal_that_interrupts_no_call_of_the_main_thread_is_seen_by_it() -> None:
    """Noted while another thread runs, as one is that comes just before a call blocks."""
    before = signal.getsignal(signal.SIGINT)
    reader, writer = os.pipe()

    def interrupt_somebody_else() -> None:
        time.sleep(0.2)  # by then the main thread reads, or the test asks for less
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)

    others = threading.Thread(target=interrupt_somebody_else)

    def wait_for_nothing() -> None:
        with heard():
            others.start()
            os.read(reader, 1)  # nobody ever writes

    with pytest.raises(KeyboardInterrupt):
        wait_for_nothing()

    others.join()
    os.close(reader)
    os.close(writer)
    assert signal.getsignal(signal.SIGINT) is before


def test_without_a_signal_nothing_happens() -> None:
    with heard():
        pass
