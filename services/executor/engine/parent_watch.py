"""Ends a process of the engine when the process that started it is gone.

EngineCore outlives a front that was killed, and would keep the accelerator's memory. A worker
notices the death of EngineCore by itself, but its orderly end may hang.
"""

import multiprocessing
import os
import signal
import threading
import time
from multiprocessing.connection import wait

from vllm import envs

_watching = set[int]()  # this process, once it does: a fork of it must begin anew


def end_with_parent() -> None:
    """Watch the process that started this one, from a thread. Does nothing in a main process.

    What vLLM gives a worker for an orderly end, this process has before it is killed.
    """
    parent = multiprocessing.parent_process()
    if parent is not None and os.getpid() not in _watching:
        _watching.add(os.getpid())
        threading.Thread(
            target=_watch, args=(parent.sentinel,), daemon=True, name="parent-watch"
        ).start()


def _watch(sentinel: int) -> None:
    wait([sentinel])
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(envs.VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS)
    os.kill(os.getpid(), signal.SIGKILL)
