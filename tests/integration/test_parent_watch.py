"""Processes of an engine whose parent is killed, whatever they are busy with."""

import multiprocessing
import signal
import time
from contextlib import suppress
from multiprocessing.connection import Connection

import psutil
import pytest

from lab.stack.processes import EXIT_TIMEOUT_S, assert_gone
from services.executor.engine.parent_watch import end_with_parent

SPAWN = multiprocessing.get_context("spawn")


def be_parent(told: Connection, *, watches: bool) -> None:
    SPAWN.Process(target=hang, args=(told, watches)).start()
    told.close()
    signal.pause()


def hang(told: Connection, watches: bool) -> None:
    """Be a process whose orderly end does not come about."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if watches:
        end_with_parent()
        end_with_parent()  # EngineCore with its worker in it: once is enough
    told.send(multiprocessing.current_process().pid)
    while True:
        signal.pause()


@pytest.mark.parametrize("watches", [True, False])
def test_a_process_whose_orderly_end_hangs_does_not_outlive_its_parent(
    watches: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS", "1")
    heard, told = SPAWN.Pipe(duplex=False)
    parent = SPAWN.Process(target=be_parent, args=(told,), kwargs={"watches": watches})
    parent.start()
    assert heard.poll(EXIT_TIMEOUT_S)
    child = psutil.Process(heard.recv())
    try:
        parent.kill()
        parent.join(EXIT_TIMEOUT_S)
        if watches:
            assert_gone([child])
        else:
            time.sleep(3)
            assert child.status() != psutil.STATUS_ZOMBIE
    finally:
        with suppress(psutil.NoSuchProcess):
            child.kill()
