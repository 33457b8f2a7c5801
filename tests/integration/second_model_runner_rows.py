"""Row edits in Model Runner V2's own tables and kernels, under Triton's interpreter.

Run as a process of its own: the interpreter is chosen when Triton is imported.
"""

# ruff: noqa: E402  # Triton is told what it runs on before anybody imports it
import os

os.environ["TRITON_INTERPRET"] = "1"

import types

import triton.backends

triton.backends.backends["cpu"] = types.SimpleNamespace(  # what vLLM asks about Triton
    driver=types.SimpleNamespace(is_active=lambda: True)
)

import torch
import vllm.v1.worker.gpu.buffer_utils as buffer_utils

buffer_utils.is_uva_available = lambda: False

from vllm.v1.worker.gpu.block_table import BlockTables
from vllm.v1.worker.gpu.states import RequestState

from services.executor.plugin.worker import LayerwiseWorkerMixin
from services.executor.step_messages import RowEdit

NUM_GROUPS, BLOCK_SIZE, MAX_TOKENS = 3, 4, 64
DEVICE = torch.device("cpu")


class Worker(LayerwiseWorkerMixin):
    """The mixin over a runner that has nothing but rows."""

    def __init__(self) -> None:
        states = RequestState(4, MAX_TOKENS, 128, 0, 1_000, DEVICE)
        tables = BlockTables(
            [BLOCK_SIZE] * NUM_GROUPS, 4, 128, [MAX_TOKENS // BLOCK_SIZE] * NUM_GROUPS, DEVICE
        )
        self.model_runner = types.SimpleNamespace(req_states=states, block_tables=tables)

    def add(self, request_id: str, rows: list[list[int]]) -> None:
        states, tables = self.model_runner.req_states, self.model_runner.block_tables
        states.add_request(request_id, 8, list(range(8)), 0, 32)
        index = states.req_id_to_index[request_id]
        tables.append_block_ids(index, tuple(rows), overwrite=True)

    def append(self, request_id: str, ids: list[list[int]]) -> None:
        index = self.model_runner.req_states.req_id_to_index[request_id]
        self.model_runner.block_tables.append_block_ids(index, tuple(ids), overwrite=False)

    def step(self) -> None:
        self.model_runner.req_states.apply_staged_writes()
        self.model_runner.block_tables.apply_staged_writes()

    def rows(self, request_id: str) -> list[list[int]]:
        """Return what attention is given."""
        index = self.model_runner.req_states.req_id_to_index[request_id]
        tables = self.model_runner.block_tables.gather_block_tables(torch.tensor([index]), 1)
        num_blocks = self.model_runner.block_tables.num_blocks.np[:, index]
        return [table[0, :n].tolist() for table, n in zip(tables, num_blocks, strict=True)]

    def slots(self, request_id: str, position: int) -> list[int]:
        """Return where each group's new KV of one token goes."""
        index = self.model_runner.req_states.req_id_to_index[request_id]
        mappings = self.model_runner.block_tables.compute_slot_mappings(
            torch.tensor([index]),
            torch.tensor([0, 1], dtype=torch.int32),
            torch.tensor([position]),
            1,
        )
        return [int(mapping[0]) for mapping in mappings]


def main() -> None:
    worker = Worker()
    worker.add("r", [[5, 6, 7], [8, 9, 10], [11, 12, 13]])
    worker.add("s", [[20, 21], [22, 23], [24, 25]])
    worker.step()

    # Edits of several groups and rows, with the blocks that the step itself appends.
    edits = [
        RowEdit("r", 1, 0, [30, 31]),
        RowEdit("s", 2, 1, [32]),
        RowEdit("r", 2, 1, [33]),
        RowEdit("unknown", 0, 0, [99]),
    ]
    worker._edit_rows_v2(edits, set())
    worker.append("r", [[14], [15], [16]])
    worker.step()
    assert worker.rows("r") == [[5, 6, 7, 14], [30, 31, 10, 15], [11, 33, 13, 16]]
    assert worker.rows("s") == [[20, 21], [22, 23], [24, 32]]
    assert worker.slots("r", 13) == [14 * 4 + 1, 15 * 4 + 1, 16 * 4 + 1]
    assert worker.slots("r", 1) == [5 * 4 + 1, 30 * 4 + 1, 11 * 4 + 1]

    # A request that ends in this step, whose place another takes: its late edit is not written.
    worker._edit_rows_v2([RowEdit("s", 0, 0, [40, 41])], {"s"})
    tables = worker.model_runner.block_tables.block_tables
    assert not any(table._staged_write_indices for table in tables)
    worker.model_runner.req_states.remove_request("s")
    worker.add("t", [[50, 51], [52, 53], [54, 55]])
    worker.step()
    assert worker.rows("t") == [[50, 51], [52, 53], [54, 55]]

    # A step without edits leaves everything as it is.
    worker._edit_rows_v2([], set())
    worker.step()
    assert worker.rows("r") == [[5, 6, 7, 14], [30, 31, 10, 15], [11, 33, 13, 16]]
    print("rows are right")


if __name__ == "__main__":
    main()
