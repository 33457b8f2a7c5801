"""`evenflow serve`'s command line: vLLM's options under vLLM's names, and ours."""

import json
from pathlib import Path

import pytest

from cli.local.settings import BadSettingError
from cli.options import ServeOptions, read_options
from services.executor.engine.options import read_engine_options
from services.executor.settings import ExecutorSettings

PREFIX = "EVENFLOW_EXECUTOR_"


def read(*arguments: str, **environ: str) -> ServeOptions:
    return read_options(arguments, environ)


def engine_settings(options: ServeOptions) -> dict[str, str]:
    found = {
        name.removeprefix(PREFIX): value
        for name, value in options.variables.items()
        if name.startswith(PREFIX)
    }
    return {name: found[name] for name in found if name not in ("MODEL", "ENFORCE_EAGER")}


def test_options_that_are_settings_become_settings() -> None:
    options = read("org/m", "--max-model-len", "4k", "-tp", "2", "--dtype=half", "--seed", "3")

    assert options.model == "org/m"
    assert engine_settings(options) == {
        "MAX_MODEL_LEN": "4000",
        "TENSOR_PARALLEL_SIZE": "2",
        "DTYPE": "float16",
        "SEED": "3",
    }


def test_every_setting_that_comes_of_an_option_is_one_of_the_executors() -> None:
    options = read(
        "m", "--max-model-len", "auto", "--trust-remote-code", "--no-enable-prefix-caching"
    )

    found = engine_settings(options)
    assert found == {
        "MAX_MODEL_LEN": "auto",
        "TRUST_REMOTE_CODE": "true",
        "ENABLE_PREFIX_CACHING": "false",
    }
    values = {name.lower(): value for name, value in found.items()}
    settings = ExecutorSettings.model_validate({"model": "m", **values})
    assert settings.trust_remote_code is True
    assert settings.enable_prefix_caching is False
    assert settings.max_model_len == "auto"


def test_all_other_options_reach_the_engine_as_they_were_written() -> None:
    options = read(
        "--max_logprobs=40", "--no-async-scheduling", "m", "--hf-overrides.num_hidden_layers", "3"
    )

    arguments = json.loads(engine_settings(options)["ENGINE_ARGS"])
    assert read_engine_options(arguments) == {
        "max_logprobs": 40,
        "async_scheduling": False,
        "hf_overrides": {"num_hidden_layers": 3},
    }


def test_ours_are_known_by_their_services(tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.touch()

    options = read(
        *("m", "--host", "0.0.0.0", "--port", "9000", "--grpc-port", "9001"),
        *("--api-key-file", str(keys), "--redis-url", "redis://r:1/0", "--detach"),
        *("--layerwise-kv", "--kv-host-memory", "2G", "--policy", "orbitflow"),
    )

    assert options.ports == {
        "EVENFLOW_GATEWAY_HTTP_PORT": 9000,
        "EVENFLOW_GATEWAY_GRPC_PORT": 9001,
    }
    assert (options.redis_url, options.detach) == ("redis://r:1/0", True)
    assert options.variables["EVENFLOW_GATEWAY_HOST"] == "0.0.0.0"
    assert options.variables["EVENFLOW_GATEWAY_API_KEYS_FILE"] == str(keys)
    assert engine_settings(options) == {
        "LAYERWISE_KV": "true",
        "KV_HOST_MEMORY_BYTES": str(2 << 30),
        "POLICY": "orbitflow",
    }


def test_a_directory_is_named_in_full_and_a_hub_id_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("model").mkdir()

    assert read("model").variables[f"{PREFIX}MODEL"] == str(tmp_path / "model")
    assert read("org/model").variables[f"{PREFIX}MODEL"] == "org/model"
    assert read("--model", "org/model").model == "org/model"
    assert read(EVENFLOW_EXECUTOR_MODEL="org/other").model == "org/other"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("m", "--max-modle-len", "1"), "there is no option --max-modle-len; did you mean --max-m"),
        (("m", "--layer-wise-kv"), "did you mean --layerwise-kv?"),
        (("m", "--xyzzy"), "there is no option --xyzzy"),
        (("m", "--dtype", "int3"), "invalid choice: 'int3'"),
        (("m", "--port", "0"), '"0" is not a port from 1 to 65535'),
        (("m", "--policy", "best"), "policy 'best' is neither one of"),
        (("m", "--api-key-file", "/none"), "there is no file /none"),
    ],
)
def test_what_cannot_be_read_ends_with_its_name(
    arguments: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        read(*arguments)

    assert ended.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ((), "name a model"),
        (("m", "--scheduler-cls", "x.Y"), "--scheduler-cls"),
        (("m", "--served-model-name", "a", "b"), "--served-model-name"),
        (
            ("m", "--structured-outputs-config.backend", "guidance"),
            "--structured-outputs-config: the backend must be xgrammar",
        ),
    ],
)
def test_what_evenflow_cannot_do_is_refused_by_name(arguments: tuple[str, ...], named: str) -> None:
    with pytest.raises(BadSettingError, match=named):
        read(*arguments)


def test_the_executor_refuses_options_that_are_not_the_users_or_unknown() -> None:
    with pytest.raises(ValueError, match="worker_cls: set by Evenflow"):
        read_engine_options(["--worker-cls", "x.Y"])
    with pytest.raises(ValueError, match="structured_outputs_config: the backend must be xgrammar"):
        read_engine_options(["--structured-outputs-config", '{"backend": "outlines"}'])
    with pytest.raises(ValueError, match="--nonsense"):
        read_engine_options(["--nonsense", "1"])
