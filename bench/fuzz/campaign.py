"""One campaign: a gateway, an executor, inputs, readers beside them, and what came of it."""

import asyncio
import base64
import json
import math
import pickle
import subprocess
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import IO

import httpx
import psutil
from grpc import aio

from bench.document import Benchmark, Row, document, markdown, save
from bench.fuzz.senders import Sender, UnexpectedError
from bench.fuzz.types import Input
from bench.gateway.processes import running, wait_until
from bench.gateway.streams import gateway_settings, is_ready
from lab.stack.ports import free_port

NUM_SENDERS = 896  # inputs at a time: most wait for the gateway to give up on them, 1 to 2 s
MAX_LIVE = 1_024
MAX_TOLD = 20  # failures, and what is told of each
MAX_TOLD_CHARS = 2_000
MAX_FAILURES = 1_000  # then it ends
MAX_ROWS = 24  # of the table; the JSON has all
IDLE_TIMEOUT_S = 60.0  # after the last input, for the gateway to have nothing live but the readers
MARKS_OF_A_CRASH = ("crashed", "Traceback", '"level": "error"', '"level": "critical"')


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How large a campaign is."""

    num_inputs: int
    limit_s: float  # inputs that are not sent by then are a failure
    seed: int
    num_paced: int  # streams that are read as they should be
    interval_s: float  # between two rows of figures
    out: Path


@dataclass(slots=True)
class Tally:
    """What came of the inputs so far."""

    num_sent: int = 0
    num_failures: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    outcomes: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)  # the first ones

    def add(self, input: Input, outcome: str) -> None:
        self.num_sent += 1
        self.kinds[input.kind.value] += 1
        self.outcomes[outcome] += 1

    def fail(self, failure: str) -> None:
        self.num_failures += 1
        if self.num_failures <= MAX_TOLD:
            self.failures.append(failure[:MAX_TOLD_CHARS])
            print(self.failures[-1], flush=True)


async def campaign(plan: Plan) -> list[str]:
    """Send the inputs; write and print figures. Returns what the gateway should not have done."""
    plan.out.mkdir(parents=True, exist_ok=True)
    log_file, load = plan.out / "gateway.log", psutil.getloadavg()
    port, grpc_port, executor_port = free_port(), free_port(), free_port()
    tally, rows = Tally(), list[Row]()
    with ExitStack() as stack:
        log = stack.enter_context(log_file.open("w"))
        stack.enter_context(running("bench.fuzz.executor", str(executor_port)))
        settings = _settings(port, executor_port, grpc_port)
        front = stack.enter_context(running("services.gateway", settings=settings, log=log))
        await asyncio.to_thread(wait_until, lambda: is_ready(port), "the gateway")
        arguments = map(str, (port, plan.num_paced, plan.interval_s))
        paced = stack.enter_context(running("bench.fuzz.paced_readers", *arguments))
        drawing = stack.enter_context(running("bench.fuzz.inputs", str(plan.seed)))
        figures = _Figures(paced, psutil.Process(front.pid), tally)
        for _ in range(2):  # without inputs; the first is of the streams' beginnings
            rows.append(await figures.row())
        sending = asyncio.create_task(_send_all(plan, tally, drawing, port, grpc_port))
        while not sending.done():
            rows.append(await figures.row())
        await sending
        faults = await _faults_at_the_end(plan, front, port)
        rows.append(await figures.row())
    faults += [f"{mark} in {log_file}" for mark in sorted(_marks_in(log_file))]
    faults += ["a paced stream broke"] * bool(rows[-1]["paced"]["num_failed"])
    if tally.num_sent < plan.num_inputs:
        faults.append(f"{tally.num_sent:,} inputs were sent of {plan.num_inputs:,}")
    content = document(BENCHMARK, rows, load) | {
        "whole": whole_of(rows),
        "kinds": tally.kinds,
        "outcomes": tally.outcomes,
        "num_failures": tally.num_failures + len(faults),
        "failures": [*tally.failures, *faults],
    }
    save(content, plan.out / "fuzz.json")
    parts = (content["whole"], dict(tally.kinds), dict(tally.outcomes))
    print(markdown(BENCHMARK, content), *parts, sep="\n")
    return content["failures"]


def whole_of(rows: Sequence[Row]) -> Row:
    """Return the figures of a campaign: of the rows in which inputs were sent."""
    busy = [
        n for n, (before, after) in enumerate(pairwise(rows), 1) if _sent(before) < _sent(after)
    ]
    taken_s = rows[busy[-1]]["elapsed_s"] - rows[busy[0] - 1]["elapsed_s"] if busy else math.inf
    return {
        "num_inputs": _sent(rows[-1]),
        "inputs_per_s": _sent(rows[-1]) / taken_s,
        "rss_bytes_before": rows[1]["rss_bytes"],
        "rss_bytes_most": max(row["rss_bytes"] for row in rows),
        "rss_bytes_after": rows[-1]["rss_bytes"],
        "num_paced_streams": sum(row["paced"]["num_streams"] for row in rows),
        "worst_paced_p99_s": max((rows[n]["paced"].get("p99_s", 0.0) for n in busy), default=0.0),
    }


def _sent(row: Row) -> int:
    return int(row["num_inputs"])


def _marks_in(log_file: Path) -> set[str]:
    with log_file.open() as lines:
        return {mark for line in lines for mark in MARKS_OF_A_CRASH if mark in line}


def _settings(port: int, executor_port: int, grpc_port: int) -> dict[str, object]:
    prefix = "EVENFLOW_GATEWAY_"
    own = {
        "GRPC_PORT": grpc_port,
        "HTTP_HEAD_TIMEOUT_S": 1.0,
        "HTTP_BODY_TIMEOUT_S": 1.0,
        "HTTP_IDLE_TIMEOUT_S": 2.0,
        "READER_TIMEOUT_S": 5.0,
        "MAX_PACE_TAIL_S": 20.0,
    }
    given = gateway_settings(port, [executor_port], MAX_LIVE)
    return given | {prefix + name: value for name, value in own.items()}


class _Figures:
    """Takes a row of figures whenever the paced readers tell theirs."""

    def __init__(
        self, paced: "subprocess.Popen[str]", gateway: psutil.Process, tally: Tally
    ) -> None:
        assert paced.stdout is not None
        self._told: IO[str] = paced.stdout
        self._gateway = gateway
        self._tally = tally
        self._start_s = time.monotonic()

    async def row(self) -> Row:
        line = await asyncio.to_thread(self._told.readline)
        if not line:  # the readers have ended, as they do when nothing takes their connections
            await asyncio.sleep(1.0)
        row: Row = {
            "elapsed_s": time.monotonic() - self._start_s,
            "num_inputs": self._tally.num_sent,
            "num_failures": self._tally.num_failures,
            "rss_bytes": self._rss_bytes(),
            "paced": json.loads(line) if line else {"num_streams": 0.0, "num_failed": 1.0},
        }
        print(json.dumps(row), flush=True)
        return row

    def _rss_bytes(self) -> int:
        """Return the gateway's resident memory; 0 when it has ended."""
        try:
            return int(self._gateway.memory_info().rss)
        except psutil.NoSuchProcess:
            return 0


