"""Where a model is read from."""

import json

import pytest
from huggingface_hub import constants

from simulator.finding import find_model
from tests.model_configs import LLAMA_3_8B


def test_a_name_of_ours_is_its_table() -> None:
    assert find_model("llama-3-8b").source.startswith("meta-llama/")


def test_a_directory_and_its_config_are_the_same_model(tmp_path) -> None:
    directory = tmp_path / "my-llama"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(LLAMA_3_8B))
    one, other = find_model(str(directory)), find_model(str(directory / "config.json"))

    assert one == other
    assert one.name == "my-llama"


def test_a_file_of_another_name_gives_it_to_the_model(tmp_path) -> None:
    path = tmp_path / "small.json"
    path.write_text(json.dumps(LLAMA_3_8B))

    assert find_model(str(path)).name == "small"


def test_a_model_of_the_table_is_the_same_by_its_config(tmp_path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA_3_8B))
    named, read = find_model("llama-3-8b"), find_model(str(path))

    assert read.num_parameters == named.num_parameters
    assert (read.layers, read.head) == (named.layers, named.head)
    assert read.weight_bytes == named.weight_bytes


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """Let Hugging Face's cache be empty, and nothing downloaded."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return tmp_path


def test_a_hub_id_is_read_from_the_cache(cache) -> None:
    repository = cache / "models--some--llama"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("abc")
    (repository / "snapshots" / "abc").mkdir(parents=True)
    (repository / "snapshots" / "abc" / "config.json").write_text(json.dumps(LLAMA_3_8B))

    assert find_model("some/llama").name == "some/llama"


def test_offline_a_hub_id_that_is_not_cached_is_refused_in_a_sentence(cache) -> None:
    with pytest.raises(ValueError, match=r"some/llama is not in .* HF_HUB_OFFLINE forbids"):
        find_model("some/llama")


def test_what_is_nothing_is_refused_with_what_would_be_something() -> None:
    with pytest.raises(ValueError, match=r"'nothing' is no model.*llama-3-8b.*hub id"):
        find_model("nothing")


@pytest.mark.parametrize("text", ["{", "[]"])
def test_a_file_that_is_no_config_is_refused(tmp_path, text) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)

    with pytest.raises(ValueError, match=r"config\.json"):
        find_model(str(path))
