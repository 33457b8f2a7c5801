"""What the gateway can be told."""

import pytest
from pydantic import ValidationError

from services.gateway.settings import GatewaySettings
from services.kit.transport import Certificates


def test_the_defaults_are_the_documented_ports() -> None:
    settings = GatewaySettings()

    assert (settings.http_port, settings.grpc_port) == (8000, 50050)
    assert settings.executor_addresses == ("127.0.0.1:50051",)
    assert settings.tracker == "127.0.0.1:50053"


def test_several_executors_are_listed_with_commas(monkeypatch) -> None:
    monkeypatch.setenv("EVENFLOW_GATEWAY_EXECUTORS", "a:1, b.example:65535,[::1]:3")

    assert GatewaySettings().executor_addresses == ("a:1", "b.example:65535", "[::1]:3")


def test_no_tracker_is_a_choice(monkeypatch) -> None:
    monkeypatch.setenv("EVENFLOW_GATEWAY_TRACKER", "")

    assert GatewaySettings().tracker == ""


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("EXECUTORS", ""),
        ("EXECUTORS", "a"),
        ("EXECUTORS", "a:1,"),
        ("EXECUTORS", "a:70000"),
        ("EXECUTORS", "a:1,a:1"),
        ("TRACKER", "a"),
        ("HTTP_PORT", "65536"),
        ("METRICS_PORT", "65536"),
        ("MAX_LIVE_REQUESTS", "0"),
        ("SUBMIT_TIMEOUT_S", "0"),
        ("CORS_ORIGINS", "chat.example"),
        ("CORS_ORIGINS", "https://chat.example,"),
        ("CORS_ORIGINS", "https://chat.example/"),
    ],
)
def test_a_bad_value_is_refused_by_name(monkeypatch, name, value) -> None:
    monkeypatch.setenv(f"EVENFLOW_GATEWAY_{name}", value)

    with pytest.raises(ValidationError) as caught:
        GatewaySettings()

    assert caught.value.errors()[0]["loc"] == (name.lower(),)


@pytest.mark.parametrize("names", [("cert",), ("key",), ("ca",), ("cert", "ca"), ("key", "ca")])
def test_an_edge_needs_certificate_and_key(tmp_path, monkeypatch, names) -> None:
    for name in names:
        (tmp_path / name).write_text("")
        monkeypatch.setenv(f"EVENFLOW_GATEWAY_EDGE_{name.upper()}_FILE", str(tmp_path / name))

    with pytest.raises(ValidationError):
        GatewaySettings()


def test_the_edge_has_certificates_of_its_own(tmp_path, monkeypatch) -> None:
    for name in ("cert", "key"):
        (tmp_path / name).write_text("")
        monkeypatch.setenv(f"EVENFLOW_GATEWAY_EDGE_{name.upper()}_FILE", str(tmp_path / name))
    settings = GatewaySettings()

    assert settings.transport.certificates is None
    assert settings.edge_transport.certificates == Certificates(
        cert_file=str(tmp_path / "cert"), key_file=str(tmp_path / "key")
    )


@pytest.mark.parametrize(
    ("variables", "starts"),
    [
        ({"HOST": "::1"}, True),
        ({"HOST": "localhost"}, True),
        ({"HOST": "10.0.0.1"}, False),
        ({"HOST": "0.0.0.0"}, False),
        ({"HOST": "0.0.0.0", "OPEN": "true"}, True),
        ({"HOST": "0.0.0.0", "PUBLISHED_HOST": "127.0.0.1"}, True),
        ({"PUBLISHED_HOST": "10.0.0.1"}, False),
        ({"HOST": "0.0.0.0", "API_KEYS_REDIS_URL": "redis://host:1/0"}, True),
        ({"HOST": "0.0.0.0", "API_KEYS_FILE": ""}, False),
    ],
)
def test_other_machines_need_keys_unless_it_is_open(monkeypatch, variables, starts) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(f"EVENFLOW_GATEWAY_{name}", value)
    if starts:
        GatewaySettings()
        return

    with pytest.raises(ValidationError, match="anybody could call"):
        GatewaySettings()


@pytest.mark.parametrize(
    ("rate_tps", "is_taken"), [(0, True), (0.5, True), (0.4, False), (-1, False)]
)
def test_a_reading_rate_is_stated_by_model(monkeypatch, rate_tps, is_taken) -> None:
    monkeypatch.setenv("EVENFLOW_GATEWAY_DEFAULT_READING_RATE_TPS", f'{{"m": {rate_tps}}}')

    if is_taken:
        assert GatewaySettings().default_reading_rate_tps == {"m": rate_tps}
        return
    with pytest.raises(ValidationError, match=r"default_reading_rate_tps\.m"):
        GatewaySettings()
