"""How many reports the tracker takes, with a real Redis behind it."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil
import redis
from grpc_health.v1 import health_pb2, health_pb2_grpc

from bench.document import Benchmark, Row
from bench.gateway.processes import cpu_s, running, tree
from evenflow.tracker.v1 import tracker_pb2 as pb
from evenflow.tracker.v1 import tracker_pb2_grpc as pb_grpc
from lab.stack.ports import free_port
from lab.stack.redis_server import RedisServer
from services.kit.rpc import make_channel
from services.reporting.reporter import ReporterOptions

if TYPE_CHECKING:
    from evenflow.tracker.v1.tracker_pb2_grpc import TrackerServiceAsyncStub

NUM_REQUESTS = 1_000
SECONDS = 5.0
WARM_S = 1.0
EPOCH = 1
EXECUTOR_ID, GATEWAY_ID = "executor-0", "gateway-0"
INTERVAL_S = ReporterOptions().interval_s
ENTRIES_PER_REPORT = (50, NUM_REQUESTS)


class Reporter:
    """Sends progress of some requests at a time, each time one token further."""

    def __init__(self, stub: "TrackerServiceAsyncStub", *, is_executor: bool) -> None:
        self._stub = stub
        self._is_executor = is_executor
        self._count = 0
        self.durations_s: list[float] = []
        self.num_entries = 0

    async def report(self, num_entries: int) -> None:
        """Send one report about the next `num_entries` requests. Raises if any is not applied."""
        self._count += 1
        first = self._count * num_entries % NUM_REQUESTS
        numbers = [(first + k) % NUM_REQUESTS for k in range(num_entries)]
        request = pb.ReportRequest(epoch=EPOCH, progress=map(self._progress, numbers))
        if self._is_executor:
            request.executor_id = EXECUTOR_ID
        else:
            request.gateway_id = GATEWAY_ID
        begin_s = time.perf_counter()
        answer = await self._stub.Report(request, timeout=30)
        self.durations_s.append(time.perf_counter() - begin_s)
        self.num_entries += num_entries
        if answer.unknown or answer.stale or answer.illegal:
            raise RuntimeError("the tracker has not applied a report")

    def _progress(self, number: int) -> pb.Progress:
        progress = pb.Progress(executor_id=EXECUTOR_ID, request_id=f"q{number}", generation=1)
        if self._is_executor:
            progress.num_generated_tokens = self._count
            progress.state = pb.REQUEST_STATE_DECODING
        else:
            progress.num_delivered_tokens = self._count
        return progress

    async def back_to_back(self, num_entries: int, end_s: float) -> None:
        while time.perf_counter() < end_s:
            await self.report(num_entries)

    async def at_intervals(self, num_entries: int, end_s: float) -> None:
        """Send as `TrackerReporter` does: the interval lies between an answer and the next."""
        while time.perf_counter() < end_s:
            await self.report(num_entries)
            await asyncio.sleep(INTERVAL_S)


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """A tracker over a Redis of its own."""

    stub: "TrackerServiceAsyncStub"
    tracker: list[psutil.Process]
    redis: list[psutil.Process]
    redis_client: Any

    def num_commands(self) -> tuple[int, int]:
        """Return the calls of scripts, and of all other commands, scripts' own included."""
        calls = {
            name: int(figures["calls"])
            for name, figures in self.redis_client.info("commandstats").items()
        }
        scripts = sum(calls.get(f"cmdstat_{name}", 0) for name in ("evalsha", "eval"))
        return scripts, sum(calls.values()) - scripts


def measure() -> list[Row]:
    return asyncio.run(_measure_all())


async def _measure_all() -> list[Row]:
    with RedisServer() as redis_server, _tracker(redis_server.url) as (port, tracker):
        client = redis.Redis.from_url(redis_server.url)
        server_pid = psutil.Process(int(client.info("server")["process_id"]))
        async with make_channel(f"127.0.0.1:{port}", default_timeout_s=30) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            await health.Check(health_pb2.HealthCheckRequest(), wait_for_ready=True, timeout=60)
            stub = pb_grpc.TrackerServiceStub(channel)
            server = Server(
                stub=stub, tracker=tree(tracker), redis=[server_pid], redis_client=client
            )
            await _register(stub)
            rows = [await _measure(server, "two senders, 50 ms", NUM_REQUESTS, paced=True)]
            for count in ENTRIES_PER_REPORT:
                rows.append(await _measure(server, "one sender, back to back", count, paced=False))
        client.close()
        return rows


