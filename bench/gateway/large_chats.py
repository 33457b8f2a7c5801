"""How long a small chat, and one with a small form, take beside requests that are much work.

A real executor on the CPU, and a gateway; clients are told apart by their addresses. In turn, some
times over: nothing else is there, or heavy requests of another client, or of the same one.
"""

import asyncio
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import httpx
import psutil

from bench.document import Benchmark, Row
from bench.gateway import heavy_requests
from bench.gateway.heavy_requests import CHAT, Edge, Send, small_form
from bench.gateway.processes import ROOT, cpu_s, running, wait_until
from lab.stack.executor_process import ExecutorProcess
from lab.stack.ports import free_port

MODEL = "chats"
# A context of which 16 MB may be a part, so that they are not refused for their length alone.
ENGINE = {
    "MODEL": ROOT / ".cache/models/smollm2-135m-instruct",
    "SERVED_MODEL_NAME": MODEL,
    "DTYPE": "bfloat16",
    "MAX_MODEL_LEN": 212_992,
    "ENGINE_ARGS": '["--hf-overrides", "{\\"max_position_embeddings\\": 212992}"]',
    "KV_CACHE_MEMORY_BYTES": 5 << 30,
    "GRAMMAR_TIMEOUT_S": 5,  # this one and the next: as by default
    "GRAMMAR_WAIT_S": 20,
}
SAME, ANOTHER = heavy_requests.ADDRESS, "127.0.0.2"
NUM_REPEATS = 3
NUM_SMALL = 6  # of each kind, as long as a heavy request is there
PAUSE_S = 0.5
MAX_RATIO = 3.0
IDLE_CPU_S = 0.2  # of an executor and its engine, in a second without requests
Case = tuple[str, Send | None, str]
CASES: tuple[Case, ...] = (
    ("nothing", None, ANOTHER),
    ("30 chats of 1 MB of another client", heavy_requests.chats, ANOTHER),
    ("30 chats of 1 MB of the same client", heavy_requests.chats, SAME),
    ("15 counted chats of 1 MB of another client", heavy_requests.counts, ANOTHER),
    ("15 counted chats of 1 MB of the same client", heavy_requests.counts, SAME),
    ("4 gRPC chats of 16 MB of another client", heavy_requests.grpc_chats, ANOTHER),
    ("4 gRPC chats of 16 MB of the same client", heavy_requests.grpc_chats, SAME),
    ("20 slow forms of another client", heavy_requests.forms, ANOTHER),
    ("20 slow forms of the same client", heavy_requests.forms, SAME),
)


def measure() -> list[Row]:
    with tempfile.TemporaryDirectory() as directory:
        executor = ExecutorProcess(Path(directory) / "executor.log", **ENGINE)
        with executor.serving(), one_gateway(executor.address, MODEL) as edge:
            asyncio.run(_case(edge, *CASES[0]))  # processes start, memory is touched
            return [
                _settled_case(executor, edge, case) for _ in range(NUM_REPEATS) for case in CASES
            ]


def _settled_case(executor: ExecutorProcess, edge: Edge, case: Case) -> Row:
    """Measure a case once the executor has done what earlier ones have left: prompts whose
    requests were given up on are rendered to their ends.
    """
    processes = [psutil.Process(executor.process.pid), *executor.engine_processes()]
    while True:
        before_s = cpu_s(processes)
        time.sleep(1.0)
        if cpu_s(processes) - before_s < IDLE_CPU_S:
            return asyncio.run(_case(edge, *case))


@contextmanager
def one_gateway(executor: str, model: str) -> Iterator[Edge]:
    """Run a gateway of one executor."""
    http_port, grpc_port = free_port(), free_port()
    settings = {
        "EVENFLOW_GATEWAY_HTTP_PORT": http_port,
        "EVENFLOW_GATEWAY_GRPC_PORT": grpc_port,
        "EVENFLOW_GATEWAY_EXECUTORS": executor,
        "EVENFLOW_GATEWAY_METRICS_PORT": 0,
        "EVENFLOW_GATEWAY_TRACKER": "",
    }
    edge = Edge(f"http://127.0.0.1:{http_port}", f"127.0.0.1:{grpc_port}", model)
    with running("services.gateway", settings=settings):
        wait_until(lambda: is_ready(edge.url), "the gateway is ready")
        yield edge


def is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/ready").is_success
    except httpx.TransportError:
        return False


