"""The whole stack as real processes on free ports, for end-to-end tests."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import grpc
import httpx
import psutil
from grpc_health.v1 import health_pb2, health_pb2_grpc

from lab.models import MAX_MODEL_LEN, exactness_model
from lab.stack.ports import free_port
from lab.stack.redis_server import RedisServer

ROOT = Path(__file__).resolve().parents[2]
PYTHON_PATH = os.pathsep.join([str(ROOT), str(ROOT / "protos")])  # of processes of this project
# Guards against hangs, far beyond what a busy machine needs.
START_TIMEOUT_S = 1_200.0
EXIT_TIMEOUT_S = 600.0
RPC_TIMEOUT_S = 60.0
MODEL = "exactness"
HANG_S = float(os.environ.get("EVENFLOW_TEST_HANG_S", "2.5"))  # longer than reports and plans wait
QUICK_EXECUTOR = "lab.stack.quick_executor"
MODULES = {"executor": QUICK_EXECUTOR}  # else `services.NAME`
KEEPALIVE_S = 30.0  # no process of a busy machine stands still for so long
ENGINE_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float = 300.0) -> None:
    """Poll `condition` until it holds; AssertionError naming `what` after the timeout."""
    began_s = time.monotonic()
    while not condition():
        waited_s = time.monotonic() - began_s
        assert waited_s < timeout_s, f"{what}: not within {timeout_s} s"
        time.sleep(min(1.0, 0.05 + waited_s / 50))  # looking takes time from what is waited for


def end(process: "subprocess.Popen[bytes]") -> None:
    """Wait for a process that was asked to end, and leave nothing of its group."""
    try:
        process.wait(timeout=EXIT_TIMEOUT_S)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def engine_processes_of(pid: int) -> list[psutil.Process]:
    """Return EngineCore and its workers, by the process id of their executor."""
    return [
        child
        for child in psutil.Process(pid).children(recursive=True)
        if "VLLM::" in command_of(child)
    ]


def assert_gone(processes: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(processes, timeout=EXIT_TIMEOUT_S)
    assert not [p for p in alive if p.status() != psutil.STATUS_ZOMBIE]


@contextmanager
def stopped(processes: list[psutil.Process]) -> Iterator[None]:
    """Keep processes from running while the block does."""
    for process in processes:
        process.suspend()
    try:
        yield
    finally:
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.resume()


def kind_of(name: str) -> str:
    """Return which service a process is of."""
    return name.partition("-")[0]


def command_of(process: psutil.Process) -> str:
    """Return a process' command line; nothing if it has just ended."""
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


