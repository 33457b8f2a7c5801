"""What the chart makes of its example values: what is committed, and what Kubernetes takes."""

import json
import re
from functools import cache
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator
from referencing import Registry, Resource
from referencing.jsonschema import DRAFT202012

from lab.chart_tools import CHART, NEWEST, OLDEST, chart_tools, helm, schema_of
from tests.charts import (
    EXAMPLES,
    GOLDEN,
    ROOT,
    SCHEMA,
    SETTINGS,
    containers,
    objects,
    of_kind,
    pods,
    render,
    schema,
)

CUSTOM = {"Certificate", "HTTPRoute", "InferencePool", "Issuer", "ScaledObject", "ServiceMonitor"}
KEYS = '[[keys]]\nname = "a"\nkey = "sk-0123456789abcdef"\n'


def test_helm_finds_nothing_to_say() -> None:
    said = helm("lint", "--strict", str(CHART))

    assert "[WARNING]" not in said
    assert "1 chart(s) linted, 0 chart(s) failed" in said


def test_examples_render_to_what_is_committed(example: str, text: str) -> None:
    assert (GOLDEN / f"{example}.yaml").read_text() == text, "make chart-golden"


def test_the_schema_of_values_knows_the_services_settings() -> None:
    assert json.loads(SCHEMA.read_text()) == schema(), "make chart-golden"


def test_the_chart_says_which_kubernetes_it_supports() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["kubeVersion"] == f">={OLDEST}-0"


@cache
def definitions(kubernetes: str) -> Registry[Any]:
    shared = json.loads((chart_tools() / f"v{kubernetes}" / "_definitions.json").read_text())
    resource = Resource.from_contents(shared, default_specification=DRAFT202012)
    return Registry().with_resource("/api/_definitions.json", resource)


def faults(one: dict[str, Any], kubernetes: str) -> list[str]:
    """Return what a Kubernetes would not take of an object, or not know."""
    rules = schema_of(one["kind"], one["apiVersion"], kubernetes)
    validator = Draft202012Validator(rules, registry=definitions(kubernetes))
    return [f"{error.json_path}: {error.message}" for error in validator.iter_errors(one)]


@pytest.mark.parametrize("kubernetes", [OLDEST, NEWEST])
def test_objects_are_what_kubernetes_takes(kubernetes: str, found: list[dict[str, Any]]) -> None:
    for one in found:
        if one["kind"] not in CUSTOM:
            assert faults(one, kubernetes) == [], one["metadata"]["name"]


@pytest.mark.parametrize("kubernetes", [OLDEST, NEWEST])
def test_a_mistyped_field_is_one_that_kubernetes_does_not_take(kubernetes: str) -> None:
    pod = {"apiVersion": "v1", "kind": "Pod", "spec": {"containers": [{"name": "a"}]}}
    assert faults(pod, kubernetes) == []
    pod["spec"]["terminationGracePeriod"] = 30  # type: ignore[index, call-overload]
    assert len(faults(pod, kubernetes)) == 1


def test_names_and_references_agree(found: list[dict[str, Any]]) -> None:
    """A service selects pods by labels that they have, on ports that they name."""
    templates = list(pods(found).values())
    for service in of_kind(found, "Service"):
        wanted = service["spec"]["selector"].items()
        chosen = [pod for pod in templates if wanted <= pod["metadata"]["labels"].items()]
        assert chosen, service["metadata"]["name"]
        for pod in chosen:
            named = {port["name"] for part in containers(pod) for port in part["ports"]}
            assert {port["targetPort"] for port in service["spec"]["ports"]} <= named
    for pod in templates:
        volumes = [volume["name"] for volume in pod["spec"].get("volumes", [])]
        assert len(volumes) == len(set(volumes))
        mounted = [m["name"] for part in containers(pod) for m in part.get("volumeMounts", [])]
        assert set(mounted) == set(volumes)


def test_addresses_lead_to_services_of_the_release(found: list[dict[str, Any]]) -> None:
    listening = {
        (service["metadata"]["name"], port["port"])
        for service in of_kind(found, "Service")
        for port in service["spec"]["ports"]
    }
    values = [
        variable.get("value", "")
        for pod in pods(found).values()
        for part in containers(pod)
        for variable in part.get("env", [])
    ]
    named = re.findall(r"(?:^|[/:@,.])(evenflow-[a-z-]+):(\d+)", "\n".join(values), re.MULTILINE)
    assert named
    assert {(name, int(port)) for name, port in named} <= listening


def settings_of(part: dict[str, Any]) -> dict[str, str]:
    """Return a container's variables, with what a secret or the pod's name might be."""
    return {
        variable["name"]: variable["value"]
        if "value" in variable
        else ("pod-0" if "fieldRef" in variable["valueFrom"] else "redis://elsewhere")
        for variable in part.get("env", [])
    }


