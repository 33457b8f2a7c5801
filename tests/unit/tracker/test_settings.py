"""What stops the tracker before it opens a socket."""

import pytest

from services.kit.settings import BAD_SETTINGS_EXIT_CODE, load
from services.tracker.settings import TrackerSettings


def test_the_defaults_are_those_of_the_design(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = load(TrackerSettings)

    assert (settings.grpc_port, settings.metrics_port) == (50053, 9053)
    assert settings.redis_url.get_secret_value() == "redis://127.0.0.1:6379/0"
    assert (settings.lease_ttl_s, settings.request_ttl_s, settings.retention_s) == (
        5.0,
        60.0,
        600.0,
    )


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("EVENFLOW_TRACKER_REDIS_URL", "http://somewhere"),
        ("EVENFLOW_TRACKER_LEASE_TTL_S", "0"),
        ("EVENFLOW_TRACKER_REQUEST_TTL_S", "-1"),
        ("EVENFLOW_TRACKER_RETENTION_S", "soon"),
        ("EVENFLOW_TRACKER_REDIS_TIMEOUT_S", "0"),
    ],
)
def test_a_bad_value_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], variable: str, value: str
) -> None:
    monkeypatch.setenv(variable, value)

    with pytest.raises(SystemExit) as stopped:
        load(TrackerSettings)

    assert stopped.value.code == BAD_SETTINGS_EXIT_CODE
    assert variable in capsys.readouterr().err
