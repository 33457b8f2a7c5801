"""An engine over two nodes: its leader here, its follower in the namespace."""

import json
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import MappingProxyType

import grpc
import psutil
from grpc_health.v1 import health_pb2, health_pb2_grpc

from lab.stack.executor_process import ExecutorProcess
from tests.nodes.network import LEADER_HOST, WITHIN, network
from tests.nodes.strict_kv import ALONE, PATIENCE_S

# vLLM's eager mode does not warm up the later stages on a CPU.
STAGE_ARGUMENTS = ("--compilation-config", '{"mode": 2, "backend": "eager"}')
WITH_STAGES: dict[str, object] = {"ENFORCE_EAGER": 0, "ENGINE_ARGS": json.dumps(STAGE_ARGUMENTS)}
STRICT = ("tests.nodes.strict_leader", "tests.nodes.strict_follower")


class Group:
    """Both processes. `settings` are named without their prefix, and are the same on both nodes."""

    def __init__(
        self,
        folder: Path,
        *,
        of_follower: dict[str, object] | None = None,
        environment: Mapping[str, str] = MappingProxyType({}),
        **settings: object,
    ) -> None:
        """`of_follower`: settings that it has instead. `environment`: more of it, on both."""
        alone = {ALONE: "yes"} if "EVENFLOW_TEST_END_S" in os.environ else {}
        if not alone:
            settings = {"GRPC_KEEPALIVE_S": PATIENCE_S, **settings}
        self.leader = ExecutorProcess(
            folder / "leader.log",
            module=STRICT[0],
            environment={**alone, **environment},
            HOST="0.0.0.0",
            NODES=2,
            **settings,
        )
        port = self.leader.address.rpartition(":")[2]
        self.leader.settings["LEADER_ADDRESS"] = f"{LEADER_HOST}:{port}"
        shared = {**self.leader.settings, **(of_follower or {})}
        self.follower = ExecutorProcess(
            folder / "follower.log",
            module=STRICT[1],
            environment={**alone, **environment},
            within=WITHIN,
            **{**shared, "NODE_RANK": 1},
        )

    @contextmanager
    def running(self) -> Iterator[None]:
        """Run both while the block does, in a network of their own."""
        with network(), ExitStack() as ending:
            for process in (self.follower, self.leader):
                process.start()
                ending.callback(process.kill)
            yield

    def processes(self) -> list[psutil.Process]:
        """Return the engine's processes on both nodes, fronts included."""
        fronts = [psutil.Process(node.process.pid) for node in (self.leader, self.follower)]
        return [*fronts, *self.leader.engine_processes(), *self.follower.engine_processes()]


class HealthWatch:
    """What a process says of its health from now on, until it ends."""

    def __init__(self, address: str) -> None:
        self.statuses: list[str] = []
        self._channel = grpc.insecure_channel(address)
        self._begun = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        self._begun.wait()

    def _run(self) -> None:
        stub = health_pb2_grpc.HealthStub(self._channel)
        try:
            for answer in stub.Watch(health_pb2.HealthCheckRequest()):
                self.statuses.append(
                    health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
                )
                self._begun.set()
        except grpc.RpcError:
            self._begun.set()

    def close(self) -> list[str]:
        """Return all that was said."""
        self._channel.close()
        self._thread.join()
        return self.statuses
