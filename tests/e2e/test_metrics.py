"""Running processes serve every metric that the dashboard shows or the documentation names."""

import json
import re
from pathlib import Path

import httpx
from prometheus_client.parser import text_string_to_metric_families

from lab.stack.processes import RPC_TIMEOUT_S, Stack
from tests.clients import http_chat

ROOT = Path(__file__).resolve().parents[2]
DASHBOARD = ROOT / "docker/grafana/dashboards/evenflow.json"
OPERATIONS = ROOT / "docs/operations.md"
SUFFIXES = {"counter": "_total", "histogram": "_bucket"}
NAME = re.compile(r"\b(?:vllm:)?evenflow_\w+")


def shown() -> set[str]:
    """Return the names in the dashboard's expressions."""
    panels = json.loads(DASHBOARD.read_text())["panels"]
    return set(NAME.findall(" ".join(t["expr"] for panel in panels for t in panel["targets"])))


def documented() -> set[str]:
    """Return the names in the documentation's list; one that ends with `_` begins several."""
    return set(NAME.findall(OPERATIONS.read_text().partition("## Metrics")[2]))


def served(stack: Stack) -> set[str]:
    """Return the names of everything that the processes serve, as Prometheus stores them, and will
    store once something has happened.
    """
    names = set()
    for name in stack.METRICS:
        url = f"http://{stack.address(name)}/metrics"
        metrics = httpx.get(url, timeout=RPC_TIMEOUT_S).text
        for family in text_string_to_metric_families(metrics):
            names |= {family.name, family.name + SUFFIXES.get(family.type, "")}
    return names


async def test_every_metric_that_people_look_at_exists(stack: Stack) -> None:
    await http_chat(stack.base_url, "Hello?", max_tokens=8, request_id="seen", rate_tps=50.0)
    there = served(stack)

    wanted = shown() | documented()
    assert len(shown()) > 15
    assert len(documented()) > 15
    missing = {name for name in wanted if not any(_is(name, known) for known in there)}
    assert not missing


def _is(name: str, known: str) -> bool:
    return known.startswith(name) if name.endswith("_") else known == name
