"""The exactness model is one model: every processor and Python version makes the same bytes."""

import hashlib
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from demo.cached_build import recipe_fingerprint
from lab.chat_tokenizer import SPECIAL_TOKENS
from lab.made_up_text import Draws, paragraphs
from lab.models import VOCAB_SIZE, build_exactness_model, exactness_fingerprint

LAB = Path(__file__).resolve().parents[2] / "lab"
SHA256 = {
    "model.safetensors": "dd0bfb1467f3b7482443335cb4bd63418957b8a1adba280afea1ad91ee133bf9",
    "tokenizer.json": "9b8d22bd765c310667df1860849824505dc16a1960b5df93aa5d8f2fad63d933",
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory: Path = tmp_path_factory.mktemp("exactness")
    build_exactness_model(directory)
    return directory


@pytest.mark.parametrize("name", SHA256)
def test_a_build_is_the_recorded_one_to_the_byte(directory: Path, name: str) -> None:
    assert hashlib.sha256((directory / name).read_bytes()).hexdigest() == SHA256[name], (
        "other bytes than those recorded: after a change of the recipe or of the libraries that "
        "write the files, record these; on another machine, what draws the model is not exact"
    )


def test_the_recipe_is_three_files_of_this_repository() -> None:
    files = ("models.py", "chat_tokenizer.py", "made_up_text.py")

    assert exactness_fingerprint() == recipe_fingerprint(*((LAB / f).read_text() for f in files))


def test_weights_have_the_deviations_that_make_a_wrong_block_visible(directory: Path) -> None:
    weights = load_file(directory / "model.safetensors")

    # Gain / sqrt(inputs): 1.75 / sqrt(192), 1 / sqrt(192), 0.3 / sqrt(512), and 1.
    for name, deviation in {
        "model.layers.3.self_attn.q_proj.weight": 0.1263,
        "model.layers.3.self_attn.k_proj.weight": 0.1263,
        "model.layers.3.self_attn.v_proj.weight": 0.0722,
        "model.layers.3.mlp.down_proj.weight": 0.01326,
        "model.embed_tokens.weight": 1.0,
    }.items():
        assert weights[name].std() == pytest.approx(deviation, rel=0.02)
        assert abs(weights[name].mean()) < 0.03 * deviation
    assert (weights["model.norm.weight"] == 1).all()


def test_special_tokens_are_never_the_likeliest(directory: Path) -> None:
    head = load_file(directory / "model.safetensors")["lm_head.weight"]

    assert not head[: len(SPECIAL_TOKENS)].any()
    assert np.abs(head[len(SPECIAL_TOKENS) :]).sum(axis=1).min() > 0


def test_every_tensor_is_another_draw(directory: Path) -> None:
    weights = load_file(directory / "model.safetensors")
    matrices = {name: matrix for name, matrix in weights.items() if matrix.ndim == 2}

    assert len({matrix[5].tobytes() for matrix in matrices.values()}) == len(matrices) == 8 * 7 + 2


def test_the_tokenizer_fills_the_vocabulary_and_encodes_any_text(directory: Path) -> None:
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    text = "Plain English, 2026: naïve 日本語 🎉\n\n\tdef f(x): return 1"

    assert tokenizer.get_vocab_size() == VOCAB_SIZE
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_another_seed_writes_another_text() -> None:
    one, same, other = (list(islice(paragraphs(seed), 3)) for seed in ("1", "1", "2"))

    assert one == same
    assert one != other


def test_draws_end_with_an_error() -> None:
    draws = Draws("seed", 2)
    drawn = [draws.below(10), draws.below(10)]

    assert all(0 <= value < 10 for value in drawn)
    with pytest.raises(IndexError, match="no draws are left"):
        draws.below(10)
