"""The planner as the process that an operator runs."""

import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)

from evenflow.planner.v1 import planner_pb2 as pb
from evenflow.planner.v1 import planner_pb2_grpc as pb_grpc
from lab.planning.protos import make_plan_request
from lab.stack.ports import free_port

REPO = Path(__file__).parents[2]
READY_TIMEOUT_S = 600

pytestmark = pytest.mark.timeout(3_600)  # the first run compiles the kernels


def environment(**settings: object) -> dict[str, str]:
    ours = {f"EVENFLOW_PLANNER_{name.upper()}": str(value) for name, value in settings.items()}
    return os.environ | {"PYTHONPATH": f"{REPO}:{REPO / 'protos'}"} | ours


COMMAND = [sys.executable, "-m", "services.planner"]


@contextmanager
def running_planner(**settings: object) -> Iterator[tuple[subprocess.Popen[bytes], grpc.Channel]]:
    port = free_port()
    env = environment(grpc_port=port, **({"metrics_port": 0} | settings))
    process = subprocess.Popen(COMMAND, env=env, cwd=REPO)
    try:
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            wait_until_serving(channel)
            yield process, channel
    finally:
        process.kill()
        process.wait()


def wait_until_serving(channel: grpc.Channel) -> None:
    """Wait for the first SERVING of the health stream."""
    health = health_pb2_grpc.HealthStub(channel)
    request = health_pb2.HealthCheckRequest(service="evenflow.planner.v1.PlannerService")
    updates = health.Watch(request, wait_for_ready=True, timeout=READY_TIMEOUT_S)
    for update in updates:
        if update.status == health_pb2.HealthCheckResponse.SERVING:
            updates.cancel()
            return
    raise AssertionError("the health stream ended before SERVING")


def test_the_process_plans_reflects_itself_and_drains_on_sigterm() -> None:
    metrics_port = free_port()
    with running_planner(metrics_port=metrics_port) as (process, channel):
        request = make_plan_request(policy="vllm")
        response = pb_grpc.PlannerServiceStub(channel).Plan(request, timeout=300)
        assert response.plan.status == pb.PLAN_STATUS_OPTIMAL

        pool = DescriptorPool(ProtoReflectionDescriptorDatabase(channel))
        service = pool.FindServiceByName("evenflow.planner.v1.PlannerService")
        assert [method.name for method in service.methods] == ["Plan"]

        url = f"http://127.0.0.1:{metrics_port}/metrics"
        page = urllib.request.urlopen(url, timeout=300).read().decode()
        assert 'evenflow_planner_plans_total{policy="vllm",status="optimal"} 1.0' in page

        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=300) == 0  # also while kernels are still being compiled


def test_logged_plans_are_reproduced_by_replay(tmp_path: Path) -> None:
    log = tmp_path / "decisions.jsonl"
    with running_planner(decision_log=log, warm_groups="[4]") as (process, channel):
        stub = pb_grpc.PlannerServiceStub(channel)
        for free in (28, 20, 12):
            stub.Plan(make_plan_request(num_free_blocks=free), timeout=300)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=300) == 0

    command = [*COMMAND, "replay", str(log)]
    replayed = subprocess.run(
        command,
        env=environment(),
        cwd=REPO,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )

    assert replayed.returncode == 0, replayed.stdout + replayed.stderr
    assert replayed.stdout.count("reproduced") == 3


@pytest.mark.parametrize(
    ("name", "value"),
    [("grpc_port", "70000"), ("metrics_port", "x"), ("log_level", "loud"), ("warm_groups", "[0]")],
)
def test_a_bad_setting_stops_the_process_before_a_port_opens(name: str, value: str) -> None:
    ports = {"grpc_port": free_port(), "metrics_port": free_port()}

    ended = subprocess.run(
        COMMAND,
        env=environment(**(ports | {name: value})),
        cwd=REPO,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )

    assert ended.returncode == 78
    assert f"EVENFLOW_PLANNER_{name.upper()}" in ended.stderr
    assert "started" not in ended.stderr  # neither metrics_started nor serving_started
