"""FlashAttention's metadata is built once for all layer groups of a step, and anew for the next."""

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.attention.backends.flash_attn import FlashAttentionMetadataBuilder

from services.executor.plugin.flash_attention import MemoFlashAttentionMetadataBuilder
from services.executor.plugin.step_memo import StepMemo

pytestmark = pytest.mark.filterwarnings("default")


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return what vLLM's own builder has built."""
    all_built: list[Any] = []

    def build(self: Any, common_prefix_len: int, common: Any, fast_build: bool) -> Any:
        metadata = SimpleNamespace(
            block_table=common.block_table_tensor, slot_mapping=common.slot_mapping
        )
        all_built.append(metadata)
        return metadata

    monkeypatch.setattr(FlashAttentionMetadataBuilder, "build", build)
    monkeypatch.setattr(MemoFlashAttentionMetadataBuilder, "_memo", StepMemo())
    return all_built


def metadata_of(
    group: str, step: dict[str, Any], *, window: int | None = None, **others: Any
) -> Any:
    """Have a group's own builder build its metadata of a step."""
    builder: Any = object.__new__(MemoFlashAttentionMetadataBuilder)
    builder.kv_cache_spec = SimpleNamespace(sliding_window=window)
    values = {"num_reqs": 2, "num_actual_tokens": 2, "max_query_len": 1, "max_seq_len": 40}
    values |= {"block_table_tensor": f"table {group}", "slot_mapping": f"slots {group}"}
    return builder.build(0, SimpleNamespace(**{**values, **step, **others}))


def make_step() -> dict[str, Any]:
    return {"query_start_loc": object(), "seq_lens": object(), "causal": True}


def test_groups_of_a_step_share_all_but_their_block_table_and_slots(built: list[Any]) -> None:
    step = make_step()
    first, second = (metadata_of(group, step) for group in "ab")

    assert built == [first]
    assert (first.block_table, first.slot_mapping) == ("table a", "slots a")
    assert (second.block_table, second.slot_mapping) == ("table b", "slots b")


@pytest.mark.parametrize(
    "other",
    [
        {"query_start_loc": object()},
        {"seq_lens": object()},
        {"causal": False},
        {"num_reqs": 3},
        {"num_actual_tokens": 3},
        {"max_query_len": 2},
        {"max_seq_len": 41},
    ],
    ids=lambda other: next(iter(other)),
)
def test_another_step_has_metadata_of_its_own(built: list[Any], other: dict[str, Any]) -> None:
    step = make_step()
    metadata_of("a", step)

    metadata_of("a", step, **other)

    assert len(built) == 2


def test_groups_of_another_window_have_metadata_of_their_own(built: list[Any]) -> None:
    step = make_step()
    full, window, other = (
        metadata_of(name, step, window=w) for name, w in zip("abc", (None, 64, 64), strict=True)
    )

    assert built == [full, window]
    assert other.block_table == "table c"
