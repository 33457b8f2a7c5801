"""The worker on a CPU."""

from vllm.v1.worker.cpu_worker import CPUWorker

from services.executor.kv.worker import LayerwiseWorkerMixin


class LayerwiseCPUWorker(LayerwiseWorkerMixin, CPUWorker):  # type: ignore[misc]
    """vLLM's CPU worker with layer groups."""
