"""The worker on a GPU, with either of vLLM's model runners."""

from vllm.v1.worker.gpu_worker import Worker

from services.executor.kv.worker import LayerwiseWorkerMixin


class LayerwiseGPUWorker(LayerwiseWorkerMixin, Worker):  # type: ignore[misc]
    """vLLM's GPU worker with layer groups."""
