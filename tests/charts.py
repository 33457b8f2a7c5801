"""The Helm chart, rendered; `python -m tests.charts` writes what its tests compare with."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from lab.chart_tools import CHART, ROOT, helm
from services.executor.settings import ExecutorSettings
from services.gateway.settings import GatewaySettings
from services.kit.settings import ServiceSettings
from services.planner.settings import PlannerSettings
from services.tracker.settings import TrackerSettings

RELEASE = "evenflow"
EXAMPLES = {path.stem: path for path in sorted((CHART / "examples").glob("*.yaml"))}
GOLDEN = ROOT / "tests" / "chart" / "golden"
SCHEMA = CHART / "values.schema.json"
SETTINGS: dict[str, type[ServiceSettings]] = {
    "gateway": GatewaySettings,
    "executor": ExecutorSettings,
    "planner": PlannerSettings,
    "tracker": TrackerSettings,
}
# What the chart sets itself, from values of its own or because its objects depend on it.
OWN_OF_ALL = {
    "host",
    "grpc_port",
    "metrics_port",
    "grpc_keepalive_s",
    "tls_cert_file",
    "tls_key_file",
    "tls_ca_file",
    "tls_client_names",
}
OWN = {
    "gateway": {
        "http_port",
        "executors",
        "tracker",
        "id",
        "lame_duck_s",
        "drain_timeout_s",
        "api_keys_file",
        "api_keys_redis_url",
        "published_host",
        "open",
        "edge_cert_file",
        "edge_key_file",
        "edge_ca_file",
    },
    "executor": {
        "id",
        "advertised_address",
        "tracker",
        "planner_address",
        "model",
        "served_model_name",
        "tensor_parallel_size",
        "pipeline_parallel_size",
        "layerwise_kv",
        "kv_events_endpoint",
        "kv_events_topic",
        "kv_host_memory_bytes",
        "drain_timeout_s",
        "nodes",
        "node_rank",
        "leader_address",
        "nodes_timeout_s",
    },
    "planner": set(),
    "tracker": {"redis_url"},
}


def render(*arguments: str, values: Path | None = None) -> str:
    """Return the chart's objects as YAML. Raises ChartError if helm refuses the values."""
    files = ["--values", str(values)] if values else []
    return helm("template", RELEASE, str(CHART), *files, *arguments)


def objects(rendered: str) -> list[dict[str, Any]]:
    return [found for found in yaml.safe_load_all(rendered) if found]


def of_kind(found: list[dict[str, Any]], *kinds: str) -> list[dict[str, Any]]:
    return [one for one in found if one["kind"] in kinds]


def pods(found: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the template of each workload's pods, by the workload's name."""
    workloads = of_kind(found, "Deployment", "StatefulSet")
    return {one["metadata"]["name"]: one["spec"]["template"] for one in workloads}


def containers(pod: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return a pod's containers in the order of their start."""
    return [*pod["spec"].get("initContainers", []), *pod["spec"]["containers"]]


def free_settings(service: str) -> list[str]:
    """Return which settings of a service the chart leaves to `settings`, as variables name them."""
    known = SETTINGS[service].model_fields.keys() - OWN_OF_ALL - OWN[service]
    return sorted(name.upper() for name in known)


def schema() -> dict[str, Any]:
    """Return values.schema.json with the services' settings of now."""
    found: dict[str, Any] = json.loads(SCHEMA.read_text())
    for service in SETTINGS:
        found["$defs"][f"{service}Settings"]["propertyNames"]["enum"] = free_settings(service)
    return found


def main() -> None:
    SCHEMA.write_text(json.dumps(schema(), indent=2) + "\n")
    GOLDEN.mkdir(exist_ok=True)
    for name, values in EXAMPLES.items():
        (GOLDEN / f"{name}.yaml").write_text(render(values=values))


if __name__ == "__main__":
    main()
