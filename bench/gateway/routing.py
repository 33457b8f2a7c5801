"""Whether requests find executors that come and go, of unequal speed and context, by two gateways.

Executors without an engine, at loopback addresses behind one name, compute one prompt after the
other at a stated rate. Each minute one is added, and half a minute later the oldest of the slow
ones goes: its address leaves the name, and it stops when it has had no request for a while.
"""

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from itertools import count
from unittest.mock import patch

import httpx
from grpc import aio

from bench.document import Benchmark, Row
from bench.gateway.synthetic_executor import EnginelessExecutor
from evenflow.executor.v1 import executor_pb2 as pb
from evenflow.executor.v1 import executor_pb2_grpc as pb_grpc
from evenflow.gateway.v1 import generation_pb2 as gen
from lab.stack.ports import free_port
from services.executor.serving.load import Newcomers
from services.gateway.app import run_gateway
from services.gateway.settings import GatewaySettings
from services.gateway.types import estimated_num_tokens
from services.generation.prompts import TextPrompt
from services.kit.rpc import Context

MINUTES = 10
NAME, MODEL = "executors.bench", "synthetic"
RATE, LONG_SHARE = 7.0, 0.05  # requests per second; those of more than 5,000 tokens
TPS = 4_000.0  # of prompts, at speed 1
NUM_TOKENS, TOKEN_S = 20, 0.02  # of each answer
STAYS_S = 12.0  # an executor that is to stop, without requests
BAR_S = 6.0
STOP = pb.Ending(finish_reason=gen.FINISH_REASON_STOP)


@dataclass(eq=False)
class Executor(EnginelessExecutor):
    """Computes prompts in turn, and tells gateways its load, as an executor does."""

    host: str
    port: int
    speed: int
    context: int
    added_s: float
    gone_s: float | None = None  # when its address left the name
    asked_s: list[float] = field(default_factory=list)  # when requests came
    newcomers: Newcomers = field(default_factory=lambda: Newcomers(time.monotonic))
    outs: set["asyncio.Queue[pb.StreamResponse]"] = field(default_factory=set)
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def GetModelInfo(  # noqa: N802
        self, request: pb.GetModelInfoRequest, context: Context
    ) -> pb.GetModelInfoResponse:
        return pb.GetModelInfoResponse(
            executor_id=self.host, model=MODEL, max_model_len=self.context, fingerprint="alike"
        )

    async def Stream(  # noqa: N802
        self, requests: AsyncIterator[pb.StreamRequest], context: Context
    ) -> AsyncIterator[pb.StreamResponse]:
        out: asyncio.Queue[pb.StreamResponse] = asyncio.Queue()
        self.outs.add(out)
        reading = asyncio.create_task(self._read(requests, out))
        try:
            for sequence in count():
                frame = await out.get()
                frame.sequence = sequence
                yield frame
        finally:
            reading.cancel()
            self.outs.discard(out)

    async def _read(
        self, requests: AsyncIterator[pb.StreamRequest], out: "asyncio.Queue[pb.StreamResponse]"
    ) -> None:
        async with asyncio.TaskGroup() as answers:
            async for request in requests:
                if request.WhichOneof("message") == "submit":
                    self.asked_s.append(time.monotonic())
                    answers.create_task(self._answer(request.submit, out))

    async def _answer(self, submit: pb.Submit, out: "asyncio.Queue[pb.StreamResponse]") -> None:
        request_id, num_prompt = submit.request_id, estimated_num_tokens(TextPrompt(submit.text))
        if num_prompt >= self.context:
            code = pb.REJECT_CODE_CONTEXT_LENGTH
            rejected = pb.Rejected(request_id=request_id, code=code, message="too long")
            out.put_nowait(pb.StreamResponse(rejected=[rejected]))
            return
        accepted = pb.Accepted(
            request_id=request_id, num_prompt_tokens=num_prompt, max_tokens=NUM_TOKENS
        )
        out.put_nowait(pb.StreamResponse(accepted=[accepted]))
        self.newcomers.came(num_prompt)
        async with self.turn:
            await asyncio.sleep(num_prompt / TPS / self.speed)
        self.newcomers.served(num_prompt)
        for index in range(NUM_TOKENS):
            output = pb.RequestOutput(
                request_id=request_id,
                first_token_index=index,
                tokens=[pb.Token(id=index, text="x")],
                ending=STOP if index == NUM_TOKENS - 1 else None,
            )
            out.put_nowait(pb.StreamResponse(outputs=[output]))
            await asyncio.sleep(TOKEN_S)

    async def tell(self) -> None:
        """Tell the load four times a second, until cancelled."""
        told = None
        while True:
            load = pb.Load(
                num_newcomers=self.newcomers.num_reqs,
                num_newcomer_tokens=self.newcomers.num_tokens,
                prefill_tps=self.newcomers.prefill_tps,
            )
            for out in self.outs if load != told else ():
                out.put_nowait(pb.StreamResponse(load=load))
            told = load
            await asyncio.sleep(0.25)

    async def serve(self, is_over: Callable[[], bool]) -> None:
        """Serve until all is over, or the address is gone and no request has come for long."""
        server = aio.server(options=[("grpc.so_reuseport", 0)])
        pb_grpc.add_ExecutorServiceServicer_to_server(self, server)
        server.add_insecure_port(f"{self.host}:{self.port}")
        await server.start()
        telling = asyncio.create_task(self.tell())
        try:
            while not is_over() and (self.gone_s is None or self._idle_s() < STAYS_S):  # noqa: ASYNC110
                await asyncio.sleep(0.5)
        finally:
            telling.cancel()
            await server.stop(grace=None)

    def _idle_s(self) -> float:
        return time.monotonic() - max([self.gone_s or 0.0, *self.asked_s[-1:]])


