"""What holds for all suites."""

import signal
import threading

from tests.fuzz import load_profile

load_profile()

# A shell's background jobs, and all that they start, ignore Ctrl-C: processes of tests shall not.
if threading.current_thread() is threading.main_thread():
    signal.signal(signal.SIGINT, signal.default_int_handler)
