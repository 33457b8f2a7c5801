"""What a form of `evenflow size` may ask for, and what it is told."""

import json
from pathlib import Path

import pytest

from simulator.form import answer
from tests.model_configs import LLAMA_3_8B

OPTIONS = {
    "model": "llama-3-8b",
    "device": "a5000",
    "context": "200",
    "answer": 20,
    "policy": "vllm",
    "max_readers": 1,
    "pool_tokens": 1_024,
}


def ask(config: dict[str, object] | None = None, **changed: object) -> dict[str, object]:
    return answer({"options": OPTIONS | changed, "config": config, "served": []})


def test_the_answer_is_what_the_command_says() -> None:
    said = ask()["said"]

    assert said[0][0] == "room"
    assert said[-1] == ["vllm", "1 readers or more"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("context", "0"),
        ("context", "many"),
        ("context", ""),
        ("device", "no-such-device"),
        ("device", None),
        ("link", "no-such-link"),
        # No path, hub id, or module of the asker's is read, and no file is written.
        ("model", "/etc"),
        ("model", "owner/name"),
        ("policy", "os:getcwd"),
        ("json", "/tmp/written"),
        ("device_file", "/etc/passwd"),
    ],
)
def test_a_fault_names_its_field(field: str, value: object) -> None:
    told = ask(**{field: value})

    assert told["field"] == field
    assert told["error"]


def test_a_config_is_at_fault_as_the_model_without_the_place_it_was_put_at() -> None:
    told = ask(config={"hidden_size": 3})

    assert told["field"] == "model"
    assert str(told["error"]).startswith("config.json")
    assert "error" not in ask(config=LLAMA_3_8B, model="")


def test_a_model_of_another_folder_is_read_only_where_it_is_served(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_3_8B))

    assert ask(model=str(tmp_path))["field"] == "model"
    options = OPTIONS | {"model": str(tmp_path)}
    assert "said" in answer({"options": options, "config": None, "served": [str(tmp_path)]})
