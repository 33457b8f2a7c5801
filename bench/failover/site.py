"""Two executors behind links that can be broken, and a gateway."""

import json
import subprocess
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

from bench.failover.asked import ADAPTER, MARK
from bench.gateway.heavy_requests import Edge
from bench.gateway.large_chats import is_ready
from bench.gateway.processes import running, wait_until
from lab.adapters import save_adapter
from lab.slow_device.emulated_device import LayerTime
from lab.stack.executor_process import ExecutorProcess
from lab.stack.link_proxy import LinkProxy
from lab.stack.logs import log_lines
from lab.stack.ports import free_port
from lab.thinking_model import save_thinking_model

MODEL = "exactness"
ENGINE_STALL_S = 6.0  # lowered: what is measured is that it is kept
LINK_STALL_S = 3.0
FAILOVER_TIMEOUT_S = 600.0  # raised: starting an executor takes as long as the machine takes
OVERLAP_TOKENS = 4  # that a moved answer's next executor generates again: a difference is an error


def settings_of_load(folder: Path) -> dict[str, object]:
    """Return executors' settings, without their prefix, that the load needs: tools, a model that
    thinks where it is asked to, and an adapter. Both are written into `folder`.
    """
    adapter = folder / ADAPTER
    adapter.mkdir()
    save_adapter(adapter)
    return {
        "MODEL": save_thinking_model(folder / "thinking"),
        "TOOL_CALL_PARSER": "hermes",
        "REASONING_PARSER": "deepseek_v3",
        "LORA_MODULES": json.dumps({ADAPTER: str(adapter)}),
    }


def free_edge() -> Edge:
    """Return where a gateway may be."""
    return Edge(f"http://127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}", MODEL)


class Site:
    """`num_executors` executors, one gateway. Executors can be started again after their death."""

    def __init__(
        self,
        folder: Path,
        *,
        num_executors: int = 2,
        layer_time: LayerTime | None = None,
        **settings: object,
    ) -> None:
        """`layer_time`: of the executors, if they are on an emulated device. `settings`: theirs,
        without their prefix.
        """
        self._folder = folder
        self.broken: AbstractContextManager[None] | None = None  # a link that is silent
        self.executors = [
            ExecutorProcess(
                folder / f"executor-{number}.log",
                layer_time=layer_time,
                SERVED_MODEL_NAME=MODEL,
                ID=f"executor-{number}",
                **{"DRAIN_TIMEOUT_S": 30, "TRACKER": "", **settings},
            )
            for number in range(num_executors)
        ]
        self.links = [LinkProxy(executor.address) for executor in self.executors]
        self.edge = free_edge()

    @contextmanager
    def gateway(self, edge: Edge, log: Path) -> Iterator["subprocess.Popen[str]"]:
        """Run a gateway to the executors."""
        settings = {
            "EVENFLOW_GATEWAY_HTTP_PORT": edge.url.rpartition(":")[2],
            "EVENFLOW_GATEWAY_GRPC_PORT": edge.grpc_address.rpartition(":")[2],
            "EVENFLOW_GATEWAY_EXECUTORS": ",".join(link.address for link in self.links),
            "EVENFLOW_GATEWAY_METRICS_PORT": 0,
            "EVENFLOW_GATEWAY_TRACKER": "",
            "EVENFLOW_GATEWAY_LINK_STALL_S": LINK_STALL_S,
            "EVENFLOW_GATEWAY_ENGINE_STALL_S": ENGINE_STALL_S,
            "EVENFLOW_GATEWAY_FAILOVER_TIMEOUT_S": FAILOVER_TIMEOUT_S,
            "EVENFLOW_GATEWAY_FAILOVER_OVERLAP_TOKENS": OVERLAP_TOKENS,
        }
        with (
            log.open("w") as file,
            running("services.gateway", settings=settings, log=file) as process,
        ):
            yield process

    @contextmanager
    def running(self, *, num_linked: int | None = None) -> Iterator["Site"]:
        """Run everything. Only the first `num_linked` executors, by default all, are connected: the
        links of the others are to be entered.
        """
        linked = self.links[:num_linked]
        with ExitStack() as stack:
            for executor in self.executors:
                executor.start()
                stack.callback(executor.stop)
            for link in linked:
                stack.enter_context(link)
            stack.callback(self.end_silence)
            stack.enter_context(self.gateway(self.edge, self._folder / "gateway.log"))
            for executor in self.executors:
                executor.wait_serving()
            wait_until(lambda: is_ready(self.edge.url), "the gateway is ready")
            self.wait_connected(len(linked))
            yield self

    def end_silence(self) -> None:
        """Let a silent link speak again, if there is one."""
        broken, self.broken = self.broken, None
        if broken is not None:
            broken.__exit__(None, None, None)

    def wait_connected(self, num_executors: int, since: int = 0) -> None:
        """Wait until so many executors have been connected, counted from a place in the log."""
        wait_until(
            lambda: len(self.told("executor_connected", since=since)) >= num_executors,
            "the executors are connected",
        )

    def told(self, event: str, *, since: int = 0) -> list[dict[str, Any]]:
        """Return what the gateway's log says of an event from a place on."""
        text = (self._folder / "gateway.log").read_text()[since:]
        return [line for line in log_lines(text) if line.get("event") == event]

    @property
    def place_in_log(self) -> int:
        return len((self._folder / "gateway.log").read_text())

    def restart(self, number: int) -> None:
        """Start an executor again, whose front is gone, and wait until the gateway has it."""
        place = self.place_in_log
        executor = self.executors[number]
        executor.stop()
        executor.start()
        executor.wait_serving()
        self.wait_connected(1, since=place)


def time_of(line: dict[str, Any]) -> float:
    """Return when a line was logged, in seconds since the epoch."""
    return datetime.fromisoformat(line["timestamp"]).timestamp()


def name_of(line: dict[str, Any]) -> str:
    """Return which of the load's requests a line is about."""
    return str(line["request_id"]).removeprefix(f"{MARK}-").rpartition(":")[0]