async def _case(edge: Edge, name: str, send: Send | None, address: str) -> Row:
    """Have heavy requests sent, and send small ones one after the other while they are there."""
    begun_s = time.monotonic()
    heavy = asyncio.create_task(send(edge)) if send else None
    small: dict[str, list[tuple[str, float]]] = {"chat": [], "form": []}
    async with edge.client(address) as client:
        for number in range(2 * NUM_SMALL):
            await asyncio.sleep(PAUSE_S)
            if heavy and heavy.done():
                break
            kind = "form" if number % 2 else "chat"
            small[kind].append(await _small(edge, client, kind))
    answers = await heavy if heavy else {}
    return {
        "beside": name,
        "small": small,
        "heavy": dict(answers),
        "heavy_s": time.monotonic() - begun_s,
    }


async def _small(edge: Edge, client: httpx.AsyncClient, kind: str) -> tuple[str, float]:
    """Return how a small request was answered, and after how many seconds."""
    options = {"response_format": small_form()} if kind == "form" else {}
    begun_s = time.monotonic()
    answer = await client.post(CHAT, json=edge.body("Hello.", **options))
    return str(answer.status_code), time.monotonic() - begun_s


def _waits_s(rows: Sequence[Row], beside: str, kind: str) -> list[float]:
    """Return the waits of all small requests of a kind in all repeats of a case."""
    of_case = [row for row in rows if row["beside"] == beside]
    return [wait_s for row in of_case for _, wait_s in row["small"][kind]]


def _cells(rows: Sequence[Row], beside: str, kind: str) -> list[str]:
    """Return a kind's columns: the median, its ratio to that alone, the longest, the statuses."""
    waits_s = _waits_s(rows, beside, kind)
    if not waits_s:
        return ["", "", "", ""]
    alone_s = median(_waits_s(rows, CASES[0][0], kind))
    of_case = [row for row in rows if row["beside"] == beside]
    statuses = [status for row in of_case for status, _ in row["small"][kind]]
    return [
        f"{median(waits_s):.2f}",
        f"{median(waits_s) / alone_s:.1f}",
        f"{max(waits_s):.2f}",
        _counted({status: statuses.count(status) for status in sorted(set(statuses))}),
    ]


def _counted(statuses: dict[str, int]) -> str:
    return ", ".join(f"{count} x {status}" for status, count in sorted(statuses.items()))


def table(rows: Sequence[Row]) -> list[list[str]]:
    columns = ["{} s", "x alone", "longest s", "answers"]
    header = [column.format(f"small {kind}") for kind in ("chat", "form") for column in columns]
    lines = [["beside", *header, "heavy s", "their answers"]]
    for name in dict.fromkeys(row["beside"] for row in rows):
        of_case = [row for row in rows if row["beside"] == name]
        heavy: dict[str, int] = {}
        for row in of_case:
            for status, count in row["heavy"].items():
                heavy[status] = heavy.get(status, 0) + count
        heavy_s = f"{median(row['heavy_s'] for row in of_case):.0f}" if heavy else ""
        cells = [cell for kind in ("chat", "form") for cell in _cells(rows, name, kind)]
        lines.append([name, *cells, heavy_s, _counted(heavy)])
    return lines


def verdicts(rows: Sequence[Row]) -> list[str]:
    """Say of each case whether the medians of both kinds keep to `MAX_RATIO`."""
    lines = []
    for name, kind in ((name, kind) for name, _, _ in CASES[1:] for kind in ("chat", "form")):
        waits_s = _waits_s(rows, name, kind)
        alone_s = median(_waits_s(rows, CASES[0][0], kind))
        if not waits_s or median(waits_s) > MAX_RATIO * alone_s:
            lines.append(
                f"beside {name} a small {kind} takes more than {MAX_RATIO} x its wait alone"
            )
    return lines or [f"each small one takes at most {MAX_RATIO} x its wait alone"]


BENCHMARK = Benchmark(
    name="large-chats",
    title="A small chat, and one with a form of one boolean, beside much work",
    definitions={
        "small s": "from sending a chat with max_tokens 1 to its whole answer, median of all "
        f"repeats; {NUM_SMALL} of each kind in each of {NUM_REPEATS} repeats, {PAUSE_S} s after "
        "one another, as long as heavy requests are there",
        "heavy s": "from sending the heavy requests to the last one's answer, median of repeats",
        "answers": "HTTP statuses, and gRPC's codes",
    },
    measure=measure,
    table=table,
    verdicts=verdicts,
)