async def _send_all(
    plan: Plan, tally: Tally, drawing: "subprocess.Popen[str]", port: int, grpc_port: int
) -> None:
    queue: asyncio.Queue[Input | None] = asyncio.Queue(maxsize=4 * NUM_SENDERS)
    async with (
        aio.insecure_channel(f"127.0.0.1:{grpc_port}") as channel,
        asyncio.TaskGroup() as tasks,
    ):
        for _ in range(NUM_SENDERS):
            tasks.create_task(_send(queue, Sender(port, channel), tally))
        await _feed(queue, drawing, plan, tally)


async def _feed(
    queue: "asyncio.Queue[Input | None]", drawing: "subprocess.Popen[str]", plan: Plan, tally: Tally
) -> None:
    """Put the inputs into the queue, and an end for each sender; fewer if there are faults."""
    assert drawing.stdout is not None
    num_put, deadline_s = 0, time.monotonic() + plan.limit_s
    while num_put < plan.num_inputs:
        line = await asyncio.to_thread(drawing.stdout.readline)
        batch: Sequence[Input] = pickle.loads(base64.b64decode(line))
        for input in batch[: plan.num_inputs - num_put]:
            if time.monotonic() > deadline_s or tally.num_failures >= MAX_FAILURES:
                plan = replace(plan, num_inputs=num_put)
                break
            await queue.put(input)
            num_put += 1
    for _ in range(NUM_SENDERS):
        await queue.put(None)


async def _send(queue: "asyncio.Queue[Input | None]", sender: Sender, tally: Tally) -> None:
    while (input := await queue.get()) is not None:
        try:
            outcome = await sender.send(input)
        except (UnexpectedError, OSError, TimeoutError) as error:
            outcome = type(error).__name__
            tally.fail(f"{outcome}: {error} after {input}")
        tally.add(input, outcome)


async def _faults_at_the_end(plan: Plan, front: "subprocess.Popen[str]", port: int) -> list[str]:
    """Say what is wrong once everybody but the paced readers has left."""
    if front.poll() is not None:
        return [f"the gateway ended with {front.returncode}"]
    deadline_s = time.monotonic() + IDLE_TIMEOUT_S
    async with httpx.AsyncClient(timeout=IDLE_TIMEOUT_S) as client:
        while True:
            try:
                answer = await client.get(f"http://127.0.0.1:{port}/load")
            except httpx.HTTPError as error:
                return [f"the gateway does not answer: {error!r}"]
            load = answer.json()["server_load"]
            if load <= plan.num_paced:
                return []
            if time.monotonic() > deadline_s:
                return [f"{load} requests are live beside {plan.num_paced} readers"]
            await asyncio.sleep(0.5)


def _table(rows: Sequence[Row]) -> list[list[str]]:
    lines = [["minutes", "inputs", "MiB", "paced streams", "error ms p50", "p99", "max"]]
    every = -(-len(rows) // MAX_ROWS)
    for row in [*rows[:-1:every], rows[-1]]:
        paced = row["paced"]
        errors = [f"{paced[n] * 1e3:.0f}" if n in paced else "" for n in _ERRORS]
        minutes, mebibytes = row["elapsed_s"] / 60, row["rss_bytes"] / 2**20
        counts = [f"{row['num_inputs']:,}", f"{mebibytes:.1f}", f"{paced['num_streams']:.0f}"]
        lines.append([f"{minutes:.1f}", *counts, *errors])
    return lines


_ERRORS = ("p50_s", "p99_s", "max_s")
BENCHMARK = Benchmark(
    name="fuzz",
    title="Anything at all, beside paced streams",
    definitions={
        "MiB": "resident, of the gateway's process",
        "error ms": "a token's receipt less its due time, of the streams that ended since the row "
        "before; the first fifth of each is left out",
    },
    measure=lambda: [],
    table=_table,
)
