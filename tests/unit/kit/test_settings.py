"""Settings: a bad value stops the process, naming the variable."""

import pytest
from pydantic import Field
from pydantic_settings import SettingsConfigDict

from services.kit.settings import BAD_SETTINGS_EXIT_CODE, ServiceSettings, load
from services.kit.transport import Certificates, Transport


class ExampleSettings(ServiceSettings):
    model_config = SettingsConfigDict(env_prefix="EVENFLOW_EXAMPLE_")

    grpc_port: int = Field(default=50_099, ge=0, le=65_535)


def test_values_come_from_the_environment(monkeypatch) -> None:
    monkeypatch.setenv("EVENFLOW_EXAMPLE_GRPC_PORT", "1234")

    assert load(ExampleSettings).grpc_port == 1234


@pytest.mark.parametrize("value", ["no-number", "-1", "65536"])
def test_a_bad_value_stops_the_process_and_names_the_variable(monkeypatch, capsys, value) -> None:
    monkeypatch.setenv("EVENFLOW_EXAMPLE_GRPC_PORT", value)

    with pytest.raises(SystemExit) as stopped:
        load(ExampleSettings)

    assert stopped.value.code == BAD_SETTINGS_EXIT_CODE
    assert "EVENFLOW_EXAMPLE_GRPC_PORT" in capsys.readouterr().err


def test_a_mistyped_variable_stops_the_process(monkeypatch, capsys) -> None:
    monkeypatch.setenv("EVENFLOW_EXAMPLE_GRPC_PROT", "1234")

    with pytest.raises(SystemExit) as stopped:
        load(ExampleSettings)

    assert stopped.value.code == BAD_SETTINGS_EXIT_CODE
    assert "EVENFLOW_EXAMPLE_GRPC_PROT" in capsys.readouterr().err


def test_kubernetes_links_to_a_service_of_our_name_are_none_of_ours(monkeypatch) -> None:
    for name, value in {
        "SERVICE_HOST": "10.0.0.1",
        "SERVICE_PORT": "8000",
        "SERVICE_PORT_HTTP": "8000",
        "PORT": "tcp://10.0.0.1:8000",
        "PORT_8000_TCP": "tcp://10.0.0.1:8000",
        "PORT_8000_TCP_PROTO": "tcp",
        "PORT_8000_TCP_PORT": "8000",
        "PORT_8000_TCP_ADDR": "10.0.0.1",
        "CANARY_PORT": "udp://10.0.0.1:8000",
    }.items():
        monkeypatch.setenv(f"EVENFLOW_EXAMPLE_{name}", value)

    assert load(ExampleSettings).grpc_port == 50_099


def test_a_port_that_is_a_number_is_no_link(monkeypatch) -> None:
    monkeypatch.setenv("EVENFLOW_EXAMPLE_METRICS_PROT_PORT", "8000")

    with pytest.raises(SystemExit):
        load(ExampleSettings)


def test_settings_do_not_change_after_the_start() -> None:
    settings = load(ExampleSettings)

    with pytest.raises(ValueError, match="frozen"):
        settings.grpc_port = 1


def tls_files(tmp_path, monkeypatch, *names: str) -> None:
    for name in names:
        file = tmp_path / name
        file.write_text("")
        monkeypatch.setenv(f"EVENFLOW_EXAMPLE_TLS_{name.upper()}_FILE", str(file))


def test_without_certificates_services_talk_in_plain_text() -> None:
    assert ExampleSettings().transport == Transport(certificates=None, keepalive_s=10.0)


def test_three_files_make_mutual_tls(tmp_path, monkeypatch) -> None:
    tls_files(tmp_path, monkeypatch, "cert", "key", "ca")

    assert ExampleSettings().transport.certificates == Certificates(
        cert_file=str(tmp_path / "cert"),
        key_file=str(tmp_path / "key"),
        ca_file=str(tmp_path / "ca"),
    )


@pytest.mark.parametrize("names", [("cert",), ("key",), ("ca",), ("cert", "key"), ("cert", "ca")])
def test_some_of_the_three_files_stop_the_process(tmp_path, monkeypatch, capsys, names) -> None:
    tls_files(tmp_path, monkeypatch, *names)

    with pytest.raises(SystemExit):
        load(ExampleSettings)

    assert "EVENFLOW_EXAMPLE_TLS_CA_FILE: " in capsys.readouterr().err


def test_a_certificate_that_is_not_there_stops_the_process(monkeypatch, capsys) -> None:
    monkeypatch.setenv("EVENFLOW_EXAMPLE_TLS_CERT_FILE", "/nowhere.pem")

    with pytest.raises(SystemExit):
        load(ExampleSettings)

    assert "EVENFLOW_EXAMPLE_TLS_CERT_FILE: " in capsys.readouterr().err
