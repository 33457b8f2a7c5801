"""What a gateway's links to executors cost while it has no request at any of them.

`python -m bench.gateway.links PORTS LOADS_PER_S` runs executors without an engine, one at each of
the comma-separated ports, that tell their load so often, a new one each time.
"""

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Sequence
from itertools import count

import psutil

from bench.document import Benchmark, Row
from bench.gateway.processes import cpu_s, running, wait_until
from bench.gateway.streams import GATEWAY_CORE, OTHER_CORE, gateway_settings, num_connected
from bench.gateway.synthetic_executor import EnginelessExecutor, started
from evenflow.executor.v1 import executor_pb2 as pb
from lab.stack.ports import free_port
from services.kit.rpc import Context

NUM_LINKS = (1, 25, 100)
LOADS_PER_S = (0.0, 4.0)  # nothing runs; other gateways' requests do
SECONDS = 20
MAX_CORE_FRAC, MAX_LINK_BYTES = 0.02, 100 << 10  # bars: of all links, of one


class IdleExecutor(EnginelessExecutor):
    """Gets nothing to do, and tells gateways what others make it do."""

    def __init__(self, executor_id: str, loads_per_s: float) -> None:
        super().__init__(executor_id)
        self._loads_per_s = loads_per_s

    async def Stream(  # noqa: N802
        self, requests: AsyncIterator[pb.StreamRequest], context: Context
    ) -> AsyncIterator[pb.StreamResponse]:
        for sequence in count():
            yield pb.StreamResponse(sequence=sequence, load=pb.Load(num_running_reqs=sequence))
            if not self._loads_per_s:
                await asyncio.Event().wait()
            await asyncio.sleep(1 / self._loads_per_s)


def measure() -> list[Row]:
    rows = [_measure(number, often) for often in LOADS_PER_S for number in NUM_LINKS]
    lone = {row["loads_per_s"]: row for row in rows if row["num_links"] == 1}
    for row in rows:
        more = row["num_links"] - 1
        first = lone[row["loads_per_s"]]
        row["bytes_per_link"] = (row["resident_bytes"] - first["resident_bytes"]) / max(1, more)
    return rows


def _measure(num_links: int, loads_per_s: float) -> Row:
    ports = [free_port() for _ in range(num_links)]
    metrics_port = free_port()
    settings = gateway_settings(free_port(), ports, 1, metrics_port=metrics_port)
    arguments = ",".join(map(str, ports)), str(loads_per_s)
    with (
        running("bench.gateway.links", *arguments, cores=[OTHER_CORE]),
        running("services.gateway", settings=settings, cores=[GATEWAY_CORE]) as front,
    ):
        wait_until(lambda: num_connected(metrics_port) == num_links, "all links")
        gateway = psutil.Process(front.pid)
        before_s, began_s = cpu_s([gateway]), time.monotonic()
        time.sleep(SECONDS)
        used_s, passed_s = cpu_s([gateway]) - before_s, time.monotonic() - began_s
        resident_bytes = gateway.memory_info().rss
    return {
        "num_links": num_links,
        "loads_per_s": loads_per_s,
        "cpu_frac": used_s / passed_s,
        "resident_bytes": resident_bytes,
    }


def table(rows: Sequence[Row]) -> list[list[str]]:
    lines = [["links", "loads / s of each", "core %", "KiB / link"]]
    for row in rows:
        is_lone = row["num_links"] == 1
        lines.append(
            [
                str(row["num_links"]),
                f"{row['loads_per_s']:g}",
                f"{row['cpu_frac'] * 1e2:.2f}",
                "" if is_lone else f"{row['bytes_per_link'] / 1024:.0f}",
            ]
        )
    return lines


def verdicts(rows: Sequence[Row]) -> list[str]:
    return [_verdict(row) for row in rows if row["num_links"] == max(NUM_LINKS)]


def _verdict(row: Row) -> str:
    is_met = row["cpu_frac"] <= MAX_CORE_FRAC and row["bytes_per_link"] <= MAX_LINK_BYTES
    return (
        f"{row['num_links']} links, {row['loads_per_s']:g} loads / s of each: {MAX_CORE_FRAC:.0%} "
        f"of a core and {MAX_LINK_BYTES >> 10} KiB a link: {'met' if is_met else 'MISSED'}"
    )


BENCHMARK = Benchmark(
    name="links",
    title="Links without requests",
    definitions={
        "loads / s of each": "0: executors that nothing runs on; 4: those that other gateways' "
        "requests run on, whose load is another each time",
        "core %": f"CPU time of the gateway's process, over {SECONDS} s from when all links are "
        "connected",
        "KiB / link": "resident memory of the gateway at the end of that, less that of one with a "
        "lone link, by links",
    },
    measure=measure,
    table=table,
    verdicts=verdicts,
)


async def _serve(ports: Sequence[str], loads_per_s: float) -> None:
    servers = await started({port: IdleExecutor(port, loads_per_s) for port in ports})
    await asyncio.gather(*(server.wait_for_termination() for server in servers))


if __name__ == "__main__":
    asyncio.run(_serve(sys.argv[1].split(","), float(sys.argv[2])))
