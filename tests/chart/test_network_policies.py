"""Network policies allow the calls of ARCHITECTURE.md's picture, and no others."""

import re
from itertools import product
from typing import Any

import pytest

from tests.charts import EXAMPLES, ROOT, containers, objects, of_kind, pods, render

COMPONENT = "app.kubernetes.io/component"
ROW = re.compile(r"^\| (\w+) \| (\w+) \| (\d[\d, ]*)(.*)\|$", re.MULTILINE)
OUTSIDE = {"app.kubernetes.io/name": "a-stranger"}
DNS = 53
HTTPS = 443

Call = tuple[str, str, int]


def calls_of_the_picture(*, keys_in_redis: bool) -> set[Call]:
    """Return who calls whom on which port: the table under the picture."""
    rows = ROW.findall((ROOT / "ARCHITECTURE.md").read_text())
    return {
        (caller.lower(), called.lower(), int(port))
        for caller, called, ports, only in rows
        for port in ports.split(",")
        if keys_in_redis or "keys" not in only
    }


def selects(selector: dict[str, Any], labels: dict[str, str]) -> bool:
    assert selector.keys() <= {"matchLabels"}
    return selector.get("matchLabels", {}).items() <= labels.items()


def allows(rules: list[dict[str, Any]], side: str, peer: dict[str, str], port: int) -> bool:
    """Return whether one of a policy's rules lets this peer through; strangers have namespaces of
    their own.
    """
    for rule in rules:
        if port not in [allowed["port"] for allowed in rule["ports"]]:
            continue
        if side not in rule:
            return True
        for one in rule[side]:
            if "namespaceSelector" in one or "ipBlock" in one:
                if peer is OUTSIDE:
                    return True
            elif selects(one["podSelector"], peer):
                return True
    return False


def reachable(found: list[dict[str, Any]]) -> set[Call]:
    """Return which calls the policies allow between any two pods of the release, and strangers."""
    policies = of_kind(found, "NetworkPolicy")
    labels = {
        pod["metadata"]["labels"][COMPONENT]: pod["metadata"]["labels"]
        for pod in pods(found).values()
    }
    ports = {
        port["containerPort"]
        for pod in pods(found).values()
        for part in containers(pod)
        for port in part["ports"]
    } | {6379, HTTPS}
    peers = labels | {"client": OUTSIDE}
    allowed = set()
    for caller, called, port in product(peers, peers, ports):
        leaves = all(
            allows(policy["spec"]["egress"], "to", peers[called], port)
            for policy in policies
            if selects(policy["spec"]["podSelector"], peers[caller])
        )
        enters = all(
            allows(policy["spec"]["ingress"], "from", peers[caller], port)
            for policy in policies
            if selects(policy["spec"]["podSelector"], peers[called])
        )
        if leaves and enters and (caller, called) != ("client", "client"):
            allowed.add((caller, called, port))
    return allowed


def without_metrics(calls: set[Call]) -> set[Call]:
    """Leave out what strangers may read: metrics, for Prometheus."""
    return {call for call in calls if not (call[0] == "client" and 9050 <= call[2] <= 9053)}


def served(found: list[dict[str, Any]], calls: set[Call]) -> set[Call]:
    """Keep calls that something answers: policies may allow ports on which no pod listens."""
    listening = {
        (pod["metadata"]["labels"][COMPONENT], port["containerPort"])
        for pod in pods(found).values()
        for part in containers(pod)
        for port in part["ports"]
    }
    return {call for call in calls if (call[1], call[2]) in listening or call[1] == "client"}


@pytest.mark.parametrize("keys_in_redis", [False, True])
@pytest.mark.parametrize("values", [None, EXAMPLES["cpu"]])
def test_apart_the_calls_are_those_of_the_picture(values, keys_in_redis: bool) -> None:
    keys = f"gateway.open=false,gateway.apiKeys.redis={str(keys_in_redis).lower()}"
    found = objects(render("--set", keys, values=values))
    hub = {("executor", "client", HTTPS)}  # the hub is a stranger's, too

    assert without_metrics(served(found, reachable(found))) == (
        calls_of_the_picture(keys_in_redis=keys_in_redis) | hub
    )


def test_with_another_redis_only_the_tracker_leaves_for_it() -> None:
    found = objects(render("--set", "networkPolicy.hub=false", values=EXAMPLES["gpu"]))
    own = {call for call in calls_of_the_picture(keys_in_redis=False) if call[1] != "redis"}

    assert without_metrics(served(found, reachable(found))) == own | {("tracker", "client", 6379)}


def test_a_side_car_calls_its_executor_within_the_pod_and_no_other_ones() -> None:
    found = objects(render("--set", "networkPolicy.hub=false", values=EXAMPLES["sidecar"]))

    def merged(component: str) -> str:
        return "executor" if component == "gateway" else component

    picture = calls_of_the_picture(keys_in_redis=False)
    wanted = {(merged(a), merged(b), port) for a, b, port in picture}
    assert without_metrics(served(found, reachable(found))) == wanted - {
        ("executor", "executor", 50051)
    }


def test_kv_events_tell_prompts_and_only_who_is_named_may_subscribe() -> None:
    events = "poolDefaults.kvEvents.port=5557,poolDefaults.layerwiseKv=false"
    named = "networkPolicy.kvEvents[0].namespaceSelector.matchLabels.name=picker"

    def heard(*arguments: str) -> set[Call]:
        found = objects(render("--set", events, *arguments, values=EXAMPLES["cpu"]))
        return {call for call in served(found, reachable(found)) if call[2] == 5557}

    assert heard() == set()
    assert heard("--set", named) == {("client", "executor", 5557)}


def test_a_pod_without_a_policy_would_show() -> None:
    found = objects(render(values=EXAMPLES["cpu"]))
    open_planner = [
        one
        for one in found
        if one["metadata"]["name"] != "evenflow-planner" or one["kind"] != "NetworkPolicy"
    ]

    assert ("client", "planner", 50052) in reachable(open_planner) - reachable(found)


def test_clients_that_are_named_are_the_only_ones() -> None:
    """But the pod of `helm test`."""
    found = objects(render(values=EXAMPLES["gpu"]))
    (edge,) = [
        rule
        for policy in of_kind(found, "NetworkPolicy")
        for rule in policy["spec"]["ingress"]
        if {"port": 8000} in rule["ports"]
    ]
    named = [peer.get("namespaceSelector") or peer["podSelector"] for peer in edge["from"]]
    assert [one["matchLabels"] for one in named[:1]] == [
        {"kubernetes.io/metadata.name": "gateways"}
    ]
    assert [one["matchLabels"][COMPONENT] for one in named[1:]] == ["test"]
