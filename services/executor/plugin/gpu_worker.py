"""The worker on a GPU, with either of vLLM's model runners."""

from typing import Any

from vllm.v1.worker.gpu_worker import Worker

from services.executor.plugin.flash_attention import install_memo
from services.executor.plugin.worker import LayerwiseWorkerMixin


class LayerwiseGPUWorker(LayerwiseWorkerMixin, Worker):  # type: ignore[misc]
    """vLLM's GPU worker with layer groups."""

    def load_model(self, *args: Any, **kwargs: Any) -> Any:
        install_memo()
        return super().load_model(*args, **kwargs)
