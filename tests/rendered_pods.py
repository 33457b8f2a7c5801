"""The chart's pods as processes of this machine: what a node does with what helm has rendered.

A container's command and environment are taken as they are. Pods have addresses of their own, and
here they share one: each port that a container names is a free one, which its process is told, and
which stands in for it wherever the name of its service is. Volumes are folders.
"""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import httpx
import psutil

from lab.stack.ports import free_port
from lab.stack.processes import (
    ENGINE_ENVIRONMENT,
    EXIT_TIMEOUT_S,
    PYTHON_PATH,
    ROOT,
    RPC_TIMEOUT_S,
    end,
    wait_until,
)
from lab.stack.redis_server import redis_executable
from services.kit.probe import problem_of
from services.kit.rpc import make_blocking_channel
from tests.charts import containers, of_kind

# Of this pod, of another one, or of a service, whose name may stand for all of its pods.
ADDRESS = re.compile(
    r"(?P<all>dns:)?(?:(?P<pod>evenflow-[a-z0-9-]+)\.)?(?P<host>evenflow-[a-z-]+|127\.0\.0\.1):(?P<port>\d+)"
)
# What the port is called that a container listens on, where its process can be told another one.
PORT_SETTINGS = {
    8000: "GATEWAY_HTTP_PORT",
    50050: "GATEWAY_GRPC_PORT",
    9050: "GATEWAY_METRICS_PORT",
    50051: "EXECUTOR_GRPC_PORT",
    9051: "EXECUTOR_METRICS_PORT",
    50052: "PLANNER_GRPC_PORT",
    9052: "PLANNER_METRICS_PORT",
    50053: "TRACKER_GRPC_PORT",
    9053: "TRACKER_METRICS_PORT",
}


class Cluster:
    """The pods of a release: of each workload as many as its replicas."""

    def __init__(self, found: list[dict[str, Any]], folder: Path) -> None:
        self.folder = folder
        self.pods: dict[str, Pod] = {}
        workloads = of_kind(found, "Deployment", "StatefulSet")
        self.workloads = {workload["metadata"]["name"]: workload for workload in workloads}
        for workload in workloads:
            for _ in range(workload["spec"]["replicas"]):
                self.add(workload)
        self._services = of_kind(found, "Service")
        (self._test,) = of_kind(found, "Pod")

    def add(self, workload: Mapping[str, Any]) -> "Pod":
        """Return one pod more of a workload, which nothing has started."""
        of_workload: str = workload["metadata"]["name"]
        number = sum(pod.workload == of_workload for pod in self.pods.values())
        pod = Pod(f"{of_workload}-{number}", workload, self)
        self.pods[pod.name] = pod
        return pod

    def addresses(self, service: str, port: int) -> list[str]:
        """Return where a service's name leads to, one address per pod."""
        (named,) = [one for one in self._services if one["metadata"]["name"] == service]
        (target,) = [p["targetPort"] for p in named["spec"]["ports"] if p["port"] == port]
        wanted = named["spec"]["selector"].items()
        chosen = [pod for pod in self.pods.values() if wanted <= pod.labels.items()]
        return [f"127.0.0.1:{pod.port(target)}" for pod in chosen]

    def here(self, text: str, pod: "Pod | None" = None) -> str:
        """Return a text with addresses of this machine for those of the cluster."""

        def address(match: re.Match[str]) -> str:
            port = int(match["port"])
            meant = pod if match["host"] == "127.0.0.1" else self.pods.get(match["pod"])
            if meant is not None:
                return f"127.0.0.1:{meant.ports[port]}"
            every = self.addresses(match["host"], port)
            names = [f"dns:{one.replace('127.0.0.1', 'localhost')}" for one in every]
            return ",".join(names) if match["all"] else every[0]

        return ADDRESS.sub(address, text)

    def test(self) -> "subprocess.CompletedProcess[str]":
        """Run the pod of `helm test`."""
        (part,) = self._test["spec"]["containers"]
        command = [self.here(word) for word in part["command"]]
        return subprocess.run([sys.executable, *command[1:]], capture_output=True, text=True)

    def stop(self) -> None:
        with ExitStack() as ending:
            for pod in self.pods.values():
                for process in pod.processes.values():
                    ending.callback(end, process)
            for pod in self.pods.values():
                for process in pod.processes.values():
                    process.terminate()


