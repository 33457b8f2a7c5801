"""What layer-wise KV of MLA relies on inside vLLM, and how families of models keep KV.

An upgrade of vLLM or of transformers fails here first.
"""

import ast
import dataclasses
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import vllm
from transformers import CONFIG_MAPPING
from vllm.config import model as model_config
from vllm.model_executor.layers.attention import mla_attention
from vllm.model_executor.layers.attention.mla_attention import (
    MLACommonMetadata,
    MLACommonMetadataBuilder,
    MLACommonPrefillMetadata,
)
from vllm.platforms.cpu import CpuPlatform
from vllm.v1.attention.backends.mla.cpu_mla import CPUMLABackend

from services.executor.model_kinds import IN_LONGEST
from services.placement.layer_kinds import layers_of, text_config

pytestmark = pytest.mark.filterwarnings("default")

BACKENDS = Path(vllm.__file__).parent / "v1" / "attention" / "backends" / "mla"
DENSE = (
    "cutlass_mla",
    "flashattn_mla",
    "flashinfer_mla",
    "flashmla",
    "tokenspeed_mla",
    "triton_mla",
)
WORD_LISTS = ("layer_types", "layers_block_type")


def classes(module: str, base: str) -> Iterator[ast.ClassDef]:
    """Yield the classes of a backend that have a base of that name: most import on a GPU only."""
    for node in ast.walk(ast.parse((BACKENDS / f"{module}.py").read_text())):
        if isinstance(node, ast.ClassDef) and any(
            ast.unparse(one).startswith(base) for one in node.bases
        ):
            yield node


@pytest.mark.parametrize("module", DENSE)
def test_every_builder_on_a_gpu_has_the_common_build_which_the_memo_replaces(module: str) -> None:
    builders = list(classes(module, "MLACommonMetadataBuilder"))

    assert len(builders) == 1
    methods = {node.name for node in builders[0].body if isinstance(node, ast.FunctionDef)}
    assert "build" not in methods
    assert "update_block_table" not in methods


@pytest.mark.parametrize("module", DENSE)
def test_of_a_decodes_metadata_nothing_else_is_made_of_a_block_table(module: str) -> None:
    names = {
        ast.unparse(node.target)
        for decode in classes(module, "MLACommonDecodeMetadata")
        for node in decode.body
        if isinstance(node, ast.AnnAssign)
    }
    # `flattened_block_table`: by the layers, of blocks of drafted tokens.
    assert names <= {
        "flattened_block_table",
        "flattened_seq_lens",
        "flattened_row_req",
        "query_len",
        "query_start_loc",
        "max_query_len",
        "max_seq_len",
        "max_num_splits",
        "scheduler_metadata",
    }


def test_the_memo_replaces_what_depends_on_a_group() -> None:
    parameters = inspect.signature(MLACommonMetadataBuilder.build).parameters
    assert list(parameters) == ["self", "common_prefix_len", "common_attn_metadata", "fast_build"]
    assert "slot_mapping" in {field.name for field in dataclasses.fields(MLACommonMetadata)}
    for part in (MLACommonPrefillMetadata, mla_attention.MLACommonDecodeMetadata):
        assert "block_table" in {field.name for field in dataclasses.fields(part)}
    context = mla_attention.build_mla_chunked_context_metadata
    assert not [name for name in inspect.signature(context).parameters if "table" in name]
    source = Path(mla_attention.__file__).read_text()
    assert "block_table=block_table_tensor[reqs_start:, ...]" in source  # prompts behind decodes
    assert "block_table_tensor=block_table_tensor[:num_decodes, ...]" in source


def test_layers_call_the_hooks_around_attention_which_has_written_its_kv() -> None:
    source = Path(mla_attention.__file__).read_text()

    assert "@maybe_transfer_kv_layer\ndef unified_mla_attention_with_output(" in source


def test_on_a_cpu_without_tiles_prompts_are_computed_whole_in_blocks_of_16() -> None:
    assert CPUMLABackend.get_supported_kernel_block_sizes() == [16]
    source = inspect.getsource(CpuPlatform.check_and_update_config)
    assert "vllm_config.scheduler_config.enable_chunked_prefill = False" in source


# Decoders whose configurations say of each layer what it is, or of none.
FAMILIES = [
    "cohere2",
    "deepseek_v2",
    "deepseek_v3",
    "deepseek_v32",
    "exaone4",
    "falcon_h1",
    "falcon_mamba",
    "gemma2",
    "gemma3",
    "gemma3n",
    "gemma4",
    "glm4_moe_lite",
    "glm_moe_dsa",
    "gpt_oss",
    "jamba",
    "llama",
    "llama4",
    "mamba2",
    "mistral",
    "mixtral",
    "olmo3",
    "phi3",
    "qwen2",
    "qwen3",
    "qwen3_5",
    "qwen3_5_moe",
    "qwen3_moe",
    "qwen3_next",
    "smollm3",
]


@pytest.mark.parametrize("family", FAMILIES)
def test_without_a_list_a_family_has_the_layers_that_transformers_gives_it(family: str) -> None:
    """A checkpoint's file may leave out what its family has by itself."""
    complete: dict[str, Any] = CONFIG_MAPPING[family]().to_dict()
    text = dict(text_config(complete))
    stated = {name: value for name, value in text.items() if name not in WORD_LISTS}

    assert [layer.kind for layer in layers_of(stated)] == [
        layer.kind for layer in layers_of(complete)
    ]


def test_positions_that_are_stretched_already_are_those_that_vllm_knows() -> None:
    source = inspect.getsource(model_config._get_and_verify_max_len)
    stretched = {kind for kind in IN_LONGEST if kind} - {"default", "mrope"}

    assert all(f'"{kind}",' in source for kind in stretched)
