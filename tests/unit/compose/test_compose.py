"""docker-compose.yml and what it mounts agree with the services' own settings and metrics."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from services.executor.settings import ExecutorSettings
from services.gateway.settings import GatewaySettings
from services.kit.settings import ServiceSettings
from services.planner.settings import PlannerSettings
from services.tracker.settings import TrackerSettings

ROOT = Path(__file__).resolve().parents[3]
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
SERVICES: dict[str, Any] = COMPOSE["services"]
SETTINGS: dict[str, type[ServiceSettings]] = {
    "gateway": GatewaySettings,
    "executor": ExecutorSettings,
    "executor-gpu": ExecutorSettings,
    "planner": PlannerSettings,
    "tracker": TrackerSettings,
}
ONE_SHOT = ("demo-model",)
THIRD_PARTY_PORTS = {"redis": 6379, "prometheus": 9090, "grafana": 3000}


def filled_in(value: object) -> str:
    """Return `value` as Compose reads it when the user has set no variable."""
    return re.sub(r"\$\{\w+(?::?-([^}]*))?\}", lambda match: match[1] or "", str(value))


def default(service: str, field: str) -> Any:
    return SETTINGS[service].model_fields[field].default


def ports_of(service: str) -> set[int]:
    """Return the ports that a service listens on by default."""
    if service in THIRD_PARTY_PORTS:
        return {THIRD_PARTY_PORTS[service]}
    fields = SETTINGS[service].model_fields
    return {field.default for name, field in fields.items() if name.endswith("_port")} - {0}


def own_environment(service: str) -> dict[str, str]:
    return {
        name: filled_in(value)
        for name, value in SERVICES[service]["environment"].items()
        if name.startswith("EVENFLOW_")
    }


def test_executors_and_gateways_may_be_many() -> None:
    settings = GatewaySettings.model_validate({"executors": gateway_environment("EXECUTORS")})
    published = [filled_in(port) for port in SERVICES["gateway"]["ports"]]

    assert settings.executor_names == (("executor", default("executor", "grpc_port")),)
    assert all(re.search(r":\d+-\d+:\d+$", port) for port in published)
    for service in ("executor", "gateway"):
        assert "container_name" not in SERVICES[service]
        assert not {
            name for name in own_environment(service) if name.endswith(("_ID", "_ADDRESS"))
        } - {"EVENFLOW_EXECUTOR_PLANNER_ADDRESS"}


def gateway_environment(name: str) -> str:
    return own_environment("gateway")[f"EVENFLOW_GATEWAY_{name}"]


@pytest.mark.parametrize("service", SETTINGS)
def test_a_services_variables_are_its_settings_and_have_good_values(service, monkeypatch) -> None:
    settings_class = SETTINGS[service]
    prefix = settings_class.model_config["env_prefix"]
    for name, value in own_environment(service).items():
        assert name.removeprefix(prefix).lower() in settings_class.model_fields, name
        monkeypatch.setenv(name, value)

    assert settings_class().host == "0.0.0.0"  # a container's port is published from outside


@pytest.mark.parametrize("service", SETTINGS)
def test_addresses_name_a_service_and_a_port_it_listens_on(service) -> None:
    text = " ".join(own_environment(service).values())

    for host, port in re.findall(r"([a-z][a-z-]*):(\d+)\b", text):
        assert int(port) in ports_of(host), f"{host}:{port}"


@pytest.mark.parametrize("service", [name for name in SERVICES if "ports" in SERVICES[name]])
def test_published_ports_are_listened_on_and_reached_from_this_machine_only(service) -> None:
    for published in SERVICES[service]["ports"]:
        host, _, port = filled_in(published).split(":")
        assert host == "127.0.0.1"
        assert int(port) in ports_of(service)


@pytest.mark.parametrize("is_keyed", [False, True])
def test_ports_beyond_this_machine_need_keys_or_an_explicit_word(
    is_keyed, monkeypatch, tmp_path
) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text('[[keys]]\nname = "a"\nkey = "sk-0123456789abcdef"\n')
    for name, value in own_environment("gateway").items():
        monkeypatch.setenv(name, value)
    host = SERVICES["gateway"]["environment"]["EVENFLOW_GATEWAY_PUBLISHED_HOST"]
    assert all(published.startswith(host) for published in SERVICES["gateway"]["ports"])
    monkeypatch.setenv("EVENFLOW_GATEWAY_PUBLISHED_HOST", "0.0.0.0")
    if is_keyed:
        monkeypatch.setenv("EVENFLOW_GATEWAY_API_KEYS_FILE", str(keys))
        assert GatewaySettings().api_keys_file == keys
        return
    with pytest.raises(ValidationError, match="anybody could call"):
        GatewaySettings()
    monkeypatch.setenv("EVENFLOW_GATEWAY_OPEN", "true")
    assert GatewaySettings().open


@pytest.mark.parametrize("service", ["gateway", "planner", "tracker", "redis"])
def test_what_writes_no_files_cannot(service) -> None:
    assert SERVICES[service]["read_only"] is True
    assert SERVICES[service]["mem_limit"]


def test_only_the_tracker_reaches_redis_and_only_gateways_are_reached_from_outside() -> None:
    networks = {name: set(SERVICES[name].get("networks", ["default"])) for name in SERVICES}
    beside_redis = {name for name in SERVICES if networks[name] & networks["redis"]}

    assert beside_redis == {"redis", "tracker"}
    assert COMPOSE["networks"]["inner"]["internal"] is True
    published = {name for name in SERVICES if "ports" in SERVICES[name]}
    assert {name for name in SERVICES if "default" in networks[name]} == published


def test_redis_and_grafana_ask_for_passwords() -> None:
    redis, grafana = SERVICES["redis"], SERVICES["grafana"]
    password = filled_in(redis["command"][redis["command"].index("--requirepass") + 1])

    assert f":{password}@redis:" in own_environment("tracker")["EVENFLOW_TRACKER_REDIS_URL"]
    assert filled_in(redis["environment"]["REDISCLI_AUTH"]) == password
    assert 'test -n "$$GF_SECURITY_ADMIN_PASSWORD"' in grafana["entrypoint"][-1]
    assert filled_in(grafana["environment"]["GF_SECURITY_ADMIN_PASSWORD"]) == ""


@pytest.mark.parametrize("service", [name for name in SERVICES if name not in ONE_SHOT])
def test_each_service_that_stays_has_a_health_check_and_is_restarted(service) -> None:
    assert SERVICES[service]["restart"] == "unless-stopped"
    check = SERVICES[service]["healthcheck"]["test"]
    if service in SETTINGS:
        assert check[:-1] == ["CMD", "python", "-m", "services.kit.probe"]
        assert check[-1] == f"127.0.0.1:{default(service, 'grpc_port')}"


@pytest.mark.parametrize("service", SETTINGS)
def test_a_services_image_installs_a_lock_file_that_exists(service) -> None:
    lock = SERVICES[service]["build"]["args"]["LOCK"]

    assert (ROOT / "requirements" / f"{lock}.txt").is_file()


def test_prometheus_asks_the_ports_that_serve_metrics() -> None:
    config = yaml.safe_load((ROOT / "docker/prometheus/prometheus.yml").read_text())
    asked = {
        (name, sd["port"])
        for job in config["scrape_configs"]
        for sd in job["dns_sd_configs"]
        for name in sd["names"]
    }

    names = ("gateway", "executor", "planner", "tracker")
    assert asked == {(name, default(name, "metrics_port")) for name in names}