class Stack:
    """Redis, tracker, planner, executors and gateways, each killable and restartable by name."""

    SERVICES = ("tracker", "planner", "executor", "gateway")
    METRICS = ("tracker_metrics", "planner_metrics", "executor_metrics", "gateway_metrics")

    def __init__(
        self,
        log_dir: Path,
        *,
        keepalive_s: float = KEEPALIVE_S,
        further: Sequence[str] = (),
        **settings: object,
    ) -> None:
        """A peer that hangs is noticed within two `keepalive_s`. `further` are more executors and
        gateways, such as `executor-2`; all gateways have all executors. `settings` are without
        `EVENFLOW_`, and those of a service are all its processes'.
        """
        self._log_dir = log_dir
        self._keepalive_s = keepalive_s
        self._further = further
        self.settings = settings  # of processes that are started from now on
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self.redis = RedisServer()
        self.services = (*self.SERVICES, *further)
        http = [name.replace("gateway", "http") for name in self._all("gateway")]
        self.ports = {name: free_port() for name in (*self.services, *self.METRICS, *http)}
        self.base_url = self.url("gateway")

    def url(self, gateway: str) -> str:
        """Return where a gateway is reached over HTTP."""
        return f"http://127.0.0.1:{self.ports[gateway.replace('gateway', 'http')]}"

    def address(self, service: str) -> str:
        return f"127.0.0.1:{self.ports[service]}"

    def _all(self, service: str) -> list[str]:
        return [name for name in self.services if kind_of(name) == service]

    def _environment(self, name: str) -> dict[str, str]:
        """Return the environment of one process."""
        settings = {
            "GATEWAY_HTTP_PORT": self.ports["http"],
            "GATEWAY_GRPC_PORT": self.ports["gateway"],
            "GATEWAY_EXECUTORS": ",".join(map(self.address, self._all("executor"))),
            "GATEWAY_TRACKER": self.address("tracker"),
            "EXECUTOR_GRPC_PORT": self.ports["executor"],
            "EXECUTOR_TRACKER": self.address("tracker"),
            "EXECUTOR_PLANNER_ADDRESS": self.address("planner"),
            "EXECUTOR_MODEL": exactness_model(),
            "EXECUTOR_SERVED_MODEL_NAME": MODEL,
            "EXECUTOR_DTYPE": "float32",  # greedy output must not depend on the batch
            "EXECUTOR_MAX_MODEL_LEN": MAX_MODEL_LEN,
            "EXECUTOR_MAX_NUM_SEQS": 32,
            "EXECUTOR_ENFORCE_EAGER": 1,
            "EXECUTOR_TOOL_CALL_PARSER": "hermes",
            "EXECUTOR_LAYERWISE_KV": "true",  # so that the planner is asked
            "EXECUTOR_KV_HOST_MEMORY_BYTES": 64 << 20,
            "EXECUTOR_GRAMMAR_TIMEOUT_S": 60,
            "EXECUTOR_GRAMMAR_WAIT_S": 280,
            "EXECUTOR_KV_MAX_PAUSE_S": 3_600,
            "EXECUTOR_DRAIN_TIMEOUT_S": 1_800,
            "GATEWAY_DRAIN_TIMEOUT_S": 300,
            "GATEWAY_READER_TIMEOUT_S": 1_800,
            "GATEWAY_SUBMIT_TIMEOUT_S": 300,
            "GATEWAY_FAILOVER_TIMEOUT_S": 1_800,  # as long as an engine takes on a busy machine
            "PLANNER_GRPC_PORT": self.ports["planner"],
            "TRACKER_GRPC_PORT": self.ports["tracker"],
            "TRACKER_REDIS_URL": self.redis.url,
        }
        settings |= {f"{name.upper()}_PORT": self.ports[name] for name in self.METRICS}
        settings |= {
            f"{name.upper()}_GRPC_KEEPALIVE_S": self._keepalive_s for name in self.SERVICES
        }
        if name in self._further:
            settings |= self._own(name)
        settings |= self.settings
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("EVENFLOW_")}
        return (
            inherited
            | ENGINE_ENVIRONMENT
            | {"PYTHONPATH": PYTHON_PATH}
            | {f"EVENFLOW_{name}": str(value) for name, value in settings.items()}
        )

    def _own(self, name: str) -> dict[str, object]:
        """Return what a further process does not have in common with the first of its service."""
        service = kind_of(name).upper()
        own: dict[str, object] = {
            f"{service}_ID": name,
            f"{service}_GRPC_PORT": self.ports[name],
            f"{service}_METRICS_PORT": 0,
        }
        if service == "GATEWAY":
            own["GATEWAY_HTTP_PORT"] = self.url(name).rpartition(":")[2]
        return own

    def start(self, *services: str) -> None:
        """Start the named services and wait until each says SERVING; and Redis, if it is named."""
        if "redis" in services:
            self.redis.start()
        others = [name for name in services if name != "redis"]
        self.launch(*others)
        for name in others:
            self.wait_serving(name)

    def launch(self, *services: str) -> None:
        """Start the named services."""
        for name in services:
            log = (self._log_dir / f"{name}.log").open("ab")
            self._processes[name] = subprocess.Popen(
                [sys.executable, "-m", MODULES.get(kind_of(name), f"services.{kind_of(name)}")],
                cwd=ROOT,
                env=self._environment(name),
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            log.close()

    def start_all(self) -> None:
        self.start("redis", *self.services)
        self.wait_ready()

    def wait_serving(self, name: str) -> None:
        def serving() -> bool:
            code = self._processes[name].poll()
            assert code is None, f"{name} exited with {code}:\n{self.log_tail(name)}"
            return self.is_serving(name)

        wait_until(serving, f"{name} serving", START_TIMEOUT_S)

    def is_serving(self, name: str) -> bool:
        with grpc.insecure_channel(self.address(name)) as channel:
            try:
                answer = health_pb2_grpc.HealthStub(channel).Check(
                    health_pb2.HealthCheckRequest(), timeout=RPC_TIMEOUT_S
                )
            except grpc.RpcError:
                return False
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    def is_ready(self) -> bool:
        try:
            return httpx.get(f"{self.base_url}/ready", timeout=RPC_TIMEOUT_S).status_code == 200
        except httpx.HTTPError:
            return False

    def wait_ready(self) -> None:
        wait_until(self.is_ready, "gateway ready", START_TIMEOUT_S)

    def kill(self, name: str, signum: int = signal.SIGKILL) -> int:
        """Send `signum` to the service's front process only, and return its exit code. Redis gets
        SIGKILL or SIGTERM.
        """
        if name == "redis":
            return self.redis.kill() if signum == signal.SIGKILL else self.redis.stop()
        self._processes[name].send_signal(signum)
        return self.wait_exit(name)

    def wait_exit(self, name: str) -> int:
        """Wait until the service's front process has ended, and return its exit code."""
        code = self._processes[name].wait(timeout=EXIT_TIMEOUT_S)
        del self._processes[name]
        return code

    def terminate(self, name: str) -> None:
        """Ask a service to end; see `wait_exit`."""
        self._processes[name].terminate()

    def engine_processes(self, name: str = "executor") -> list[psutil.Process]:
        """Return an executor's EngineCore and its workers."""
        return engine_processes_of(self._processes[name].pid)

    @contextmanager
    def frozen(self, name: str) -> Iterator[None]:
        """Stop a service and its children, or Redis, from running while the block does."""
        self._signal(name, signal.SIGSTOP)
        try:
            yield
        finally:
            self._signal(name, signal.SIGCONT)

    def _signal(self, name: str, signum: int) -> None:
        if name == "redis":
            self.redis.freeze() if signum == signal.SIGSTOP else self.redis.thaw()
        else:
            os.killpg(self._processes[name].pid, signum)

    def log(self, name: str) -> str:
        """Return all that a service has written."""
        return (self._log_dir / f"{name}.log").read_text(errors="replace")

    def log_tail(self, name: str, num_lines: int = 40) -> str:
        return "\n".join(self.log(name).splitlines()[-num_lines:])

    def stop(self) -> None:
        """Stop everything, children of killed processes included."""
        for process in self._processes.values():
            process.terminate()
        with ExitStack() as ending:
            ending.callback(self.redis.stop)
            for process in self._processes.values():
                ending.callback(end, process)
        self._processes.clear()
