"""The metrics endpoint."""

import urllib.request

import pytest
from prometheus_client import REGISTRY, Gauge

from services.kit.telemetry.metrics import start_endpoint

PROMETHEUS_2 = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5"


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_names_are_the_same_to_every_prometheus(host: str) -> None:
    gauge = Gauge("vllm:test_gauge", "A name with a colon, as vLLM's are.")
    try:
        address = f"[{host}]" if ":" in host else host
        url = f"http://{address}:{start_endpoint(host, 0)}/metrics"
        asked = urllib.request.Request(url, headers={"accept": PROMETHEUS_2})
        with urllib.request.urlopen(asked, timeout=60) as answer:
            lines = answer.read().decode().splitlines()
    finally:
        REGISTRY.unregister(gauge)

    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert "vllm:test_gauge 0.0" in lines