@dataclass
class Site:
    """All executors that there are and were, and what became of requests."""

    port: int = field(default_factory=free_port)
    executors: list[Executor] = field(default_factory=list)
    first_tokens_s: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    is_over: bool = False

    async def resolve(self, host: str, port: int) -> Collection[str]:
        """Stand in for the system's resolver."""
        return [f"{one.host}:{port}" for one in self.executors if one.gone_s is None]

    def add(self, speed: int, context: int) -> Executor:
        host = f"127.0.1.{len(self.executors) + 1}"
        self.executors.append(Executor(host, self.port, speed, context, time.monotonic()))
        return self.executors[-1]

    async def ask(self, client: httpx.AsyncClient, num_tokens: int) -> None:
        body = {"model": MODEL, "prompt": "abc " * num_tokens, "stream": True}
        asked_s, text = time.monotonic(), ""
        try:
            async with client.stream("POST", "/v1/completions", json=body) as answer:
                async for part in answer.aiter_text():
                    if not text and '"x"' in part:
                        self.first_tokens_s.append(time.monotonic() - asked_s)
                    text += part
        except httpx.HTTPError as error:
            text = repr(error)
        if text.count('"x"') != NUM_TOKENS or "[DONE]" not in text:
            self.failures.append(text[-300:])


def measure(minutes: float = MINUTES) -> list[Row]:
    return asyncio.run(_measure(minutes))


async def _measure(minutes: float) -> list[Row]:
    site, rng = Site(), random.Random(7)
    begun_s = time.monotonic()
    with patch("services.gateway.executors.discovery.resolve", site.resolve):
        async with AsyncExitStack() as stack, asyncio.TaskGroup() as tasks:
            for speed, context in ((1, 4_096), (1, 4_096), (2, 32_768)):
                tasks.create_task(site.add(speed, context).serve(lambda: site.is_over))
            clients = [await _gateway(stack, site, name) for name in ("a", "b")]
            changing = tasks.create_task(_change(site, tasks))
            asking = [
                tasks.create_task(site.ask(clients[number % 2], num_tokens))
                async for number, num_tokens in _arrivals(rng, begun_s + 60 * minutes)
            ]
            await asyncio.wait(asking)
            changing.cancel()
            row = _row(site, minutes)
            site.is_over = True
    return [row]


