"""What the workers add to vLLM's, on runners that hold only what they look at."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.spec_decode.draft_model import DraftModelProposer

from services.executor.kv_options import CONFIG_KEY
from services.executor.plugin import worker as worker_module
from services.executor.plugin.worker import (
    LayerwiseWorkerMixin,
    drafting_layers,
    give_draft_model_its_table,
)
from services.executor.step_messages import RowEdit

SPEC = FullAttentionSpec(block_size=16, num_kv_heads=8, head_size=64, dtype=torch.bfloat16)


class CountedEvent:
    def __init__(self) -> None:
        self.num_waits = self.num_records = 0

    def synchronize(self) -> None:
        self.num_waits += 1

    def record(self) -> None:
        self.num_records += 1


def test_edited_rows_wait_for_the_last_steps_inputs_and_not_for_its_layers() -> None:
    event, rows = CountedEvent(), np.zeros((1, 4), dtype=np.int32)
    table = SimpleNamespace(block_table=SimpleNamespace(np=rows))
    worker: Any = object.__new__(LayerwiseWorkerMixin)
    worker.model_runner = SimpleNamespace(
        prepare_inputs_event=event,
        requests={"r": SimpleNamespace(block_ids=([5, 6, 7, 8],))},
        input_batch=SimpleNamespace(req_id_to_index={"r": 0}, block_table=[table]),
    )

    worker._edit_rows_v1([RowEdit("r", 0, 1, [9, 10]), RowEdit("gone", 0, 0, [1])])

    assert rows.tolist() == [[0, 9, 10, 0]]
    assert worker.model_runner.requests["r"].block_ids == ([5, 9, 10, 8],)
    assert (event.num_waits, event.num_records) == (1, 0)


def test_no_memory_is_pinned_in_the_background_before_graphs_are_captured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    order: list[str] = []

    class Captures:
        def compile_or_warm_up_model(self) -> str:
            order.append("captured")
            return "times"

    class Both(LayerwiseWorkerMixin, Captures):
        model_runner = object()

    connector = SimpleNamespace(start_pinning=lambda: order.append("pinning"))
    monkeypatch.setattr(worker_module, "get_kv_transfer_group", lambda: connector)

    assert Both().compile_or_warm_up_model() == "times"
    assert order == ["captured", "pinning"]


class Layers:
    """A worker of four layers, of which the second may read the first one's KV."""

    def __init__(
        self, *, target: str | None = None, num_hidden_layers: int = 4, num_stages: int = 1
    ) -> None:
        self.model_runner = object()  # that makes no drafts
        self.vllm_config = SimpleNamespace(
            additional_config={CONFIG_KEY: {"layers_per_group": 2}},
            compilation_config=SimpleNamespace(
                static_forward_context={
                    "a": SimpleNamespace(kv_sharing_target_layer_name=None),
                    "b": SimpleNamespace(kv_sharing_target_layer_name=target),
                }
            ),
            model_config=SimpleNamespace(
                get_total_num_hidden_layers=lambda: num_hidden_layers, max_model_len=1_024
            ),
            parallel_config=SimpleNamespace(pipeline_parallel_size=num_stages),
        )

    def get_kv_cache_spec(self) -> dict[str, Any]:
        return {name: SPEC for name in "abcd"}


class LayerwiseLayers(LayerwiseWorkerMixin, Layers):
    pass


def test_a_worker_tells_vllm_of_layer_groups() -> None:
    specs: Any = LayerwiseLayers().get_kv_cache_spec()

    assert [spec.group_key for spec in specs.values()] == [0, 0, 1, 1]


def test_a_worker_refuses_layers_that_share_kv_and_layers_without() -> None:
    with pytest.raises(ValueError, match="b reads that of a"):
        LayerwiseLayers(target="a").get_kv_cache_spec()
    with pytest.raises(ValueError, match="4 of 6 have it"):
        LayerwiseLayers(num_hidden_layers=12, num_stages=2).get_kv_cache_spec()


def test_layers_without_kv_are_in_no_group_where_there_is_one_stage() -> None:
    assert len(LayerwiseLayers(num_hidden_layers=6).get_kv_cache_spec()) == 4


