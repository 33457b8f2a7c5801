"""What is missing before a start is named in a sentence that says what to do."""

import json
import shutil
import socket
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from cli.local.preflight import (
    PreflightError,
    UnsuitedModelError,
    require_disk,
    require_free_ports,
    require_kind,
    require_memory,
    require_model,
    require_redis,
)
from cli.local.settings import StackSettings, read_settings
from lab.stack.ports import free_port
from services.kit.settings import BAD_SETTINGS_EXIT_CODE

GIB = 1 << 30


def make_settings(model: Path, **environ: str) -> StackSettings:
    return read_settings({"EVENFLOW_EXECUTOR_MODEL": str(model), **environ})


def test_a_taken_port_is_named_with_what_moves_it() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]

        with pytest.raises(PreflightError, match=rf"port {port} .*EVENFLOW_REDIS_PORT"):
            require_free_ports({"EVENFLOW_REDIS_PORT": port})
        with pytest.raises(PreflightError, match=r"--port"):
            require_free_ports({"EVENFLOW_GATEWAY_HTTP_PORT": port})


def test_a_free_port_passes() -> None:
    require_free_ports({"EVENFLOW_REDIS_PORT": free_port()})


def test_a_directory_without_a_checkpoint_is_named(tmp_path: Path) -> None:
    with pytest.raises(PreflightError, match=r"no config\.json"):
        require_model(str(tmp_path))
    (tmp_path / "config.json").touch()

    require_model(str(tmp_path))


def test_a_model_that_layerwise_kv_does_not_take_is_named_where_it_is_asked_for(
    tmp_path: Path,
) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps(
            {
                "num_hidden_layers": 4,
                "num_attention_heads": 4,
                "hidden_size": 64,
                "sliding_window": 512,
            }
        )
    )
    layerwise = {"EVENFLOW_EXECUTOR_LAYERWISE_KV": "true"}
    with pytest.raises(UnsuitedModelError, match=r"sliding windows only.*--layerwise-kv") as error:
        require_kind(make_settings(tmp_path, **layerwise))
    assert error.value.exit_code == BAD_SETTINGS_EXIT_CODE

    require_kind(make_settings(tmp_path))
    require_kind(make_settings(tmp_path, **layerwise, EVENFLOW_EXECUTOR_MAX_MODEL_LEN="512"))
    overrides = json.dumps(["--hf-overrides", '{"sliding_window": null}'])
    require_kind(make_settings(tmp_path, **layerwise, EVENFLOW_EXECUTOR_ENGINE_ARGS=overrides))


@pytest.mark.parametrize("model", ["/nowhere/at/all", "./nowhere", "a/b/c"])
def test_a_directory_that_is_not_there_is_named(model: str) -> None:
    with pytest.raises(PreflightError, match=f"there is no directory {model}"):
        require_model(model)


def test_a_model_of_the_hub_needs_a_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)

    with pytest.raises(PreflightError, match=r"is no directory here, and the hub"):
        require_model("org/model-that-is-nowhere")


def test_what_is_no_name_of_a_model_is_said() -> None:
    with pytest.raises(PreflightError, match=r"neither a directory nor the id"):
        require_model("what is this?")


def test_a_full_disk_is_named_by_its_nearest_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda place: SimpleNamespace(free=0))

    with pytest.raises(PreflightError, match=f"the disk that holds {tmp_path} is full"):
        require_disk(tmp_path / "not" / "yet")


@pytest.mark.parametrize(
    ("dtype", "host", "available_gib", "fits"),
    # 1 GiB of weights (2 in fp32), pool 1, host memory 1 if it is told, processes 2
    [
        ("bfloat16", str(GIB), 5, True),
        ("bfloat16", str(GIB), 4.99, False),
        ("bfloat16", "auto", 4, True),
        ("bfloat16", "auto", 3.99, False),
        ("float32", str(GIB), 6, True),
        ("float32", str(GIB), 5, False),
    ],
)
def test_memory_has_to_hold_weights_pools_and_processes(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    dtype: str,
    host: str,
    available_gib: float,
    fits: bool,
) -> None:
    with (tmp_path / "model.safetensors").open("wb") as weights:
        weights.truncate(GIB)
    settings = make_settings(
        tmp_path,
        EVENFLOW_EXECUTOR_LAYERWISE_KV="true",
        EVENFLOW_EXECUTOR_KV_HOST_MEMORY_BYTES=host,
    )
    memory = SimpleNamespace(available=int(available_gib * GIB))
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)

    if fits:
        require_memory(settings, dtype)
        return
    with pytest.raises(PreflightError, match="GiB are free: close other programs"):
        require_memory(settings, dtype)


def test_a_redis_that_does_not_answer_is_named() -> None:
    with pytest.raises(PreflightError, match="--redis-url"):
        require_redis(f"redis://127.0.0.1:{free_port()}/0")
