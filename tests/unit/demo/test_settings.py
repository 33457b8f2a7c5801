"""The stack's settings: what the user sets wins, and a bad value is named."""

import pytest

from demo.settings import BadSettingError, read_settings


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    for name in [name for name in os.environ if name.startswith("EVENFLOW_")]:
        monkeypatch.delenv(name)


def test_by_default_the_demo_model_and_the_embedded_redis_run() -> None:
    settings = read_settings()
    environment = settings.environment("/models/demo")

    assert settings.model_id == "evenflow-demo"
    assert environment["EVENFLOW_EXECUTOR_MODEL"] == "/models/demo"
    assert environment["EVENFLOW_REDIS_EMBEDDED"] == "true"
    assert environment["EVENFLOW_TRACKER_REDIS_URL"] == "redis://127.0.0.1:6399/0"


def test_a_model_of_the_users_is_served_under_its_last_name(monkeypatch) -> None:
    monkeypatch.setenv("EVENFLOW_MODEL", "org/Some-Model")

    settings = read_settings()

    assert settings.model_id == "Some-Model"
    assert "EVENFLOW_EXECUTOR_TOOL_CALL_PARSER" not in settings.environment("m")


def test_a_redis_of_the_users_replaces_the_embedded_one(monkeypatch) -> None:
    monkeypatch.setenv("EVENFLOW_REDIS_URL", "redis://elsewhere:1/0")
    settings = read_settings()
    environment = settings.environment("m")

    assert environment["EVENFLOW_REDIS_EMBEDDED"] == "false"
    assert environment["EVENFLOW_TRACKER_REDIS_URL"] == "redis://elsewhere:1/0"
    assert "EVENFLOW_REDIS_PORT" not in settings.ports  # nothing of ours listens there


def test_a_moved_port_is_known_to_those_who_call_it(monkeypatch) -> None:
    monkeypatch.setenv("EVENFLOW_EXECUTOR_GRPC_PORT", "60001")
    monkeypatch.setenv("EVENFLOW_GATEWAY_HTTP_PORT", "60002")
    settings = read_settings()

    assert settings.environment("m")["EVENFLOW_GATEWAY_EXECUTORS"] == "127.0.0.1:60001"
    assert settings.base_url == "http://127.0.0.1:60002"


def test_the_users_own_service_settings_win(monkeypatch) -> None:
    monkeypatch.setenv("EVENFLOW_EXECUTOR_MAX_MODEL_LEN", "1024")

    assert read_settings().environment("m")["EVENFLOW_EXECUTOR_MAX_MODEL_LEN"] == "1024"


@pytest.mark.parametrize("text", ["", "zero", "0", "65536", "-1"])
def test_a_bad_port_is_named(monkeypatch, text: str) -> None:
    monkeypatch.setenv("EVENFLOW_TRACKER_GRPC_PORT", text)

    with pytest.raises(BadSettingError, match="EVENFLOW_TRACKER_GRPC_PORT"):
        read_settings()
