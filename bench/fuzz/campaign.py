"""One campaign: a gateway, an executor, inputs, readers beside them, and what came of it."""

import asyncio
import base64
import json
import pickle
import subprocess
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
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

NUM_SENDERS = 96  # inputs at a time
MAX_LIVE = 1_024
MAX_TOLD = 20  # failures
IDLE_TIMEOUT_S = 60.0  # after the last input, for the gateway to have nothing live but the readers
MARKS_OF_A_CRASH = ("crashed", "Traceback", '"level": "error"', '"level": "critical"')


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How large a campaign is."""

    num_inputs: int
    seed: int
    num_paced: int  # streams that are read as they should be
    interval_s: float  # between two rows of figures
    out: Path


@dataclass(slots=True)
class Tally:
    """What came of the inputs so far."""

    num_sent: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    outcomes: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)

    def add(self, input: Input, outcome: str) -> None:
        self.num_sent += 1
        self.kinds[input.kind.value] += 1
        self.outcomes[outcome] += 1


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
        for failure in await _faults_at_the_end(plan, front, port):
            tally.failures.append(failure)
        rows.append(await figures.row())
    text = log_file.read_text()
    tally.failures += [f"{mark} in {log_file}" for mark in MARKS_OF_A_CRASH if mark in text]
    tally.failures += ["a paced stream broke"] * bool(rows[-1]["paced"]["num_failed"])
    content = document(BENCHMARK, rows, load) | {
        "kinds": tally.kinds,
        "outcomes": tally.outcomes,
        "failures": tally.failures,
    }
    save(content, plan.out / "fuzz.json")
    print(markdown(BENCHMARK, content), dict(tally.kinds), dict(tally.outcomes), sep="\n")
    return tally.failures


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
    given = gateway_settings(port, executor_port, MAX_LIVE)
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
        row: Row = {
            "elapsed_s": time.monotonic() - self._start_s,
            "num_inputs": self._tally.num_sent,
            "num_failures": len(self._tally.failures),
            "rss_bytes": self._gateway.memory_info().rss,
            "paced": json.loads(line),
        }
        print(json.dumps(row), flush=True)
        return row


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
        await _feed(queue, drawing, plan.num_inputs)


async def _feed(
    queue: "asyncio.Queue[Input | None]", drawing: "subprocess.Popen[str]", num_inputs: int
) -> None:
    """Put so many inputs into the queue, and an end for each sender."""
    assert drawing.stdout is not None
    num_put = 0
    while num_put < num_inputs:
        line = await asyncio.to_thread(drawing.stdout.readline)
        batch: Sequence[Input] = pickle.loads(base64.b64decode(line))
        for input in batch[: num_inputs - num_put]:
            await queue.put(input)
            num_put += 1
    for _ in range(NUM_SENDERS):
        await queue.put(None)


async def _send(queue: "asyncio.Queue[Input | None]", sender: Sender, tally: Tally) -> None:
    while (input := await queue.get()) is not None:
        try:
            outcome = await sender.send(input)
        except (UnexpectedError, OSError, TimeoutError) as error:
            outcome = f"{type(error).__name__}: {error}"
            tally.failures.append(f"{outcome} after {input}")
            if len(tally.failures) <= MAX_TOLD:
                print(tally.failures[-1], flush=True)
        tally.add(input, outcome)


async def _faults_at_the_end(
    plan: Plan, front: "subprocess.Popen[str]", port: int
) -> Sequence[str]:
    """Say what is wrong once everybody but the paced readers has left."""
    if front.poll() is not None:
        return [f"the gateway ended with {front.returncode}"]
    deadline_s = time.monotonic() + IDLE_TIMEOUT_S
    async with httpx.AsyncClient(timeout=IDLE_TIMEOUT_S) as client:
        while True:
            load = (await client.get(f"http://127.0.0.1:{port}/load")).json()["server_load"]
            if load <= plan.num_paced:
                return []
            if time.monotonic() > deadline_s:
                return [f"{load} requests are live beside {plan.num_paced} readers"]
            await asyncio.sleep(0.5)


def _table(rows: Sequence[Row]) -> list[list[str]]:
    lines = [["minutes", "inputs", "MiB", "paced streams", "error ms p50", "p99", "max"]]
    for row in rows:
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
