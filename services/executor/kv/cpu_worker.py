"""The worker on a CPU, where vLLM has no kernels that make many groups cheap."""

from typing import Any

from vllm.v1.worker.cpu_worker import CPUWorker

from services.executor.kv.attention_memo import build_once, install_memo
from services.executor.kv.block_tables import StackedBlockTables
from services.executor.kv.worker import LayerwiseWorkerMixin


class LayerwiseCPUWorker(LayerwiseWorkerMixin, CPUWorker):  # type: ignore[misc]
    """vLLM's CPU worker with layer groups."""

    def load_model(self, *args: Any, **kwargs: Any) -> Any:
        install_memo()
        return super().load_model(*args, **kwargs)

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        super().initialize_from_config(kv_cache_config)
        batch = self.model_runner.input_batch
        if len(batch.block_table.block_tables) > 1:
            batch.block_table = StackedBlockTables(batch.block_table)
            build_once(self.model_runner)
