"""A GGUF file becomes the checkpoint that it was made of, but for what quantising took."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf.quants import dequantize, quantize
from tokenizers import Tokenizer

from demo.gguf_checkpoint import CheckpointError, GGUFCheckpoint
from tests.tiny_gguf import (
    HEAD_DIM,
    HIDDEN,
    INNER,
    MERGES,
    NUM_HEADS,
    NUM_KV_HEADS,
    NUM_LAYERS,
    TOKENS,
    make_weights,
    permuted,
    quantisation,
    write_gguf,
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> GGUFCheckpoint:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    return GGUFCheckpoint(write_gguf(path, make_weights()))


@pytest.fixture(scope="module")
def tokenizer(checkpoint: GGUFCheckpoint) -> Any:
    return checkpoint.tokenizer()


def spelled(tokenizer: Any, text: str) -> list[str]:
    tokens: list[str] = tokenizer.encode(text).tokens
    return tokens


def test_every_tensor_comes_back_by_its_name_with_its_rows_in_order(
    checkpoint: GGUFCheckpoint,
) -> None:
    reports: list[tuple[int, int]] = []
    weights = checkpoint.weights(lambda done, total: reports.append((done, total)))

    # A row is quantised by itself, so that the order of rows changes none of its values.
    expected = {
        name: dequantize(quantize(values, quantisation(name)), quantisation(name))
        for name, values in make_weights().items()
    }
    assert weights.keys() == expected.keys()
    for name, values in weights.items():
        assert values.dtype == np.float32
        np.testing.assert_array_equal(values, expected[name], err_msg=name)
    assert reports == [(done, 20) for done in range(1, 21)]  # 2 layers of 9, and 2


def test_gguf_puts_rows_that_rotary_embedding_turns_together_next_to_each_other() -> None:
    # Guards the test above: an order that changed nothing would pass it.
    name = "model.layers.0.self_attn.k_proj.weight"
    rows = np.repeat(np.arange(32, dtype=np.float32)[:, None], HIDDEN, axis=1)

    assert permuted(name, rows)[:4, 0].tolist() == [0, 8, 1, 9]
    assert permuted(name, rows)[16:20, 0].tolist() == [16, 24, 17, 25]


def test_the_configuration_is_the_file_s(checkpoint: GGUFCheckpoint) -> None:
    assert checkpoint.config() == {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "hidden_act": "silu",
        "num_hidden_layers": NUM_LAYERS,
        "max_position_embeddings": 256,
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_attention_heads": NUM_HEADS,
        "num_key_value_heads": NUM_KV_HEADS,
        "head_dim": HEAD_DIM,
        "vocab_size": len(TOKENS),
        "rms_norm_eps": 1e-5,
        "rope_theta": 100_000.0,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
    }


def test_output_weights_of_its_own_untie_the_embeddings(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "untied.gguf", make_weights(tied=False))
    checkpoint = GGUFCheckpoint(file)

    assert checkpoint.config()["tie_word_embeddings"] is False
    assert checkpoint.weights(lambda *_: None)["lm_head.weight"].shape == (len(TOKENS), HIDDEN)


@pytest.mark.parametrize(
    "text",
    [
        "the rain in Spain, 1234!",
        "naïve 日本語 🎉",
        " two  spaces\n\n\tand lines\n",
        "<|im_start|>the",
    ],
)
def test_text_comes_back_as_it_was(tokenizer: Any, text: str) -> None:
    ids = tokenizer.encode(text).ids

    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_digits_stand_alone_though_a_merge_would_join_them(tokenizer: Any) -> None:
    assert "1 2" in MERGES
    assert spelled(tokenizer, "1234") == ["1", "2", "3", "4"]
    assert spelled(tokenizer, "in 12") == ["in", "Ġ", "1", "2"]


def test_a_frequent_word_is_one_token(tokenizer: Any) -> None:
    assert spelled(tokenizer, "the the") == ["the", "Ġthe"]


def test_control_tokens_are_special_and_keep_their_ids(tokenizer: Any) -> None:
    ids = tokenizer.encode("<|im_start|>in<|im_end|>").ids

    assert ids == [1, TOKENS.index("in"), 2]
    assert tokenizer.decode(ids) == "in"


def test_saved_files_make_the_same_tokenizer(checkpoint: GGUFCheckpoint, tmp_path: Path) -> None:
    checkpoint.save_tokenizer(tmp_path, chat_template="{{ mine }}")

    loaded = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert loaded.encode("the rain 42").ids == checkpoint.tokenizer().encode("the rain 42").ids
    assert config["chat_template"] == "{{ mine }}"
    assert (config["bos_token"], config["eos_token"]) == ("<|im_start|>", "<|im_end|>")
    assert (config["pad_token"], config["model_max_length"]) == ("<|im_end|>", 256)
    assert checkpoint.chat_template == "{{ messages }}"


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ({"architecture": "gemma2"}, "other.gguf: gemma2 with gpt2 tokens"),
        ({"tokens": "llama"}, "other.gguf: llama with llama tokens"),
    ],
)
def test_another_kind_of_model_is_refused(
    tmp_path: Path, kind: dict[str, str], message: str
) -> None:
    file = write_gguf(tmp_path / "other.gguf", {}, **kind)

    with pytest.raises(CheckpointError, match=message):
        GGUFCheckpoint(file)


def test_a_file_that_does_not_say_a_value_is_refused(tmp_path: Path) -> None:
    checkpoint = GGUFCheckpoint(write_gguf(tmp_path / "x.gguf", {}, says_pad_token=False))

    with pytest.raises(CheckpointError, match=r"says no tokenizer\.ggml\.padding_token_id"):
        checkpoint.config()
