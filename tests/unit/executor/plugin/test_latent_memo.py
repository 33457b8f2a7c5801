"""MLA's metadata is built once for all layer groups of a step, and anew for the next."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.model_executor.layers.attention.mla_attention import (
    MLACommonDecodeMetadata,
    MLACommonMetadata,
    MLACommonMetadataBuilder,
    MLACommonPrefillMetadata,
)

from services.executor.plugin.latent_memo import LatentMemo, install_memo

pytestmark = pytest.mark.filterwarnings("default")

NUM_DECODES, NUM_PROMPTS = 2, 1


class Builder:
    """As far as the memo looks at one."""

    def __init__(self, spec: str = "latents") -> None:
        self.kv_cache_spec = spec


class OtherBuilder(Builder):
    """Of another backend."""


def own_build(builder: Builder, prefix: int, common: Any, fast: bool = False) -> MLACommonMetadata:
    table = common.block_table_tensor
    return MLACommonMetadata(
        num_reqs=NUM_DECODES + NUM_PROMPTS,
        max_query_len=9,
        max_seq_len=40,
        num_actual_tokens=11,
        query_start_loc=common.query_start_loc,
        slot_mapping=common.slot_mapping,
        num_decodes=NUM_DECODES,
        num_decode_tokens=NUM_DECODES,
        num_prefills=NUM_PROMPTS,
        decode=MLACommonDecodeMetadata(
            block_table=table[:NUM_DECODES], seq_lens=common.seq_lens, dcp_tot_seq_lens=None
        ),
        prefill=MLACommonPrefillMetadata(
            block_table=table[NUM_DECODES:],
            query_start_loc=common.query_start_loc,
            max_query_len=9,
        ),
    )


def make_step() -> dict[str, Any]:
    return {
        "query_start_loc": torch.tensor([0, 1, 2, 11]),
        "seq_lens": torch.tensor([40, 5, 9]),
        "causal": True,
        "num_reqs": 3,
        "num_actual_tokens": 11,
        "max_query_len": 9,
        "max_seq_len": 40,
    }


def common_of(group: int, step: dict[str, Any]) -> Any:
    """Return what vLLM tells a builder of one group: rows of three requests, slots of 11 tokens."""
    return SimpleNamespace(
        **step,
        block_table_tensor=torch.full((3, 4), group),
        slot_mapping=torch.full((11,), 100 + group),
    )


def make_memo() -> tuple[LatentMemo, list[Any]]:
    built: list[Any] = []

    def build(builder: Builder, *args: Any) -> MLACommonMetadata:
        built.append(own_build(builder, *args))
        return built[-1]

    return LatentMemo(lambda builder: None, build), built


def test_groups_of_a_step_share_all_but_their_block_table_and_slots() -> None:
    memo, built = make_memo()
    step = make_step()
    first, second = (memo.build(Builder(), 0, common_of(group, step)) for group in (1, 2))

    assert len(built) == 1
    for group, metadata in ((1, first), (2, second)):
        expected = own_build(Builder(), 0, common_of(group, step))
        assert metadata.slot_mapping.equal(expected.slot_mapping)
        assert metadata.decode.block_table.equal(expected.decode.block_table)
        assert metadata.prefill.block_table.equal(expected.prefill.block_table)
        assert metadata.decode.seq_lens is step["seq_lens"]
        assert metadata.prefill.query_start_loc is step["query_start_loc"]


def test_a_step_of_one_kind_of_requests_has_no_metadata_of_the_other() -> None:
    def build(*args: Any) -> MLACommonMetadata:
        metadata = own_build(*args)
        metadata.prefill = None
        return metadata

    memo, step = LatentMemo(lambda builder: None, build), make_step()
    first, second = (memo.build(Builder(), 0, common_of(group, step)) for group in (1, 2))

    assert first.prefill is second.prefill is None
    assert second.decode.block_table.equal(torch.full((2, 4), 2))


@pytest.mark.parametrize(
    "other",
    [
        {"query_start_loc": torch.tensor([0, 1, 2, 11])},
        {"seq_lens": torch.tensor([40, 5, 9])},
        {"causal": False},
        {"num_reqs": 4},
        {"num_actual_tokens": 12},
        {"max_query_len": 8},
        {"max_seq_len": 41},
    ],
    ids=lambda other: next(iter(other)),
)
def test_another_step_has_metadata_of_its_own(other: dict[str, Any]) -> None:
    memo, built = make_memo()
    step = make_step()
    memo.build(Builder(), 0, common_of(1, step))

    memo.build(Builder(), 0, common_of(1, {**step, **other}))

    assert len(built) == 2


@pytest.mark.parametrize("other", [OtherBuilder(), Builder("other latents")])
def test_another_backend_or_kind_of_latents_has_metadata_of_its_own(other: Builder) -> None:
    memo, built = make_memo()
    step = make_step()
    memo.build(Builder(), 0, common_of(1, step))

    memo.build(other, 0, common_of(2, step))

    assert len(built) == 2


def test_builders_share_a_workspace_of_one_size() -> None:
    def own_init(builder: Any, num_rows: int) -> None:
        builder.chunked_prefill_workspace = torch.empty(num_rows, 576)

    memo = LatentMemo(own_init, own_build)
    builders: list[Any] = [SimpleNamespace() for _ in range(3)]
    for builder, num_rows in zip(builders, (64, 64, 32), strict=True):
        memo.init(builder, num_rows)
    first, second, smaller = (builder.chunked_prefill_workspace for builder in builders)

    assert second is first
    assert smaller.shape == (32, 576)


def test_vllms_builders_use_it_once_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    cls: Any = MLACommonMetadataBuilder
    for name in ("__init__", "build"):
        monkeypatch.setattr(cls, name, getattr(cls, name))
    if hasattr(cls, "latent_memo"):
        monkeypatch.delattr(cls, "latent_memo")
    monkeypatch.setattr(cls, "build", own_build)

    install_memo()
    install_memo()
    try:
        builder: Any = object.__new__(cls)
        builder.kv_cache_spec = "latents"
        step = make_step()
        first, second = (builder.build(0, common_of(group, step)) for group in (1, 2))

        assert second.query_start_loc is first.query_start_loc
        assert second.decode is not first.decode
        assert second.slot_mapping.equal(torch.full((11,), 102))
    finally:
        del cls.latent_memo
