"""What the workers add to vLLM's, on runners that hold only what they look at."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from services.executor.plugin import worker as worker_module
from services.executor.plugin.worker import LayerwiseWorkerMixin
from services.executor.step_messages import RowEdit


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
        pass

    connector = SimpleNamespace(start_pinning=lambda: order.append("pinning"))
    monkeypatch.setattr(worker_module, "get_kv_transfer_group", lambda: connector)

    assert Both().compile_or_warm_up_model() == "times"
    assert order == ["captured", "pinning"]
