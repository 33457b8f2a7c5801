"""What gRPC adds to a plan: the time of the call less the time of the work in the process."""

import os
import re
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from evenflow.planner.v1 import planner_pb2 as pb
from evenflow.planner.v1 import planner_pb2_grpc as pb_grpc
from lab.planning.protos import make_engine, make_plan_request, make_request

ROOT = Path(__file__).parents[2]


def added_by_grpc(num_requests: int, count: int) -> dict[str, Any]:
    """Return mean call time, mean work time and their difference, in seconds."""
    ports = [_free_port(), _free_port()]
    settings = {
        "EVENFLOW_PLANNER_GRPC_PORT": str(ports[0]),
        "EVENFLOW_PLANNER_METRICS_PORT": str(ports[1]),
        "EVENFLOW_PLANNER_WARM_GROUPS": "[32]",
        "EVENFLOW_PLANNER_LOG_LEVEL": "warning",
        "PYTHONPATH": f"{ROOT}:{ROOT / 'protos'}",
    }
    command = [sys.executable, "-m", "services.planner"]
    process = subprocess.Popen(command, env=os.environ | settings, cwd=ROOT)
    try:
        with grpc.insecure_channel(f"127.0.0.1:{ports[0]}") as channel:
            stub = pb_grpc.PlannerServiceStub(channel)
            request = _request(num_requests)
            for _ in range(5):
                stub.Plan(request, timeout=300, wait_for_ready=True)
            before = _work_s(ports[1])
            calls = [_call_s(stub, request) for _ in range(count)]
            work_s = (_work_s(ports[1]) - before) / count
    finally:
        process.terminate()
        process.wait()
    return {
        "num_requests": num_requests,
        "num_calls": count,
        "call_mean_s": float(np.mean(calls)),
        "call_p50_s": float(np.median(calls)),
        "work_mean_s": work_s,
        "added_mean_s": float(np.mean(calls)) - work_s,
    }


def _call_s(stub: pb_grpc.PlannerServiceStub, request: pb.PlanRequest) -> float:
    start_s = time.perf_counter()
    stub.Plan(request, timeout=60)
    return time.perf_counter() - start_s


def _work_s(metrics_port: int) -> float:
    page = urllib.request.urlopen(f"http://127.0.0.1:{metrics_port}/metrics", timeout=30).read()
    found = re.search(r'plan_duration_seconds_sum{policy="orbitflow"} (\S+)', page.decode())
    assert found is not None
    return float(found[1])


def _request(num_requests: int) -> pb.PlanRequest:
    requests = [
        make_request(
            request_id=f"r{i}",
            num_prompt_tokens=4_000 + 900 * i,
            num_computed_tokens=4_000 + 900 * i,
            num_host_blocks=[(4_000 + 900 * i) // 16] * 32,
        )
        for i in range(num_requests)
    ]
    blocks = sum((4_000 + 900 * i) // 16 for i in range(num_requests)) * 20
    request = make_plan_request(
        engine=make_engine(num_layers=32, num_blocks=2**30),
        requests=requests,
        num_free_blocks=blocks,
    )
    request.time_budget_s = 0.001
    return request


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
