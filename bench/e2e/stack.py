"""A planner and one executor per run, as processes."""

import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType

from prometheus_client.parser import text_string_to_metric_families

from bench.e2e.systems import NUM_LAYERS, SYSTEMS, Device
from lab.stack.executor_process import ExecutorProcess
from lab.stack.ports import free_port
from lab.stack.processes import PYTHON_PATH, ROOT, wait_until

PLANNER_START_TIMEOUT_S = 300.0
SCRAPE_TIMEOUT_S = 10.0
PREFIX = "vllm:evenflow_"
KINDS = ("kind", "result")  # labels by which sums are kept apart too


@contextmanager
def planner(log_path: Path) -> Iterator[str]:
    """Run a planner; yield its address."""
    port, metrics_port = free_port(), free_port()
    policies = {str(system["POLICY"]) for system in SYSTEMS.values()}
    settings = {
        "EVENFLOW_PLANNER_GRPC_PORT": str(port),
        "EVENFLOW_PLANNER_METRICS_PORT": str(metrics_port),
        "EVENFLOW_PLANNER_WARM_GROUPS": f"[{NUM_LAYERS}]",
        "EVENFLOW_PLANNER_POLICIES": json.dumps(sorted(name for name in policies if ":" in name)),
        "PYTHONPATH": PYTHON_PATH,
    }
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("EVENFLOW_")}
    with log_path.open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "services.planner"],
            cwd=ROOT,
            env=inherited | settings,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    try:
        wait_until(
            lambda: "serving_started" in log_path.read_text(), "planner", PLANNER_START_TIMEOUT_S
        )
        yield f"127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(timeout=30)


@contextmanager
def executor(
    device: Device,
    system: Mapping[str, object],
    *,
    planner_address: str,
    log_path: Path,
    environment: Mapping[str, str] = MappingProxyType({}),
) -> Iterator[ExecutorProcess]:
    """Run one executor of a system."""
    settings = device.settings() | {"PLANNER_ADDRESS": planner_address} | dict(system)
    process = ExecutorProcess(
        log_path, layer_time=device.layer_time, environment=environment, **settings
    )
    with process.serving():
        yield process


def metric_sums(process: ExecutorProcess) -> dict[str, float]:
    """Return our metrics of the executor, summed over labels; `name/value` for those of KINDS."""
    url = f"http://127.0.0.1:{process.metrics_port}/metrics"
    text = urllib.request.urlopen(url, timeout=SCRAPE_TIMEOUT_S).read().decode()
    sums: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name.startswith(PREFIX) and not sample.name.endswith(("_bucket", "_created")):
                name = sample.name.removeprefix(PREFIX).removesuffix("_total")
                kinds = [f"{name}/{sample.labels[k]}" for k in KINDS if k in sample.labels]
                for key in (name, *kinds):
                    sums[key] = sums.get(key, 0.0) + sample.value
    return sums


def grown(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """Return what was added between two readings."""
    return {name: value - before.get(name, 0.0) for name, value in after.items()}


def utc_now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
