"""A model that layer-wise KV does not take is refused by its kind, with what works instead."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from services.executor.model_kinds import (
    keeps_less,
    layers_in_words,
    longest_context,
    read_config,
    refusal_of_files,
    refused_kind,
)
from services.kit.settings import BAD_SETTINGS_EXIT_CODE
from tests.unit.placement.test_layer_kinds import DEEPSEEK_V3, GEMMA_3_27B, LLAMA, QWEN3_MOE

MISTRAL = {**LLAMA, "model_type": "mistral", "sliding_window": 4096}

CHUNKED = {
    **LLAMA,
    "layer_types": ["chunked_attention", "full_attention"] * 16,
    "attention_chunk_size": 512,
}
GEMMA_4 = {**LLAMA, "model_type": "gemma4_text", "head_dim": 256, "global_head_dim": 512}


def write(directory: Path, config: Any) -> str:
    (directory / "config.json").write_text(json.dumps(config))
    return str(directory)


@pytest.mark.parametrize(
    "config",
    [
        LLAMA,
        QWEN3_MOE,
        CHUNKED,
        GEMMA_4,
        DEEPSEEK_V3,
        GEMMA_3_27B,
        {**LLAMA, "layer_types": [*["mamba"] * 7, "attention"] * 4},
        {**LLAMA, "hybrid_override_pattern": "M-M*" * 8},
        {**LLAMA, "layer_types": ["of_tomorrow"] * 32},
        {},
    ],
)
def test_models_that_are_served_or_not_known_pass(config: dict[str, Any]) -> None:
    assert refused_kind(config, max_model_len=8_192) is None


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (MISTRAL, "sliding windows only"),
        ({**DEEPSEEK_V3, "index_topk": 2048}, r"sparse attention \(DSA"),
        ({**LLAMA, "num_kv_shared_layers": 10}, "layers that share KV"),
        ({**GEMMA_4, "global_head_dim": 384}, "KV heads of unlike sizes"),
        ({**LLAMA, "num_key_value_heads": [8] * 31 + [4]}, "KV heads of unlike sizes or numbers"),
        ({**LLAMA, "model_type": "mamba2"}, "states only"),
        ({**CHUNKED, "layer_types": ["chunked_attention"] * 32}, "chunked local attention only"),
        (
            {**DEEPSEEK_V3, "layer_types": ["linear_attention", "full_attention"] * 32},
            "states beside MLA",
        ),
        ({**LLAMA, "model_type": "falcon_h1"}, "attention and a state in one layer only"),
    ],
)
def test_kinds_that_nothing_can_be_done_for_are_refused_in_words_with_what_works(
    config: dict[str, Any], named: str
) -> None:
    with_remedy = f"{named}.*; serve it without --layerwise-kv"
    refusal = refused_kind(config, max_model_len=8_192)

    assert refusal is not None
    assert re.match(with_remedy, refusal), refusal
    assert "Spec" not in refusal


@pytest.mark.parametrize(("max_model_len", "is_refused"), [(4096, False), (4097, True)])
def test_a_window_that_holds_the_longest_context_is_none(
    max_model_len: int, is_refused: bool
) -> None:
    assert (refused_kind(MISTRAL, max_model_len=max_model_len) is not None) is is_refused


def test_windows_may_bite_where_no_length_is_known() -> None:
    assert refused_kind(MISTRAL, max_model_len=None) is not None


@pytest.mark.parametrize(
    ("scaling", "longest"),
    [
        (None, 4096),
        ({"rope_type": "dynamic", "factor": 4.0}, 16_384),
        ({"type": "linear", "factor": 2}, 8_192),
        ({"rope_type": "yarn", "factor": 4.0}, 4096),  # which is stretched already
    ],
)
def test_the_models_own_length_counts_as_positions_are_scaled(
    tmp_path: Path, scaling: dict[str, Any] | None, longest: int
) -> None:
    config = {**MISTRAL, "max_position_embeddings": 4096, "rope_scaling": scaling}

    assert longest_context(config) == longest
    refusal = refusal_of_files(write(tmp_path, config), None, max_model_len=None)
    assert (refusal is None) is (longest == 4096)  # as the window is


def test_the_length_that_is_asked_for_counts_before_the_models_own(tmp_path: Path) -> None:
    model = write(tmp_path, {**MISTRAL, "max_position_embeddings": 4096})

    assert refusal_of_files(model, None, max_model_len=8192) is not None
    assert longest_context({}) is None


def test_a_models_own_file_is_not_asked_where_another_is_read(tmp_path: Path) -> None:
    model = write(tmp_path, MISTRAL)
    assert refusal_of_files(model, None, max_model_len=None) is not None

    overridden = ("--hf-overrides", '{"sliding_window": null}')
    assert refusal_of_files(model, None, max_model_len=None, engine_args=overridden) is None


def test_a_file_that_is_missing_or_no_json_is_left_to_vllm(tmp_path: Path) -> None:
    assert read_config(str(tmp_path)) is None
    (tmp_path / "config.json").write_text("{")
    assert read_config(str(tmp_path)) is None
    assert read_config(write(tmp_path, [1])) is None
    assert refusal_of_files(str(tmp_path), None, max_model_len=None) is None


def test_models_of_more_than_text_are_judged_by_their_text(tmp_path: Path) -> None:
    sees = {"model_type": "sees", "text_config": MISTRAL}
    refusal = refusal_of_files(write(tmp_path, sees), None, max_model_len=8192)

    assert refusal is not None
    assert "sliding windows only" in refusal


@pytest.mark.parametrize(
    ("config", "max_model_len", "expected"),
    [
        (LLAMA, 8_192, False),
        (GEMMA_3_27B, 8_192, True),
        (GEMMA_3_27B, 1_024, False),  # its window
        ({**LLAMA, "layer_types": [*["mamba"] * 7, "attention"] * 4}, 8_192, True),
    ],
)
def test_a_model_keeps_less_where_a_window_bites_or_a_layer_has_a_state(
    config: dict[str, Any], max_model_len: int, expected: bool
) -> None:
    assert keeps_less(config, max_model_len=max_model_len) is expected


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (LLAMA, "32 of full attention"),
        (GEMMA_3_27B, "52 of sliding windows, 10 of full attention"),
        ({}, ""),
    ],
)
def test_layers_are_counted_by_kind(config: dict[str, Any], words: str) -> None:
    assert layers_in_words(config, max_model_len=8192, may_leave=False) == words


@pytest.mark.parametrize(
    ("config", "max_model_len", "num"),
    [(DEEPSEEK_V3, 8192, "all"), (GEMMA_3_27B, 8192, "10"), (GEMMA_3_27B, 1024, "all")],
)
def test_it_is_said_how_many_layers_may_leave(
    config: dict[str, Any], max_model_len: int, num: str
) -> None:
    words = layers_in_words(config, max_model_len=max_model_len, may_leave=True)

    assert words.endswith(f": {num} may leave the pool")


def test_the_executor_says_no_before_it_loads_anything(tmp_path: Path) -> None:
    """Without a tokenizer, weights, or an import of vLLM: there are none to be had here."""
    code = (
        "import sys; from services.executor.app import main\n"
        "try: main()\n"
        "finally: assert 'vllm' not in sys.modules"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code],
        env={
            "PYTHONPATH": ":".join(sys.path),
            "EVENFLOW_EXECUTOR_MODEL": write(tmp_path, MISTRAL),
            "EVENFLOW_EXECUTOR_LAYERWISE_KV": "true",
        },
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )

    assert ended.returncode == BAD_SETTINGS_EXIT_CODE, ended.stderr
    assert "EVENFLOW_EXECUTOR_LAYERWISE_KV: layer-wise KV does not work with" in ended.stderr
    assert "sliding windows only" in ended.stderr