class Pod:
    """One pod: its containers' processes, asked and ended as a kubelet does it."""

    def __init__(self, name: str, workload: Mapping[str, Any], cluster: Cluster) -> None:
        self.name, self._cluster = name, cluster
        self.workload: str = workload["metadata"]["name"]
        template = workload["spec"]["template"]
        self.labels: dict[str, str] = template["metadata"]["labels"]
        self.grace_s: float = template["spec"]["terminationGracePeriodSeconds"]
        self._parts = {part["name"]: part for part in containers(template)}
        self._numbers = {
            port["name"]: port["containerPort"]
            for part in self._parts.values()
            for port in part["ports"]
        }
        self.ports = {number: free_port() for number in self._numbers.values()}
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def port(self, named: str | int) -> int:
        return self.ports[self._numbers[named] if isinstance(named, str) else named]

    def url(self) -> str:
        return f"http://127.0.0.1:{self.ports[8000]}"

    def start(self) -> None:
        """Start all containers; return at once, see `wait_for`."""
        for name, part in self._parts.items():
            with self._log(name).open("ab") as log:
                self.processes[name] = subprocess.Popen(
                    self._command(part),
                    cwd=ROOT,
                    env=self._environment(part),
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )

    def _command(self, part: Mapping[str, Any]) -> list[str]:
        program, *words = part["command"]
        if program == "redis-server":
            return [redis_executable(), *words, "--port", str(self.ports[6379])]
        assert program == "python"
        return [sys.executable, *words]

    def _environment(self, part: Mapping[str, Any]) -> dict[str, str]:
        """Return what the process is told, later variables with the values of earlier ones."""
        told: dict[str, str] = {}
        for variable in part.get("env", []):
            value = variable.get("value", self.name)  # else it is the pod's name
            value = re.sub(r"\$\((\w+)\)", lambda match: told[match[1]], value)
            told[variable["name"]] = value
        told = {name: self._file(self._cluster.here(value, self)) for name, value in told.items()}
        for port in part["ports"]:
            if setting := PORT_SETTINGS.get(port["containerPort"]):
                told[f"EVENFLOW_{setting}"] = str(self.ports[port["containerPort"]])
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("EVENFLOW_")}
        return inherited | ENGINE_ENVIRONMENT | {"PYTHONPATH": PYTHON_PATH} | told

    def _file(self, text: str) -> str:
        """Return where a mounted file is."""
        return (
            str(self._cluster.folder / text[1:]) if text.startswith(("/keys/", "/tls/")) else text
        )

    def _log(self, part: str) -> Path:
        return self._cluster.folder / f"{self.name}-{part}.log"

    def probe(self, kind: str, part: str = "") -> bool:
        """Ask what a probe of a container asks: `startup`, `liveness` or `readiness`."""
        asked = self._parts[part or next(iter(self._parts))][f"{kind}Probe"]
        if "grpc" in asked:
            with make_blocking_channel(f"127.0.0.1:{self.port(asked['grpc']['port'])}") as channel:
                return not problem_of(channel, RPC_TIMEOUT_S)
        if "httpGet" in asked:
            return self._get(asked["httpGet"])
        if "tcpSocket" in asked:
            connections = psutil.Process(self._process().pid).net_connections("tcp")
            port = self.port(asked["tcpSocket"]["port"])
            return any(c.laddr.port == port and c.status == psutil.CONN_LISTEN for c in connections)
        return self._run(asked["exec"]["command"])

    def _get(self, asked: Mapping[str, Any]) -> bool:
        url = f"http://127.0.0.1:{self.port(asked['port'])}{asked['path']}"
        try:
            return httpx.get(url, timeout=RPC_TIMEOUT_S).is_success
        except httpx.HTTPError:
            return False

    def _run(self, command: list[str]) -> bool:
        words = [self._file(self._cluster.here(word, self)) for word in command[1:]]
        patient = [*words, "--timeout", str(RPC_TIMEOUT_S)]
        env = {"PATH": os.defpath, "PYTHONPATH": PYTHON_PATH}
        return (
            subprocess.run(
                [sys.executable, *patient], env=env, stderr=subprocess.DEVNULL
            ).returncode
            == 0
        )

    def wait_for(self, kind: str, part: str = "", *, says: bool = True) -> None:
        """Ask a probe until it answers so."""

        def answers() -> bool:
            code = self._process(part).poll()
            assert code is None, f"{self.name} exited with {code}:\n{self.log_tail(part)}"
            return self.probe(kind, part) is says

        wait_until(answers, f"{kind} of {self.name} says {says}", 1_200)

    def _process(self, part: str = "") -> "subprocess.Popen[bytes]":
        return self.processes[part or next(iter(self.processes))]

    def log_tail(self, part: str = "") -> str:
        lines = self._log(part or next(iter(self._parts))).read_text(errors="replace")
        return "\n".join(lines.splitlines()[-40:])

    def terminate(self, part: str = "") -> None:
        """Ask a container to end; a kubelet asks the side-car in front of an engine first."""
        self._process(part).send_signal(signal.SIGTERM)

    def wait_exit(self, part: str = "", timeout_s: float = EXIT_TIMEOUT_S) -> int:
        """Return the exit code of a container that was asked to end."""
        part = part or next(iter(self.processes))
        process = self.processes[part]
        code = process.wait(timeout=timeout_s)
        with suppress(ProcessLookupError):  # that its group has nothing left
            os.killpg(process.pid, signal.SIGKILL)
        del self.processes[part]
        return code
