"""A rank's side of the connector without an engine: memory comes, steps begin."""

from collections.abc import Iterator
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from services.executor.copies.pages import view_pools
from services.executor.kv_options import CONFIG_KEY, KVOptions
from services.executor.plugin.connector import LayerwiseConnector
from services.executor.step_messages import SaveOrder, StepTransfers

pytestmark = pytest.mark.filterwarnings("default")

NUM_BLOCKS, PAGE_BYTES = 9, 1 << 16
FIRST_CHUNK_SLOTS = 256  # 16 MiB, the least that is pinned at a time


@pytest.fixture
def connector() -> Iterator[Any]:
    """Return a connector of two layers whose 48 MiB of host memory take a time to pin."""
    options = KVOptions(host_bytes=3 * FIRST_CHUNK_SLOTS * PAGE_BYTES, pin_bytes_per_s=1e12)
    config: Any = SimpleNamespace(
        kv_transfer_config=object(),
        additional_config={CONFIG_KEY: asdict(options)},
        parallel_config=SimpleNamespace(rank=0),
    )
    spec = SimpleNamespace(block_size=16, page_size_bytes=PAGE_BYTES)
    cache: Any = SimpleNamespace(
        num_blocks=NUM_BLOCKS,
        kv_cache_groups=[
            SimpleNamespace(layer_names=[name], kv_cache_spec=spec) for name in ("a", "b")
        ],
    )
    connector = LayerwiseConnector(config, KVConnectorRole.WORKER, cache)
    pool = torch.zeros((NUM_BLOCKS, PAGE_BYTES), dtype=torch.uint8)
    connector.register_kv_caches({"a": pool, "b": pool})
    yield connector
    connector.shutdown()


def test_the_link_is_measured_with_a_first_chunk_and_no_more_is_pinned_until_told(
    connector: Any,
) -> None:
    feedback = connector.build_connector_worker_meta()
    assert feedback.num_ready_slots == FIRST_CHUNK_SLOTS
    links = feedback.timing.calibration
    assert links is not None
    # All blocks but the null block, or as many as a chunk of 4 MiB has, if they do not take long.
    assert PAGE_BYTES <= links.large_h2d.num_bytes <= (NUM_BLOCKS - 1) * PAGE_BYTES

    connector.start_pinning()
    connector._backend.host.wait_until_pinned()

    assert connector.build_connector_worker_meta().num_ready_slots == 3 * FIRST_CHUNK_SLOTS


class NotedMarks:
    def __init__(self) -> None:
        self.begun: list[int] = []

    def layers_begin(self, step: int) -> None:
        self.begun.append(step)


@pytest.mark.parametrize(
    ("in_context", "as_keyword", "begun"),
    [
        ({}, {}, [5]),
        (None, {"attn_metadata": {}}, [5]),  # the second model runner before a full graph
        (None, {}, []),  # a step without tokens
    ],
)
def test_layers_begin_in_steps_that_have_tokens_whichever_graph_they_replay(
    connector: Any,
    in_context: dict[str, Any] | None,
    as_keyword: dict[str, Any],
    begun: list[int],
) -> None:
    marks = NotedMarks()
    connector._clock = SimpleNamespace(marks=marks)
    connector.bind_connector_metadata(StepTransfers(step=5))

    connector.start_load_kv(SimpleNamespace(attn_metadata=in_context), **as_keyword)

    assert marks.begun == begun


def test_kv_whose_blocks_are_not_dense_is_refused() -> None:
    by_layer = torch.zeros((NUM_BLOCKS, 2, 64))  # two layers in each block
    with pytest.raises(ValueError, match="dense blocks"):
        view_pools({"a": by_layer[:, 0]}, [["a"]], num_blocks=NUM_BLOCKS)

    halves = torch.zeros((2 * NUM_BLOCKS, 32))  # two rows per block
    ((pages,),) = view_pools({"a": halves}, [["a"]], num_blocks=NUM_BLOCKS)
    assert pages.shape == (NUM_BLOCKS, 2 * 32 * 4)


def test_a_step_that_has_not_ended_has_nothing_to_tell(connector: Any) -> None:
    """Its copies to the host may have yet to begin: by their absence they would be complete."""
    save = SaveOrder("r", 0, uids=[1], slots=[0], block_ids=[1], from_staging=False)
    connector.bind_connector_metadata(StepTransfers(step=5, saves=[save]))
    connector.start_load_kv(SimpleNamespace(attn_metadata=None))

    assert connector.build_connector_worker_meta() is None
    with pytest.raises(AssertionError, match="has not ended"):
        connector.runner.feedback()

    connector.wait_for_save()

    assert connector.build_connector_worker_meta().step == 5
