"""A real executor process on free ports, for integration tests."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType

import grpc
import psutil
from grpc_health.v1 import health_pb2, health_pb2_grpc

from lab.models import MAX_MODEL_LEN, exactness_model
from lab.slow_device.emulated_device import VARIABLE, LayerTime
from lab.stack.ports import free_port
from lab.stack.processes import (
    ENGINE_ENVIRONMENT,
    PYTHON_PATH,
    QUICK_EXECUTOR,
    ROOT,
    RPC_TIMEOUT_S,
    START_TIMEOUT_S,
    end,
    engine_processes_of,
    wait_until,
)

MAX_NUM_SEQS = 32
ENGINE_SETTINGS = {
    "DTYPE": "float32",
    "MAX_MODEL_LEN": MAX_MODEL_LEN,
    "MAX_NUM_SEQS": MAX_NUM_SEQS,
    "ENFORCE_EAGER": 1,
    "KV_CACHE_MEMORY_BYTES": 256 << 20,
}


class ExecutorProcess:
    """One executor. `settings` are named without their prefix."""

    def __init__(
        self,
        log_path: Path,
        *,
        module: str = QUICK_EXECUTOR,
        within: Sequence[str] = (),
        layer_time: LayerTime | None = None,
        environment: Mapping[str, str] = MappingProxyType({}),
        **settings: object,
    ) -> None:
        """`within`: a command that runs the process. `layer_time`: of an emulated device; needs
        layer-wise KV. `environment`: more of it.
        """
        self._log_path, self._module, self.within = log_path, module, within
        self._layer_time, self._environment = layer_time, dict(environment)
        port = free_port()
        self.address = f"127.0.0.1:{port}"
        self.metrics_port = free_port()
        self.settings: dict[str, object] = {  # of the process that `start` starts
            "MODEL": exactness_model(),
            "GRPC_PORT": port,
            "METRICS_PORT": self.metrics_port,
            "TRACKER": "",
            "PLANNER_ADDRESS": f"127.0.0.1:{free_port()}",  # no planner's
            "GRAMMAR_TIMEOUT_S": 60,
            "GRAMMAR_WAIT_S": 280,
            **ENGINE_SETTINGS,
            **settings,
        }
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def process(self) -> "subprocess.Popen[bytes]":
        assert self._process is not None
        return self._process

    def start(self) -> None:
        """Start the process; return at once, see `wait_serving`."""
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("EVENFLOW_")}
        own = {f"EVENFLOW_EXECUTOR_{name}": str(value) for name, value in self.settings.items()}
        own |= self._environment
        module = self._module
        if self._layer_time is not None:
            module = "lab.slow_device"
            own[VARIABLE] = json.dumps(asdict(self._layer_time))
        with self._log_path.open("ab") as log:
            self._process = subprocess.Popen(
                [*self.within, sys.executable, "-m", module],
                cwd=ROOT,
                env=inherited | ENGINE_ENVIRONMENT | {"PYTHONPATH": PYTHON_PATH} | own,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @contextlib.contextmanager
    def serving(self) -> Iterator[None]:
        """Run the process while the block runs, which begins when it serves."""
        self.start()
        try:
            self.wait_serving()
            yield
        finally:
            self.stop()

    def wait_serving(self) -> None:
        def serving() -> bool:
            code = self.process.poll()
            assert code is None, f"the executor exited with {code}:\n{self.log_tail()}"
            return self.health() == health_pb2.HealthCheckResponse.SERVING

        wait_until(serving, "executor serving", START_TIMEOUT_S)

    def health(self) -> int | None:
        """Return the health status; None if there is no answer."""
        with grpc.insecure_channel(self.address) as channel:
            try:
                request = health_pb2.HealthCheckRequest()
                answer = health_pb2_grpc.HealthStub(channel).Check(request, timeout=RPC_TIMEOUT_S)
            except grpc.RpcError:
                return None
        return int(answer.status)

    def engine_processes(self) -> list[psutil.Process]:
        """Return EngineCore and its workers."""
        return engine_processes_of(self.process.pid)

    def log_tail(self, num_lines: int = 40) -> str:
        lines = self._log_path.read_text(errors="replace").splitlines()
        return "\n".join(lines[-num_lines:])

    def kill(self) -> None:
        """Kill the front and its engine, be they stopped or not."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def stop(self) -> None:
        """Stop the process and whatever is left of its engine."""
        if self._process is not None:
            self._process.terminate()
            end(self._process)
