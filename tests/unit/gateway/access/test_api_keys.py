"""The document of API keys: what is in it, what is wrong with it, and that it is never shown."""

import asyncio
from pathlib import Path

import pytest
from pydantic import ValidationError

from services.gateway.access.api_keys import ApiKeys, hashed, parse_api_keys
from services.gateway.access.key_sources import KeysUnreadableError, follow
from services.gateway.access.terms import SloFloors
from services.gateway.settings import GatewaySettings
from services.kit.errors import InvalidRequestError, UnauthenticatedError, UnavailableError
from services.kit.settings import BAD_SETTINGS_EXIT_CODE, load
from services.pacing.types import ServiceLevel
from services.tracker.settings import TrackerSettings

SECRET = "sk-very-secret-0123"
GOOD = f'[[keys]]\nname = "alice"\nkey = "{SECRET}"\n'


def written(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "keys.toml"
    file.write_text(text)
    return file


def test_limits_are_optional() -> None:
    (key,) = parse_api_keys(GOOD)

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
        GOOD.replace(SECRET, "sha256:" + "0" * 63),
        GOOD + GOOD.replace("alice", "bob").replace(SECRET, hashed(SECRET)),
        GOOD + "min_slo_tbt_s = 0",
        GOOD + "priorities = [1, 0]",
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


def test_a_hash_stands_for_its_key_and_is_none_itself() -> None:
    keys = ApiKeys(parse_api_keys(GOOD.replace(SECRET, hashed(SECRET))))

    assert name_of(keys, SECRET) == "alice"
    with pytest.raises(UnauthenticatedError):
        keys.caller(f"Bearer {hashed(SECRET)}")


@pytest.mark.parametrize(
    ("level", "at_fault"),
    [
        (ServiceLevel(slo_tbt_s=0.1, slo_ttft_s=0.1, consumption_rate_tps=10.0), None),
        (ServiceLevel(slo_tbt_s=0.099), "slo_tbt"),
        (ServiceLevel(slo_ttft_s=0.099), "slo_ttft"),
        (ServiceLevel(slo_tpot_s=0.099), "slo_tpot"),
        (ServiceLevel(consumption_rate_tps=10.1), "consumption_rate_tps"),  # 1 / rate < 0.1
        (ServiceLevel(), None),
    ],
)
def test_no_bound_may_be_tighter_than_its_floor(level: ServiceLevel, at_fault: str | None) -> None:
    floors = SloFloors(min_slo_ttft_s=0.1, min_slo_tpot_s=0.1, min_slo_tbt_s=0.1)
    if at_fault is None:
        floors.check(level)
        return

    with pytest.raises(InvalidRequestError) as refused:
        floors.check(level)
    assert refused.value.field == at_fault


def test_a_key_s_own_floors_win_over_the_model_s() -> None:
    (key,) = parse_api_keys(GOOD + "min_slo_tbt_s = 0.01")
    of_model = SloFloors(min_slo_tbt_s=0.1, min_slo_ttft_s=0.5)

    assert key.over(of_model) == SloFloors(min_slo_tbt_s=0.01, min_slo_ttft_s=0.5)


def test_requests_of_a_key_have_a_priority_in_its_range() -> None:
    (default,) = parse_api_keys(GOOD)
    (urgent,) = parse_api_keys(GOOD + "priorities = [-2, 3]")

    assert default.priority(0) == 0
    assert [urgent.priority(stated) for stated in (-2, 3)] == [-2, 3]
    for key, priority in ((default, -1), (urgent, -3), (urgent, 4)):
        with pytest.raises(InvalidRequestError):
            key.priority(priority)


@pytest.mark.parametrize(
    ("entry", "priority"),
    [
        ("", 0),
        ("priorities = [5, 9]", 5),
        ("priorities = [-9, -5]", -5),
        ("priorities = [0, 9]\ndefault_priority = 7", 7),
        ("default_priority = 0", 0),
    ],
)
def test_a_request_that_states_no_priority_has_its_key_s(entry: str, priority: int) -> None:
    (key,) = parse_api_keys(GOOD + entry)
    assert key.priority(None) == priority


def test_a_key_s_default_is_one_of_its_priorities() -> None:
    with pytest.raises(ValueError, match="default_priority"):
        parse_api_keys(GOOD + "priorities = [0, 5]\ndefault_priority = 6")


def test_a_file_that_is_not_there_stops_the_process(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("EVENFLOW_GATEWAY_API_KEYS_FILE", str(tmp_path / "none"))

    with pytest.raises(ValidationError):
        GatewaySettings()


def test_neither_keys_nor_settings_show_secrets(tmp_path, monkeypatch) -> None:
    file = written(tmp_path, GOOD)
    monkeypatch.setenv("EVENFLOW_GATEWAY_API_KEYS_FILE", str(file))
    monkeypatch.setenv("EVENFLOW_TRACKER_REDIS_URL", f"redis://:{SECRET}@host:1/0")
    settings = GatewaySettings()
    monkeypatch.delenv("EVENFLOW_GATEWAY_API_KEYS_FILE")
    monkeypatch.setenv("EVENFLOW_GATEWAY_API_KEYS_REDIS_URL", f"redis://:{SECRET}@host:1/0")
    shown = f"{parse_api_keys(GOOD)} {settings!r} {GatewaySettings()!r} {TrackerSettings()!r}"

    assert SECRET not in shown
    assert TrackerSettings().redis_url.get_secret_value().endswith("@host:1/0")


def test_keys_in_two_places_stop_the_process(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("EVENFLOW_GATEWAY_API_KEYS_FILE", str(written(tmp_path, GOOD)))
    monkeypatch.setenv("EVENFLOW_GATEWAY_API_KEYS_REDIS_URL", "redis://host:1/0")

    with pytest.raises(ValidationError, match="api_keys_redis_url"):
        GatewaySettings()


class Documents:
    """Gives one document after the other; None is unreadable. Keeps the last reader waiting."""

    def __init__(self, *documents: str | None) -> None:
        self._documents = list(documents)
        self.is_exhausted = asyncio.Event()
        self.is_closed = False

    async def read(self) -> str:
        if not self._documents:
            self.is_exhausted.set()
            await asyncio.Event().wait()
        document = self._documents.pop(0)
        if document is None:
            raise KeysUnreadableError("away")
        return document

    async def aclose(self) -> None:
        self.is_closed = True


async def followed(*documents: str | None) -> ApiKeys:
    """Return keys that were asked for from the start, after these documents."""
    keys, source = ApiKeys(None), Documents(*documents)
    following = asyncio.create_task(follow(source, keys, interval_s=0))
    await source.is_exhausted.wait()
    following.cancel()
    await asyncio.wait([following])
    assert source.is_closed
    return keys


def name_of(keys: ApiKeys, secret: str) -> str | None:
    key = keys.caller(f"Bearer {secret}")
    return key and key.name


async def test_before_keys_are_known_nobody_may_call() -> None:
    with pytest.raises(UnavailableError):
        (await followed(None, "no toml", "")).caller(f"Bearer {SECRET}")


@pytest.mark.parametrize("fault", [None, "no toml", "", GOOD + GOOD])
async def test_what_cannot_be_read_leaves_the_last_keys(fault: str | None) -> None:
    assert name_of(await followed(GOOD, fault), SECRET) == "alice"


async def test_a_key_that_is_taken_out_is_not_known_any_more() -> None:
    other = SECRET.replace("0123", "4567")
    keys = await followed(GOOD, None, GOOD.replace(SECRET, other).replace("alice", "bob"))

    assert name_of(keys, other) == "bob"
    with pytest.raises(UnauthenticatedError):
        keys.caller(f"Bearer {SECRET}")
