"""The processes of an engine on a CPU sleep while they wait for each other."""

import threading
from typing import Any

import pytest
from vllm.distributed.device_communicators import shm_broadcast
from vllm.distributed.device_communicators.shm_broadcast import MessageQueue
from vllm.v1.executor.multiproc_executor import MultiprocExecutor

from services.executor.engine.config import CPU_EXECUTOR
from services.executor.plugin import cpu_executor, resumed_rows
from services.executor.plugin.cpu_executor import SleepingMultiprocExecutor, nap_between_looks
from services.executor.plugin.cpu_worker import CPUWorker, EvenflowCPUWorker


@pytest.fixture(autouse=True)
def vllms_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put back afterwards what the code under test sets."""
    monkeypatch.setattr(shm_broadcast, "sched_yield", shm_broadcast.sched_yield)


def test_a_reader_that_waits_naps_and_takes_the_message(monkeypatch: pytest.MonkeyPatch) -> None:
    has_napped = threading.Event()
    monkeypatch.setattr(cpu_executor, "_nap", has_napped.set)
    nap_between_looks()
    writer = MessageQueue(1, 1, max_chunk_bytes=1 << 16, max_chunks=2)
    reader = MessageQueue.create_from_handle(writer.export_handle(), 0)
    messages: list[Any] = []
    reading = threading.Thread(target=lambda: messages.append(reader.dequeue(timeout=60)))

    reading.start()
    assert has_napped.wait(60)
    writer.enqueue("a step")
    reading.join(60)

    assert messages == ["a step"]


def test_it_is_what_vllms_queues_call_where_they_would_yield(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(MultiprocExecutor, "_init_executor", lambda self: None)
    executor = object.__new__(SleepingMultiprocExecutor)

    executor._init_executor()

    assert shm_broadcast.sched_yield is cpu_executor._nap
    assert f"{cpu_executor.__name__}.{SleepingMultiprocExecutor.__name__}" == CPU_EXECUTOR


def test_workers_nap_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CPUWorker, "init_device", lambda self: None)

    monkeypatch.setattr(resumed_rows, "install", lambda config: None)
    worker = object.__new__(EvenflowCPUWorker)
    worker.vllm_config = None

    worker.init_device()

    assert shm_broadcast.sched_yield is cpu_executor._nap