def test_variables_are_settings_with_good_values(
    found: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, tmp_path
) -> None:
    file = tmp_path / "file"
    file.write_text(KEYS)
    seen = set()
    for pod in pods(found).values():
        for part in containers(pod):
            if part["name"] not in SETTINGS:
                continue
            seen.add(part["name"])
            settings_class = SETTINGS[part["name"]]
            prefix = settings_class.model_config["env_prefix"]
            with monkeypatch.context() as patch:
                for name, value in settings_of(part).items():
                    if name.startswith(prefix):
                        assert name.removeprefix(prefix).lower() in settings_class.model_fields
                        patch.setenv(name, str(file) if name.endswith("_FILE") else value)
                settings = settings_class()
            assert settings.host == "0.0.0.0"
            told = containers_ports(part)
            ports = {
                getattr(settings, name) for name in type(settings).model_fields if "_port" in name
            }
            assert ports == told
    assert seen == set(SETTINGS)


def containers_ports(part: dict[str, Any]) -> set[int]:
    return {port["containerPort"] for port in part["ports"]}


def test_no_pod_has_more_rights_than_it_needs(found: list[dict[str, Any]]) -> None:
    test = [one for one in found if one["kind"] == "Pod"]
    for pod in [*pods(found).values(), *test]:
        spec = pod["spec"]
        assert spec["automountServiceAccountToken"] is False
        assert spec["enableServiceLinks"] is False
        assert spec["securityContext"]["runAsNonRoot"] is True
        for part in containers(pod):
            rights = part["securityContext"]
            assert rights["readOnlyRootFilesystem"] is True
            assert rights["allowPrivilegeEscalation"] is False
            assert rights["capabilities"] == {"drop": ["ALL"]}


def test_certificates_bear_a_role_and_the_names_that_it_is_called_by() -> None:
    found = yaml.safe_load_all((GOLDEN / "gpu.yaml").read_text())
    names = {
        one["spec"]["secretName"]: one["spec"]["dnsNames"]
        for one in of_kind(list(found), "Certificate")
        if not one["spec"].get("isCA")
    }
    assert {secret: bears[0] for secret, bears in names.items()} == {
        f"evenflow-{role}-tls": role for role in SETTINGS
    }
    roles = [name for bears in names.values() for name in bears if name in SETTINGS]
    assert sorted(roles) == sorted(SETTINGS)  # no certificate passes for another role's
    assert names["evenflow-executor-tls"][1:] == [
        "evenflow-executor-qwen",
        "*.evenflow-executor-qwen",
        "evenflow-executor-llama",
        "*.evenflow-executor-llama",
    ]


@pytest.mark.parametrize(
    ("service", "callers"),
    [("executor", "gateway"), ("planner", "executor"), ("tracker", "gateway,executor")],
)
def test_services_ask_callers_for_their_roles(service: str, callers: str) -> None:
    found = list(yaml.safe_load_all((GOLDEN / "gpu.yaml").read_text()))
    told = [
        settings_of(part)[f"EVENFLOW_{service.upper()}_TLS_CLIENT_NAMES"]
        for pod in pods(found).values()
        for part in containers(pod)
        if part["name"] == service
    ]
    assert set(told) == {callers}


def test_a_side_car_leaves_before_its_executor_and_within_the_grace_of_both() -> None:
    found = list(yaml.safe_load_all((GOLDEN / "sidecar.yaml").read_text()))
    pod = pods(found)["evenflow-executor-qwen"]["spec"]
    (executor,), (gateway,) = pod["initContainers"], pod["containers"]

    assert (executor["name"], executor["restartPolicy"]) == ("executor", "Always")
    told = settings_of(gateway) | settings_of(executor)
    assert told["EVENFLOW_GATEWAY_EXECUTORS"] == "127.0.0.1:50051"
    # 10 + 300 + 30 of the gateway, 60 + 30 of the executor, 64 GiB at 5 GB/s
    assert pod["terminationGracePeriodSeconds"] == 340 + 90 + 14


def test_no_container_is_told_a_thing_twice() -> None:
    own = ["--set", "gateway.settings.FAILOVER_TIMEOUT_S=900"]
    for example in EXAMPLES.values():
        for pod in pods(objects(render(*own, values=example))).values():
            for part in containers(pod):
                names = [variable["name"] for variable in part.get("env", [])]
                assert len(names) == len(set(names)), part["name"]
                told = settings_of(part).get("EVENFLOW_GATEWAY_FAILOVER_TIMEOUT_S", "900")
                assert told == "900"


def test_keys_in_redis_are_read_there() -> None:
    found = list(yaml.safe_load_all(render("--set", "gateway.apiKeys.redis=true")))
    told = settings_of(containers(pods(found)["evenflow-gateway"])[0])

    assert told["EVENFLOW_GATEWAY_API_KEYS_REDIS_URL"] == "redis://evenflow-redis:6379/0"
    assert "EVENFLOW_GATEWAY_API_KEYS_FILE" not in told


def test_images_are_those_that_the_dockerfile_makes() -> None:
    compose = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    made = {service["image"] for service in compose.values()}
    found = [yaml.safe_load_all(golden.read_text()) for golden in GOLDEN.glob("*.yaml")]
    used = {
        part["image"].rpartition("/")[2].rpartition(":")[0]
        for example in found
        for pod in pods(list(example)).values()
        for part in containers(pod)
    }
    assert used - {"redis"} <= made
    assert len(used) == 6
