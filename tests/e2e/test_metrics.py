"""Running processes serve every metric and label that the dashboard shows or documentation names.

That each metric moves, `tests/integration`, `tests/executors` and `tests/exact` see.
"""

import json
import re
from collections import defaultdict
from pathlib import Path

import httpx
from prometheus_client.parser import text_string_to_metric_families

from lab.stack.processes import RPC_TIMEOUT_S, Stack
from tests.clients import http_chat

ROOT = Path(__file__).resolve().parents[2]
DASHBOARD = ROOT / "docker/grafana/dashboards/evenflow.json"
WATCHING = ROOT / "docs/watching.md"
SUFFIXES = {"counter": "_total", "histogram": "_bucket"}
NAME = re.compile(r"\b(?:vllm:)?evenflow_\w+")
MATCHERS = re.compile(r"(\w+) *=~?\"")
GROUPS = re.compile(r"\b(?:by|ignoring) *\(([^)]*)\)")
LEGENDS = re.compile(r"{{(\w+)}}")
PROMETHEUS_OWN = {"le", "instance"}  # of a bucket, and of where a sample was scraped


def targets() -> list[dict[str, str]]:
    """Return the dashboard's expressions, each with its legend."""
    panels = json.loads(DASHBOARD.read_text())["panels"]
    return [target for panel in panels for target in panel["targets"]]


def shown() -> set[str]:
    """Return the names in the dashboard's expressions."""
    return {name for target in targets() for name in NAME.findall(target["expr"])}


def labels_in(target: dict[str, str]) -> set[str]:
    """Return the labels that an expression or its legend names."""
    expr, legend = target["expr"], target.get("legendFormat", "")
    grouped = {name for names in GROUPS.findall(expr) for name in names.replace(" ", "").split(",")}
    return {*MATCHERS.findall(expr), *grouped, *LEGENDS.findall(legend)} - PROMETHEUS_OWN


def documented() -> set[str]:
    """Return the names in the documentation's list; one that ends with `_` begins several."""
    return set(NAME.findall(WATCHING.read_text().partition("## Metrics")[2]))


def served(stack: Stack) -> dict[str, set[str]]:
    """Return the labels of everything that the processes serve, by the names by which Prometheus
    stores it, and will once something has happened.
    """
    labels: dict[str, set[str]] = defaultdict(set)
    for name in stack.METRICS:
        url = f"http://{stack.address(name)}/metrics"
        metrics = httpx.get(url, timeout=RPC_TIMEOUT_S).text
        for family in text_string_to_metric_families(metrics):
            for name in (family.name, family.name + SUFFIXES.get(family.type, "")):
                labels[name].update(*(sample.labels for sample in family.samples))
    return labels


async def test_every_metric_that_people_look_at_exists(stack: Stack) -> None:
    await http_chat(stack.base_url, "Hello?", max_tokens=8, request_id="seen", rate_tps=50.0)
    there = served(stack)

    wanted = shown() | documented()
    assert len(shown()) > 15
    assert len(documented()) > 15
    missing = {name for name in wanted if not any(_is(name, known) for known in there)}
    assert not missing


async def test_every_label_of_the_dashboard_exists(stack: Stack) -> None:
    await http_chat(stack.base_url, "Hello?", max_tokens=8, request_id="labelled", rate_tps=50.0)
    there = served(stack)

    assert any(map(labels_in, targets()))
    for target in targets():
        known = {label for name in NAME.findall(target["expr"]) for label in there[name]}
        assert labels_in(target) <= known, target["expr"]


def _is(name: str, known: str) -> bool:
    return known.startswith(name) if name.endswith("_") else known == name