class Runner:
    """Asks what a step's copies have come to before the drafter, if there is one, and ends it."""

    def __init__(self, meta: str | None) -> None:
        self.order: list[str] = []
        self.kv_connector_output: Any = SimpleNamespace(kv_connector_worker_meta=meta)

    def finish_forward(self) -> None:
        self.order.append("layers end")

    def build_connector_worker_meta(self) -> str:
        self.order.append("asked")
        return "complete"


@pytest.mark.parametrize(
    ("meta", "order"), [("known", ["sampled"]), (None, ["layers end", "sampled", "asked"])]
)
def test_a_steps_copies_are_asked_for_behind_the_drafter(
    meta: str | None, order: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = Runner(meta)

    class Samples:
        use_v2_model_runner = False

        def sample_tokens(self, grammar_output: Any) -> Any:
            runner.order.append("sampled")
            output, runner.kv_connector_output = runner.kv_connector_output, None
            return output

    class Both(LayerwiseWorkerMixin, Samples):
        model_runner = runner

    monkeypatch.setattr(worker_module, "get_kv_transfer_group", lambda: runner)

    assert Both().sample_tokens(None).kv_connector_worker_meta == (meta or "complete")
    assert runner.order == order


@pytest.mark.parametrize(("meta", "order"), [("known", ["sampled"]), (None, ["sampled", "asked"])])
@pytest.mark.parametrize("is_asynchronous", [False, True])
def test_the_second_model_runner_may_ask_before_the_drafter_and_ends_the_step_behind_it(
    meta: str | None, order: list[str], is_asynchronous: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = Runner(meta)
    output = SimpleNamespace(kv_connector_output=runner.kv_connector_output)

    class Samples:
        use_v2_model_runner = True

        def sample_tokens(self, grammar_output: Any) -> Any:
            runner.order.append("sampled")
            return SimpleNamespace(model_runner_output=output) if is_asynchronous else output

    class Both(LayerwiseWorkerMixin, Samples):
        model_runner = runner

    monkeypatch.setattr(worker_module, "get_kv_transfer_group", lambda: runner)
    Both().sample_tokens(None)

    assert output.kv_connector_output.kv_connector_worker_meta == (meta or "complete")
    assert runner.order == order


def test_the_layers_that_make_drafts_are_known_of_either_model_runner() -> None:
    first = SimpleNamespace(drafter=SimpleNamespace(_draft_attn_layer_names={"a"}))
    second = SimpleNamespace(speculator=SimpleNamespace(draft_attn_layer_names={"b"}))
    without_kv = SimpleNamespace(drafter=object())

    found = [drafting_layers(one) for one in (first, second, without_kv, object())]
    assert found == [{"a"}, {"b"}, set(), set()]


@pytest.mark.parametrize("group", [0, 2])
def test_a_draft_model_has_its_own_groups_table(group: int) -> None:
    drafter = object.__new__(DraftModelProposer)
    drafter.kv_cache_gid = group
    tables = [SimpleNamespace(block_table=SimpleNamespace(gpu=[n] * 8)) for n in range(3)]
    first = SimpleNamespace(
        seq_lens=[1, 1], num_actual_tokens=5, block_table_tensor=[0] * 2, slot_mapping=[0] * 5
    )

    def build(*, slot_mappings: Any, is_warm_up: bool = False) -> Any:
        return {}, None if is_warm_up else first

    head, model = (
        SimpleNamespace(
            drafter=one,
            input_batch=SimpleNamespace(block_table=tables),
            _build_attention_metadata=build,
        )
        for one in (object(), drafter)
    )
    for runner in (head, model):
        give_draft_model_its_table(runner)

    slots = {n: [10 * n] * 8 for n in range(3)}
    assert head._build_attention_metadata is build
    assert model._build_attention_metadata(slot_mappings=slots, is_warm_up=True) == ({}, None)
    _, own = model._build_attention_metadata(slot_mappings=slots)
    assert own.block_table_tensor == [group] * 2
    assert own.slot_mapping == [10 * group] * 5
    assert first.block_table_tensor == [0] * 2, "the layers' own"
