"""How vLLM's processes on a CPU wait for each other: asleep."""

import time

from vllm.distributed.device_communicators import shm_broadcast
from vllm.v1.executor.multiproc_executor import MultiprocExecutor

NAP_S = 50e-6  # between two looks at the shared memory; the kernel adds about as much


class SleepingMultiprocExecutor(MultiprocExecutor):  # type: ignore[misc]
    """vLLM's executor with a process for each worker, without a core that only waits.

    Between messages vLLM's processes look at their shared memory again and again and yield in
    between. On a CPU that takes a core from the model; and Linux 6.18 loses count of tasks that
    yield all the time: other processes of the machine were seen to stand still for 20 s.
    """

    def _init_executor(self) -> None:
        nap_between_looks()
        super()._init_executor()


def nap_between_looks() -> None:
    """Let this process sleep a moment wherever vLLM's shared memory queues would yield."""
    shm_broadcast.sched_yield = _nap


def _nap() -> None:
    time.sleep(NAP_S)