@contextmanager
def _tracker(redis_url: str) -> Iterator[tuple[int, int]]:
    """Run a tracker; gives its port and process id."""
    port = free_port()
    settings = {
        "EVENFLOW_TRACKER_GRPC_PORT": port,
        "EVENFLOW_TRACKER_METRICS_PORT": 0,
        "EVENFLOW_TRACKER_REDIS_URL": redis_url,
        "EVENFLOW_TRACKER_LEASE_TTL_S": 600,
        "EVENFLOW_TRACKER_LOG_LEVEL": "warning",
    }
    with running("services.tracker", settings=settings) as process:
        yield port, process.pid


async def _register(stub: "TrackerServiceAsyncStub") -> None:
    await stub.RegisterExecutor(
        pb.RegisterExecutorRequest(executor_id=EXECUTOR_ID, epoch=EPOCH, address="h:1", model="m")
    )
    request = pb.RegisterRequest(gateway_id=GATEWAY_ID, gateway_epoch=EPOCH)
    for number in range(NUM_REQUESTS):
        request.registrations.add(
            executor_id=EXECUTOR_ID, request_id=f"q{number}", generation=1, num_prompt_tokens=100
        )
    await stub.Register(request)


async def _measure(server: Server, name: str, num_entries: int, *, paced: bool) -> Row:
    executor = Reporter(server.stub, is_executor=True)
    senders = [executor, Reporter(server.stub, is_executor=False)] if paced else [executor]

    async def send(seconds: float) -> None:
        end_s = time.perf_counter() + seconds
        send = Reporter.at_intervals if paced else Reporter.back_to_back
        await asyncio.gather(*(send(sender, num_entries, end_s) for sender in senders))

    await send(WARM_S)
    for sender in senders:
        sender.durations_s, sender.num_entries = [], 0
    return {"senders": name, "entries_per_report": num_entries} | await _figures(
        server, senders, send
    )


async def _figures(
    server: Server, senders: Sequence[Reporter], send: Callable[[float], Awaitable[None]]
) -> Row:
    scripts, others = server.num_commands()
    tracker_s, redis_s = cpu_s(server.tracker), cpu_s(server.redis)
    begin_s = time.perf_counter()
    await send(SECONDS)
    elapsed_s = time.perf_counter() - begin_s
    durations_s = [duration for sender in senders for duration in sender.durations_s]
    scripts_after, others_after = server.num_commands()
    return {
        "reports_per_s": len(durations_s) / elapsed_s,
        "entries_per_s": sum(sender.num_entries for sender in senders) / elapsed_s,
        "p50_s": float(np.quantile(durations_s, 0.5)),
        "p99_s": float(np.quantile(durations_s, 0.99)),
        "redis_scripts_per_s": (scripts_after - scripts) / elapsed_s,
        "redis_other_commands_per_s": (others_after - others) / elapsed_s,
        "tracker_cpu_frac": (cpu_s(server.tracker) - tracker_s) / elapsed_s,
        "redis_cpu_frac": (cpu_s(server.redis) - redis_s) / elapsed_s,
    }


def table(rows: Sequence[Row]) -> list[list[str]]:
    header = ["senders", "entries / report", "reports/s", "entries/s", "ms p50", "p99"]
    lines = [[*header, "scripts/s", "other commands/s", "tracker core %", "Redis core %"]]
    for row in rows:
        lines.append(
            [
                row["senders"],
                f"{row['entries_per_report']:,}",
                f"{row['reports_per_s']:.0f}",
                f"{row['entries_per_s']:,.0f}",
                f"{row['p50_s'] * 1e3:.1f}",
                f"{row['p99_s'] * 1e3:.1f}",
                f"{row['redis_scripts_per_s']:.0f}",
                f"{row['redis_other_commands_per_s']:,.0f}",
                f"{row['tracker_cpu_frac'] * 1e2:.0f}",
                f"{row['redis_cpu_frac'] * 1e2:.0f}",
            ]
        )
    return lines


BENCHMARK = Benchmark(
    name="tracker",
    title="Reports to the tracker, 1,000 live requests",
    definitions={
        "senders": "an executor and a gateway that report all their requests 50 ms after the last "
        "answer, which is the most that services send; or an executor without any pause",
        "entries": "progress of one request; a report holds many",
        "ms": "from the call of Report to its answer",
        "scripts/s, other commands/s": "what Redis ran: scripts, and single commands, those within "
        "scripts included",
    },
    measure=measure,
    table=table,
)
