"""The key file: what is in it, what is wrong with it, and that it is never shown."""

from pathlib import Path

import pytest
from pydantic import ValidationError

from services.gateway.api_keys import ApiKeys, read_api_keys
from services.gateway.settings import GatewaySettings
from services.kit.settings import BAD_SETTINGS_EXIT_CODE, load
from services.tracker.settings import TrackerSettings

SECRET = "sk-very-secret-0123"
GOOD = f'[[keys]]\nname = "alice"\nkey = "{SECRET}"\n'


def written(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "keys.toml"
    file.write_text(text)
    return file


def test_limits_are_optional(tmp_path) -> None:
    (key,) = read_api_keys(written(tmp_path, GOOD))

    assert (key.name, key.max_live_requests, key.tokens_per_minute) == ("alice", None, None)
    assert ApiKeys([key]).caller(f"bearer  {SECRET} ") is key


@pytest.mark.parametrize(
    "text",
    [
        "",
        "keys = []",
        GOOD + "max_live_requests = 0",
        GOOD + "tokens_per_minute = 0",
        GOOD + "tokens_per_hour = 1",
        GOOD.replace(SECRET, SECRET[:15]),  # too short to be a secret
        GOOD + GOOD,
        GOOD + GOOD.replace("alice", "bob"),
        GOOD.replace('0123"', "0123"),
    ],
)
def test_a_bad_file_stops_the_process_and_its_secrets_stay_in_it(
    tmp_path, monkeypatch, capsys, text
) -> None:
    monkeypatch.setenv("EVENFLOW_GATEWAY_API_KEYS_FILE", str(written(tmp_path, text)))

    with pytest.raises(SystemExit) as stopped:
        load(GatewaySettings)

    said = capsys.readouterr().err
    assert stopped.value.code == BAD_SETTINGS_EXIT_CODE
    assert said.startswith("EVENFLOW_GATEWAY_API_KEYS_FILE: ")
    assert SECRET[:15] not in said


def test_a_file_that_is_not_there_stops_the_process(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("EVENFLOW_GATEWAY_API_KEYS_FILE", str(tmp_path / "none"))

    with pytest.raises(ValidationError):
        GatewaySettings()


def test_neither_keys_nor_settings_show_secrets(tmp_path, monkeypatch) -> None:
    file = written(tmp_path, GOOD)
    monkeypatch.setenv("EVENFLOW_GATEWAY_API_KEYS_FILE", str(file))
    monkeypatch.setenv("EVENFLOW_TRACKER_REDIS_URL", f"redis://:{SECRET}@host:1/0")
    shown = f"{read_api_keys(file)} {GatewaySettings()!r} {TrackerSettings()!r}"

    assert SECRET not in shown
    assert TrackerSettings().redis_url.get_secret_value().endswith("@host:1/0")
