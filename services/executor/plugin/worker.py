"""What our workers add to vLLM's: layer groups at start-up, row edits before each step."""

from collections.abc import Mapping
from copy import copy
from typing import Any

from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.spec_decode.draft_model import DraftModelProposer

from services.executor.kv_options import KVOptions, check_supported
from services.executor.plugin.spec import layer_group_specs
from services.executor.step_messages import RowEdit, StepTransfers


class LayerwiseWorkerMixin:
    """Over any of vLLM's workers."""

    model_runner: Any
    use_v2_model_runner: bool

    def load_model(self, *args: Any, **kwargs: Any) -> Any:
        config = self.vllm_config  # type: ignore[attr-defined]
        check_supported(config)
        return super().load_model(*args, **kwargs)  # type: ignore[misc]

    def get_kv_cache_spec(self) -> dict[str, Any]:
        config = self.vllm_config  # type: ignore[attr-defined]
        options = KVOptions.of(config)
        refuse_shared_kv(config.compilation_config.static_forward_context)
        specs = super().get_kv_cache_spec()  # type: ignore[misc]
        num_stages: int = config.parallel_config.pipeline_parallel_size
        num_layers: int = config.model_config.get_total_num_hidden_layers()
        return layer_group_specs(
            specs,
            options.layers_per_group,
            num_layers=num_layers // num_stages if num_stages > 1 else None,
            max_model_len=config.model_config.max_model_len,
            drafting=drafting_layers(self.model_runner),
        )

    def weight_bytes(self) -> int:
        """Return the bytes of this rank's weights."""
        weights = self.get_model().parameters()  # type: ignore[attr-defined]
        return sum(weight.nbytes for weight in weights)

    def compile_or_warm_up_model(self) -> Any:
        give_draft_model_its_table(self.model_runner)
        times = super().compile_or_warm_up_model()  # type: ignore[misc]
        get_kv_transfer_group().start_pinning()
        return times

    def execute_model(self, scheduler_output: SchedulerOutput) -> Any:
        transfers = scheduler_output.kv_connector_metadata
        if isinstance(transfers, StepTransfers):
            edits = get_kv_transfer_group().runner.take_in(transfers)
            if edits and self.use_v2_model_runner:
                self._edit_rows_v2(edits, rows_of_this_step(scheduler_output))
            elif edits:
                self._edit_rows_v1(edits)
        return super().execute_model(scheduler_output)  # type: ignore[misc]

    def sample_tokens(self, grammar_output: Any) -> Any:
        """Sample, with the drafter; then add to the step's output what its copies have come to.

        It is there already where no drafts are made, and where the second model runner asks behind
        the drafter (vLLM 0.32; 0.33 asks before it).
        """
        connector = get_kv_transfer_group()
        output: Any = None if self.use_v2_model_runner else self.model_runner.kv_connector_output
        if _lacks_feedback(output):
            connector.finish_forward()  # which the second model runner says itself
        sampled = super().sample_tokens(grammar_output)  # type: ignore[misc]
        if self.use_v2_model_runner:
            sampled_output = getattr(sampled, "model_runner_output", sampled)  # of an asynchronous
            output = getattr(sampled_output, "kv_connector_output", None)
        if _lacks_feedback(output):
            output.kv_connector_worker_meta = connector.build_connector_worker_meta()
        return sampled

    # Rows of running requests are changed in place; vLLM itself only appends to them. Edits of
    # requests that the runner does not have are late and mean nothing: a request that ended, or
    # was preempted and comes back with a row of its own.

    def _edit_rows_v1(self, edits: list[RowEdit]) -> None:
        runner = self.model_runner
        if runner.prepare_inputs_event is not None:
            # The last step may still read the rows. Not `synchronize_input_prep`: at its end that
            # puts the event behind the whole last step, and the next one would wait for it.
            runner.prepare_inputs_event.synchronize()
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

    def _edit_rows_v2(self, edits: list[RowEdit], ending: set[str]) -> None:
        """Stage the edits among the step's own writes, which one kernel then carries out.

        That kernel knows no order among its writes, so that no two may meet: a row of `ending`,
        which this step gives to another or writes anew, is left alone.
        """
        runner = self.model_runner
        for edit in edits:
            row = runner.req_states.req_id_to_index.get(edit.request_id)
            if row is not None and edit.request_id not in ending:
                tables = runner.block_tables.block_tables
                tables[edit.group].stage_write(row, edit.start, edit.block_ids)


def _lacks_feedback(output: Any) -> bool:
    """Return whether a step's output has a connector's part, and not what copies have come to."""
    return output is not None and output.kv_connector_worker_meta is None


def drafting_layers(runner: Any) -> frozenset[str]:
    """Return the layers with KV of the drafter, if there is one, of either model runner."""
    first, second = getattr(runner, "drafter", None), getattr(runner, "speculator", None)
    return frozenset(
        (
            *getattr(first, "_draft_attn_layer_names", ()),
            *getattr(second, "draft_attn_layer_names", ()),
        )
    )


def give_draft_model_its_table(runner: Any) -> None:
    """Let a draft model write to the blocks of its own layers, which are not the first group's.

    vLLM's first model runner asks which group an EAGLE head's layer is in, and takes a draft
    model's layers to be in the first one: they would write over the model's KV.
    """
    if not isinstance(getattr(runner, "drafter", None), DraftModelProposer):
        return
    build, group = runner._build_attention_metadata, runner.drafter.kv_cache_gid

    def build_with_its_table(*, slot_mappings: Mapping[int, Any], **options: Any) -> Any:
        metadata, common = build(slot_mappings=slot_mappings, **options)
        if common is not None:
            table = runner.input_batch.block_table[group]
            common = copy(common)
            common.block_table_tensor = table.block_table.gpu[: len(common.seq_lens)]
            common.slot_mapping = slot_mappings[group][: common.num_actual_tokens]
        return metadata, common

    runner._build_attention_metadata = build_with_its_table


def refuse_shared_kv(layers: Mapping[str, Any]) -> None:
    """Raise ValueError for a layer that reads another's KV, which may have left by its turn."""
    for name, layer in layers.items():
        if getattr(layer, "kv_sharing_target_layer_name", None) is not None:
            raise ValueError(
                f"layer-wise KV does not work with layers that share KV: {name} reads that of "
                f"{layer.kv_sharing_target_layer_name}"
            )


def rows_of_this_step(scheduler_output: SchedulerOutput) -> set[str]:
    """Return the requests whose rows end with a step, or are written whole by it."""
    return {
        *scheduler_output.finished_req_ids,
        *(scheduler_output.preempted_req_ids or ()),
        *(request.req_id for request in scheduler_output.scheduled_new_reqs),
    }
