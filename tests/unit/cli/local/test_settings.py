"""The stack's settings: what the user sets wins, and a bad value is named."""

from pathlib import Path

import pytest

from cli.local.settings import BadSettingError, StackSettings, read_settings

MODEL = {"EVENFLOW_EXECUTOR_MODEL": "org/Some-Model"}


def read(**environ: str) -> StackSettings:
    return read_settings({**MODEL, **environ})


def test_by_default_the_embedded_redis_runs_and_no_planner() -> None:
    environment = read().environment()

    assert environment["EVENFLOW_WITH_REDIS"] == "true"
    assert environment["EVENFLOW_WITH_PLANNER"] == "false"
    assert environment["EVENFLOW_TRACKER_REDIS_URL"] == "redis://127.0.0.1:6399/0"


@pytest.mark.parametrize(
    ("layerwise", "policy", "asks"),
    [("true", "orbitflow", True), ("true", "vllm", False), ("false", "vllm", False)],
)
def test_a_planner_runs_where_it_is_asked(layerwise: str, policy: str, asks: bool) -> None:
    settings = read(EVENFLOW_EXECUTOR_LAYERWISE_KV=layerwise, EVENFLOW_EXECUTOR_POLICY=policy)

    assert settings.asks_planner is asks


def test_the_planner_may_load_the_policies_that_the_executor_is_given_and_no_other() -> None:
    named = {"EVENFLOW_EXECUTOR_POLICY": "my.rules:OURS", "EVENFLOW_EXECUTOR_SHADOW_POLICY": "vllm"}

    assert read(**named).environment()["EVENFLOW_PLANNER_POLICIES"] == '["my.rules:OURS"]'
    assert read().environment()["EVENFLOW_PLANNER_POLICIES"] == "[]"


def test_a_model_is_served_under_its_last_name_or_the_one_it_is_given() -> None:
    assert read().model_id == "Some-Model"
    assert read(EVENFLOW_EXECUTOR_SERVED_MODEL_NAME="other").model_id == "other"


def test_a_redis_of_the_users_replaces_the_embedded_one() -> None:
    settings = read(EVENFLOW_REDIS_URL="redis://elsewhere:1/0")

    assert settings.environment()["EVENFLOW_WITH_REDIS"] == "false"
    assert settings.environment()["EVENFLOW_TRACKER_REDIS_URL"] == "redis://elsewhere:1/0"
    assert "EVENFLOW_REDIS_PORT" not in settings.ports  # nothing of ours listens there


def test_a_moved_port_is_known_to_those_who_call_it() -> None:
    settings = read(EVENFLOW_EXECUTOR_GRPC_PORT="60001", EVENFLOW_GATEWAY_HTTP_PORT="60002")

    assert settings.environment()["EVENFLOW_GATEWAY_EXECUTORS"] == "127.0.0.1:60001,tracker:"
    assert settings.base_url == "http://127.0.0.1:60002"


@pytest.mark.parametrize(
    "told",
    [
        {"EVENFLOW_REDIS_URL": "redis://elsewhere:1/0"},
        {"EVENFLOW_GATEWAY_TRACKER": ""},
        {"EVENFLOW_EXECUTOR_TRACKER": ""},
        {"EVENFLOW_EXECUTOR_HOST": "0.0.0.0"},
        {"EVENFLOW_EXECUTOR_ADVERTISED_ADDRESS": "this-host:50051"},
    ],
)
def test_a_gateway_looks_for_executors_only_where_it_finds_the_stacks_and_each_once(
    told: dict[str, str],
) -> None:
    assert read(**told).environment()["EVENFLOW_GATEWAY_EXECUTORS"] == "127.0.0.1:50051"


@pytest.mark.parametrize(("host", "reached"), [("0.0.0.0", "127.0.0.1"), ("10.0.0.1", "10.0.0.1")])
def test_a_gateway_is_reached_where_it_listens(host: str, reached: str) -> None:
    assert read(EVENFLOW_GATEWAY_HOST=host).base_url == f"http://{reached}:8000"


def test_the_users_own_service_settings_win_and_new_ones_win_over_them() -> None:
    settings = read(EVENFLOW_EXECUTOR_MAX_MODEL_LEN="1024")

    assert settings.environment()["EVENFLOW_EXECUTOR_MAX_MODEL_LEN"] == "1024"
    changed = settings.having(
        {"EVENFLOW_EXECUTOR_MAX_MODEL_LEN": "64"}, ports={"EVENFLOW_GATEWAY_HTTP_PORT": 9000}
    )
    assert changed.environment()["EVENFLOW_EXECUTOR_MAX_MODEL_LEN"] == "64"
    assert changed.base_url.endswith(":9000")


@pytest.mark.parametrize(
    ("environ", "folder"),
    [
        ({"EVENFLOW_STATE_DIR": "/s", "XDG_STATE_HOME": "/x"}, "/s/some-model"),
        ({"XDG_STATE_HOME": "/x"}, "/x/evenflow/some-model"),
    ],
)
def test_a_stack_has_a_folder_of_its_models_name_below_the_users_state(
    environ: dict[str, str], folder: str
) -> None:
    assert str(read(**environ).run_dir) == folder


def test_a_name_of_the_users_is_the_folders() -> None:
    assert read(EVENFLOW_STATE_DIR="/s").having({}, name="mine").run_dir == Path("/s/mine")


@pytest.mark.parametrize("text", ["", "zero", "0", "65536", "-1"])
def test_a_bad_port_is_named(text: str) -> None:
    with pytest.raises(BadSettingError, match="EVENFLOW_TRACKER_GRPC_PORT"):
        read(EVENFLOW_TRACKER_GRPC_PORT=text)
