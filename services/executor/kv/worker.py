"""The worker: layer groups at start-up, row edits before each step."""

from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.worker.cpu_worker import CPUWorker

from services.executor.kv.attention_memo import install_memo
from services.executor.kv.block_tables import StackedBlockTables
from services.executor.kv.metadata import RowEdit, StepTransfers
from services.executor.kv.options import KVOptions, check_supported
from services.executor.kv.spec import layer_group_specs


class LayerwiseWorkerMixin:
    """Over any of vLLM's workers."""

    model_runner: Any
    use_v2_model_runner: bool

    def load_model(self, *args: Any, **kwargs: Any) -> Any:
        config = self.vllm_config  # type: ignore[attr-defined]
        check_supported(config)
        return super().load_model(*args, **kwargs)  # type: ignore[misc]

    def get_kv_cache_spec(self) -> dict[str, Any]:
        options = KVOptions.of(self.vllm_config)  # type: ignore[attr-defined]
        specs = super().get_kv_cache_spec()  # type: ignore[misc]
        return layer_group_specs(specs, options.layers_per_group)

    def execute_model(self, scheduler_output: SchedulerOutput) -> Any:
        transfers = scheduler_output.kv_connector_metadata
        if isinstance(transfers, StepTransfers) and transfers.row_edits:
            self._edit_rows(transfers.row_edits)
        return super().execute_model(scheduler_output)  # type: ignore[misc]

    def _edit_rows(self, edits: list[RowEdit]) -> None:
        """Change rows of running requests in place; vLLM itself only appends to them.

        Edits of requests that the runner does not have are late and mean nothing: a request that
        ended, or was preempted and comes back with a row of its own.
        """
        if self.use_v2_model_runner:
            self._edit_rows_v2(edits)
        else:
            self._edit_rows_v1(edits)

    def _edit_rows_v1(self, edits: list[RowEdit]) -> None:
        runner = self.model_runner
        with runner.synchronize_input_prep():  # the last step may still read the rows
            for edit in edits:
                state = runner.requests.get(edit.request_id)
                if state is None:
                    continue
                end = edit.start + len(edit.block_ids)
                state.block_ids[edit.group][edit.start : end] = edit.block_ids
                row = runner.input_batch.req_id_to_index.get(edit.request_id)
                if row is not None:
                    table = runner.input_batch.block_table[edit.group]
                    table.block_table.np[row, edit.start : end] = edit.block_ids

    def _edit_rows_v2(self, edits: list[RowEdit]) -> None:
        runner = self.model_runner
        for edit in edits:
            row = runner.req_states.req_id_to_index.get(edit.request_id)
            if row is not None:
                tables = runner.block_tables.block_tables
                tables[edit.group].stage_write(row, edit.start, edit.block_ids)


class LayerwiseCPUWorker(LayerwiseWorkerMixin, CPUWorker):  # type: ignore[misc]
    """On CPU, where vLLM has no kernels that make many groups cheap."""

    def load_model(self, *args: Any, **kwargs: Any) -> Any:
        install_memo()
        return super().load_model(*args, **kwargs)

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        super().initialize_from_config(kv_cache_config)
        batch = self.model_runner.input_batch
        if len(batch.block_table.block_tables) > 1:
            batch.block_table = StackedBlockTables(batch.block_table)
