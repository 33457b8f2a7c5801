"""The worker on a GPU, with either of vLLM's model runners."""

from typing import Any

import structlog
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.worker.gpu_worker import Worker

from services.executor.engine.parent_watch import end_with_parent
from services.executor.plugin import flash_attention, latent_memo, resumed_rows
from services.executor.plugin.full_graphs import forbid_full_graphs_v1, forbid_full_graphs_v2
from services.executor.plugin.worker import LayerwiseWorkerMixin
from services.executor.sizing import block_table_bytes
from services.executor.step_messages import StepTransfers

log = structlog.get_logger()

MAX_TABLE_BYTES_PER_STEP = 16 << 20  # 0.3 ms of a link that loads need


class EvenflowGPUWorker(Worker):  # type: ignore[misc]
    """vLLM's GPU worker, which lets answers go on that were begun elsewhere."""

    def init_device(self) -> None:
        end_with_parent()
        resumed_rows.install(self.vllm_config)
        super().init_device()


class LayerwiseGPUWorker(LayerwiseWorkerMixin, EvenflowGPUWorker):
    """The same with layer groups."""

    _needs_hooks = False  # this step's layers

    def load_model(self, *args: Any, **kwargs: Any) -> Any:
        flash_attention.install_memo()
        latent_memo.install_memo()
        return super().load_model(*args, **kwargs)

    def compile_or_warm_up_model(self) -> Any:
        times = super().compile_or_warm_up_model()
        runner = self.model_runner
        if not self.use_v2_model_runner:
            forbid_full_graphs_v1(runner.cudagraph_dispatcher, lambda: self._needs_hooks)
        elif runner.cudagraph_manager is not None:
            forbid_full_graphs_v2(runner.cudagraph_manager, lambda: self._needs_hooks)
        return times

    def execute_model(self, scheduler_output: SchedulerOutput) -> Any:
        transfers = scheduler_output.kv_connector_metadata
        self._needs_hooks = isinstance(transfers, StepTransfers) and transfers.needs_hooks
        return super().execute_model(scheduler_output)

    def determine_available_memory(self) -> int:
        """Return the bytes that are left for KV; the groups' block tables are made after this."""
        available_bytes = int(super().determine_available_memory())
        table_bytes = block_table_bytes(self.vllm_config)
        if not self.use_v2_model_runner and table_bytes > MAX_TABLE_BYTES_PER_STEP:
            log.warning(
                "block_tables_copied_in_every_step",
                bytes=table_bytes,
                reason="the first model runner copies them whole",
                remedy="use the second, longer blocks, more layers per group or fewer requests",
            )
        if self.cache_config.kv_cache_memory_bytes:  # asked for, whatever else there is
            return available_bytes
        # The second model runner keeps one and gathers the step's rows into another.
        table_bytes *= 2 if self.use_v2_model_runner else 1
        log.info("block_tables_kept_free", bytes=table_bytes)
        return available_bytes - table_bytes
