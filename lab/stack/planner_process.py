"""The planner as a process, warm for one engine shape."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import grpc

from evenflow.planner.v1 import planner_pb2_grpc as pb_grpc
from lab.planning.protos import make_plan_request
from lab.stack.ports import free_port
from lab.stack.processes import PYTHON_PATH, ROOT

WARM_TIMEOUT_S = 1_800.0  # the first start on a machine compiles the kernels


@contextmanager
def warm_planner(*, num_groups: int) -> Iterator[str]:
    """Yield the address of a planner that has built its solver for `num_groups`."""
    port = free_port()
    settings = {
        "EVENFLOW_PLANNER_GRPC_PORT": str(port),
        "EVENFLOW_PLANNER_METRICS_PORT": "0",
        "EVENFLOW_PLANNER_WARM_GROUPS": f"[{num_groups}]",
        "EVENFLOW_PLANNER_LOG_LEVEL": "warning",
        "PYTHONPATH": PYTHON_PATH,
    }
    process = subprocess.Popen(
        [sys.executable, "-m", "services.planner"], env=os.environ | settings, cwd=ROOT
    )
    address = f"127.0.0.1:{port}"
    try:
        with grpc.insecure_channel(address) as channel:
            # The thread that warms the solver up answers this once it has.
            pb_grpc.PlannerServiceStub(channel).Plan(
                make_plan_request(), timeout=WARM_TIMEOUT_S, wait_for_ready=True
            )
        yield address
    finally:
        process.terminate()
        process.wait()