async def _gateway(stack: AsyncExitStack, site: Site, name: str) -> httpx.AsyncClient:
    """Run a gateway; return a client of it, once it is ready."""
    settings = GatewaySettings.model_validate(
        {
            "http_port": 0,
            "grpc_port": 0,
            "executors": f"dns:{NAME}:{site.port}",
            "tracker": "",
            "id": f"gateway-{name}",
            "drain_timeout_s": 0.0,
        }
    )
    gateway = await stack.enter_async_context(run_gateway(settings))
    client = httpx.AsyncClient(base_url=f"http://127.0.0.1:{gateway.http_port}", timeout=300.0)
    await stack.enter_async_context(client)
    while not gateway.dispatcher.is_ready:  # noqa: ASYNC110
        await asyncio.sleep(0.05)
    return client


async def _change(site: Site, tasks: asyncio.TaskGroup) -> None:
    """Add an executor each minute, and take the oldest slow one away half a minute later."""
    while True:
        await asyncio.sleep(30)
        tasks.create_task(site.add(1, 4_096).serve(lambda: site.is_over))
        await asyncio.sleep(30)
        there = (one for one in site.executors if one.gone_s is None and one.speed == 1)
        next(there).gone_s = time.monotonic()


async def _arrivals(rng: random.Random, end_s: float) -> AsyncIterator[tuple[int, int]]:
    """Yield a number and a prompt's tokens at each arrival."""
    for number in count():
        await asyncio.sleep(rng.expovariate(RATE))
        if time.monotonic() > end_s:
            return
        is_long = rng.random() < LONG_SHARE
        short = min(4_000, max(50, int(rng.lognormvariate(6.2, 1.0))))
        yield number, rng.randint(5_000, 20_000) if is_long else short


def _row(site: Site, minutes: float) -> Row:
    added = site.executors[3:]
    gone = [one for one in site.executors if one.asked_s and one.gone_s is not None]
    waits_s = sorted(site.first_tokens_s)
    return {
        "minutes": minutes,
        "num_requests": len(site.first_tokens_s),
        "num_failed": len(site.failures),
        "failures": site.failures[:5],
        "num_added": len(added),
        "num_gone": len(gone),
        "until_first_request_s": [
            round(one.asked_s[0] - one.added_s, 2) for one in added if one.asked_s
        ],
        "until_last_request_s": [
            round(max(0.0, one.asked_s[-1] - (one.gone_s or 0.0)), 2) for one in gone
        ],
        "first_token_s": {"p50": waits_s[len(waits_s) // 2], "p95": waits_s[-len(waits_s) // 20]},
        "requests_by_speed": {
            speed: sum(len(one.asked_s) for one in site.executors if one.speed == speed)
            for speed in (1, 2)
        },
    }


def table(rows: Sequence[Row]) -> list[list[str]]:
    header = ["minutes", "requests", "failed", "added", "first request after s, longest"]
    header += ["gone", "last request after s, longest", "first token s p50", "p95"]
    return [
        header,
        *(
            [
                f"{row['minutes']:g}",
                f"{row['num_requests']:,}",
                str(row["num_failed"]),
                str(row["num_added"]),
                f"{max(row['until_first_request_s'], default=0.0):.1f}",
                str(row["num_gone"]),
                f"{max(row['until_last_request_s'], default=0.0):.1f}",
                f"{row['first_token_s']['p50']:.2f}",
                f"{row['first_token_s']['p95']:.2f}",
            ]
            for row in rows
        ),
    ]


def verdicts(rows: Sequence[Row]) -> list[str]:
    (row,) = rows
    slowest_s = max([*row["until_first_request_s"], *row["until_last_request_s"]], default=0.0)
    is_met = row["num_failed"] == 0 and slowest_s <= BAR_S
    return [f"no request fails, changes take {BAR_S:g} s: {'met' if is_met else 'MISSED'}"]


BENCHMARK = Benchmark(
    name="routing",
    title="Executors that come and go",
    definitions={
        "first request after s": "from when an executor's address is one of the name's",
        "last request after s": "to an executor whose address is none of the name's any more",
        "first token s": "from the client's request",
    },
    measure=measure,
    table=table,
    verdicts=verdicts,
)
