"""Clients whose connections break and that come back: what they get in all, and what it takes to
keep it for them.

One gateway as a process; an executor without an engine, whose k-th token is a function of prompt
and k, and which rests while it is told to.
"""

import asyncio
import random
import re
import zlib
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import psutil
from grpc import aio

from bench.document import Benchmark, Row
from bench.gateway.processes import running, wait_until
from bench.gateway.streams import gateway_settings, is_ready
from bench.gateway.synthetic_executor import LENGTH, MODEL, EnginelessExecutor
from evenflow.executor.v1 import executor_pb2 as pb
from evenflow.executor.v1 import executor_pb2_grpc as pb_grpc
from evenflow.gateway.v1 import gateway_pb2 as public_pb
from evenflow.gateway.v1 import gateway_pb2_grpc as public_grpc
from evenflow.gateway.v1 import generation_pb2 as gen
from lab.stack.ports import free_port
from services.kit.rpc import Context

SEED = 20_261_128
NUM_ANSWERS = 1_000
NUM_CUTS = 20  # of each
NUM_TOKENS = 64  # of each
NUM_SIDE_BY_SIDE = 16
RATE_TPS = 400.0
NUM_LEFT = 1_024  # streams that are not read
NUM_READ = 2  # events of each that were read
NUM_TOKENS_LEFT = 600  # of each, generated at once
RATE_LEFT_TPS = 1.0  # so slow that none is over before all have been left
BURST = 64  # tokens between two looks at whether to rest
WINDOW_S = 3_600.0
BAR_BYTES = 256 << 20
TIMEOUT_S = 600.0
GRPC = "gRPC"
DETACHED, KEPT = "evenflow_gateway_detached_streams", "evenflow_gateway_kept_stream_bytes"


def token_at(said: str, k: int) -> pb.Token:
    drawn = zlib.crc32(f"{said}|{k}".encode())
    return pb.Token(id=drawn % 50_000, text=f" w{drawn % 1_000}" if drawn % 7 else "")


class RestingExecutor(EnginelessExecutor):
    """Says all of an answer at once, in bursts between which it may be told to rest."""

    def __init__(self) -> None:
        super().__init__()
        self._frames: asyncio.Queue[pb.StreamResponse] = asyncio.Queue()
        self._goes_on: defaultdict[str, asyncio.Event] = defaultdict(_set_event)
        self._saying: dict[str, asyncio.Task[None]] = {}

    async def Stream(  # noqa: N802
        self, requests: AsyncIterator[pb.StreamRequest], context: Context
    ) -> AsyncIterator[pb.StreamResponse]:
        reading = asyncio.create_task(self._read(requests))
        sequence = 0
        while True:
            frame = await self._frames.get()
            frame.sequence, sequence = sequence, sequence + 1
            yield frame
            assert not reading.done() or reading.result() is None

    async def _read(self, requests: AsyncIterator[pb.StreamRequest]) -> None:
        async for request in requests:
            match request.WhichOneof("message"):
                case "submit":
                    submit = request.submit
                    self._saying[submit.request_id] = asyncio.create_task(self._say(submit))
                case "abort":
                    if (saying := self._saying.pop(request.abort.request_id, None)) is not None:
                        saying.cancel()
                case "hold":
                    for one in request.hold.requests:
                        goes_on = self._goes_on[one.request_id]
                        (goes_on.clear if one.held else goes_on.set)()

    async def _say(self, submit: pb.Submit) -> None:
        request_id = submit.request_id
        said = submit.text or submit.chat.messages[-1].content
        accepted = pb.Accepted(request_id=request_id, num_prompt_tokens=7)
        self._frames.put_nowait(pb.StreamResponse(accepted=[accepted]))
        most = submit.sampling.max_tokens
        for first in range(0, most, BURST):
            await self._goes_on[request_id].wait()
            tokens = [token_at(said, k) for k in range(first, min(first + BURST, most))]
            output = pb.RequestOutput(request_id=request_id, first_token_index=first, tokens=tokens)
            self._frames.put_nowait(pb.StreamResponse(outputs=[output]))
            await asyncio.sleep(0.001)
        ending = pb.RequestOutput(request_id=request_id, first_token_index=most, ending=LENGTH)
        self._frames.put_nowait(pb.StreamResponse(outputs=[ending]))
        del self._saying[request_id], self._goes_on[request_id]


def _set_event() -> asyncio.Event:
    event = asyncio.Event()
    event.set()
    return event


@dataclass(frozen=True, slots=True, kw_only=True)
class Front:
    """A gateway, and ways to reach it."""

    process: psutil.Process
    http: httpx.AsyncClient
    grpc: Any  # stub


@asynccontextmanager
async def front() -> AsyncIterator[Front]:
    server, port, grpc_port, executor_port = aio.server(), free_port(), free_port(), free_port()
    pb_grpc.add_ExecutorServiceServicer_to_server(RestingExecutor(), server)
    server.add_insecure_port(f"127.0.0.1:{executor_port}")
    await server.start()
    settings = gateway_settings(port, [executor_port], 2 * NUM_LEFT)
    settings |= {
        "EVENFLOW_GATEWAY_GRPC_PORT": grpc_port,
        "EVENFLOW_GATEWAY_RESUME_WINDOW_S": WINDOW_S,
        "EVENFLOW_GATEWAY_SSE_KEEPALIVE_S": 0,
    }
    with running("services.gateway", settings=settings) as process:
        await asyncio.to_thread(wait_until, lambda: is_ready(port), "the gateway")
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=NUM_SIDE_BY_SIDE)
        address = f"http://127.0.0.1:{port}"
        async with (
            httpx.AsyncClient(base_url=address, timeout=TIMEOUT_S, limits=limits) as http,
            aio.insecure_channel(f"127.0.0.1:{grpc_port}") as channel,
        ):
            stub = public_grpc.GatewayServiceStub(channel)
            yield Front(process=psutil.Process(process.pid), http=http, grpc=stub)
    await server.stop(None)


def body_of(path: str, said: str, num_tokens: int, **pace: object) -> dict[str, object]:
    body: dict[str, object] = {
        "model": MODEL,
        "stream": True,
        "evenflow": {"resumable": True, **pace},
    }
    turns = [{"role": "user", "content": said}]
    match path:
        case "/v1/responses":
            return body | {"input": said, "max_output_tokens": num_tokens}
        case "/v1/completions":
            return body | {"prompt": said, "max_tokens": num_tokens}
    return body | {"messages": turns, "max_tokens": num_tokens}


# -- what clients get ----------------------------------------------------------------------------


@dataclass(slots=True)
class Got:
    """The events that a client has, as an `EventSource` takes them."""

    events: list[bytes] = field(default_factory=list)
    num_cuts: int = 0

    async def read(self, answer: httpx.Response, most: int) -> bool:
        """Take events until there are `most`; what comes then is lost. Returns whether there are
        no more.
        """
        if answer.status_code == httpx.codes.NO_CONTENT:
            return True
        if answer.status_code != httpx.codes.OK:
            raise ValueError((await answer.aread()).decode())
        unread = b""
        async for piece in answer.aiter_bytes():
            *events, unread = (unread + piece).split(b"\n\n")
            for event in events:
                self.events.append(event)
                if len(self.events) == most:
                    self.num_cuts += 1
                    return False
        return True

    def said(self) -> bytes:
        return re.sub(rb'("created\w*"):\d+', rb"\1:0", b"\n\n".join(self.events))


async def over_http(site: Front, path: str, name: str, cuts: Sequence[int]) -> tuple[bool, int]:
    """Ask for an answer twice, the second time with breaks after so many events. Returns whether
    both are the same, and how often it broke.
    """
    headers = {"x-request-id": name}
    uncut, got = Got(), Got()
    async with site.http.stream(
        "POST", path, json=body_of(path, name, NUM_TOKENS), headers=headers
    ) as answer:
        await uncut.read(answer, 0)
    pace = {"consumption_rate_tps": RATE_TPS, "pace_tail": True}
    call = site.http.build_request(
        "POST", path, json=body_of(path, name, NUM_TOKENS, **pace), headers=headers
    )
    for most in [*cuts, 0]:
        answer = await site.http.send(call, stream=True)
        try:
            await got.read(answer, most)
        finally:
            await answer.aclose()
        last = got.events[-1].split(b"\n")[0].removeprefix(b"id: ").decode()
        call = site.http.build_request("GET", f"/v1/streams/{name}")
        call.headers["last-event-id"] = last
    return got.said() == uncut.said(), got.num_cuts


async def over_grpc(site: Front, name: str, cuts: Sequence[int]) -> tuple[bool, int]:
    """As `over_http`, with breaks after so many tokens."""

    def asked(level: gen.ServiceLevel | None) -> public_pb.GenerateRequest:
        sampling = gen.SamplingParams(max_tokens=NUM_TOKENS)
        return public_pb.GenerateRequest(
            model=MODEL, text=name, sampling=sampling, service_level=level, resumable=True
        )

    metadata = [("x-request-id", name)]
    uncut, got, num_cuts = public_pb.AttachResponse(), public_pb.AttachResponse(), 0
    async for part in site.grpc.Generate(asked(None), metadata=metadata):
        uncut.MergeFromString(part.SerializeToString())
    level = gen.ServiceLevel(consumption_rate_tps=RATE_TPS, pace_tail=True)
    call = site.grpc.Generate(asked(level), metadata=metadata)
    for most in [*cuts, NUM_TOKENS + 1]:
        async for part in call:
            room = most - len(got.tokens)
            if room <= 0:
                call.cancel()
                num_cuts += 1
                break
            del part.tokens[room:]  # of what came in one message some was lost
            got.MergeFromString(part.SerializeToString())
        attach = public_pb.AttachRequest(request_id=name, num_tokens=len(got.tokens))
        if not got.HasField("finish"):
            call = site.grpc.Attach(attach)
    return got.SerializeToString() == uncut.SerializeToString(), num_cuts


PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", GRPC)


async def _cut(site: Front, path: str, number: int) -> Row:
    draws = random.Random(f"{SEED} {path}")
    places = asyncio.Semaphore(NUM_SIDE_BY_SIDE)

    async def one(k: int, cuts: Sequence[int]) -> tuple[bool, int]:
        name = f"back-{k}"
        async with places:
            if path == GRPC:
                return await over_grpc(site, name, cuts)
            return await over_http(site, path, name, cuts)

    drawn = [sorted(draws.sample(range(1, NUM_TOKENS // 2 + 15), NUM_CUTS)) for _ in range(number)]
    done = await asyncio.gather(*(one(k, cuts) for k, cuts in enumerate(drawn)))
    return {
        "form": path.removeprefix("/v1/"),
        "answers": number,
        "identical": sum(is_same for is_same, _ in done),
        "cuts": sum(num_cuts for _, num_cuts in done),
    }


# -- what is kept for them -----------------------------------------------------------------------


async def _leave_all(site: Front) -> Row:
    """Begin streams and leave them; return what the gateway's process takes for them."""
    before = site.process.memory_info().rss
    pace = {"consumption_rate_tps": RATE_LEFT_TPS, "pace_tail": True}
    places = asyncio.Semaphore(NUM_SIDE_BY_SIDE)

    async def begin(k: int) -> None:
        path, headers = PATHS[0], {"x-request-id": f"left-{k}"}
        body = body_of(path, f"left-{k}", NUM_TOKENS_LEFT, **pace)
        async with places, site.http.stream("POST", path, json=body, headers=headers) as answer:
            assert not await Got().read(answer, NUM_READ)

    await asyncio.gather(*map(begin, range(NUM_LEFT)))
    kept = -1.0
    while (told := await _told(site))[DETACHED] < NUM_LEFT or told[KEPT] != kept:
        kept = told[KEPT]
        await asyncio.sleep(3.0)  # the gateway looks once a second
    return {
        "form": "detached",
        "streams": NUM_LEFT,
        "bytes": site.process.memory_info().rss - before,
        "estimated_bytes": told[KEPT],
    }


async def _told(site: Front) -> dict[str, float]:
    text = (await site.http.get("/metrics")).text
    found = re.findall(rf"^({DETACHED}|{KEPT}) (\S+)$", text, re.MULTILINE)
    return {name: float(value) for name, value in found}


def measure() -> list[Row]:
    async def measured() -> list[Row]:
        async with front() as site:
            rows = [await _cut(site, path, NUM_ANSWERS // len(PATHS)) for path in PATHS]
        async with front() as site:
            return [*rows, await _leave_all(site)]

    return asyncio.run(measured())


def table(rows: Sequence[Row]) -> list[list[str]]:
    lines = [["what", "answers", "connections cut", "identical", "MiB"]]
    for row in rows:
        if row["form"] == "detached":
            mib = f"{row['bytes'] / 2**20:.0f}"
            lines.append(["streams that nobody reads", str(row["streams"]), "", "", mib])
        else:
            counts = (row["answers"], row["cuts"], row["identical"])
            lines.append([row["form"], *map(str, counts), ""])
    return lines


def verdicts(rows: Sequence[Row]) -> list[str]:
    """Say whether all answers are what they would have been, and what is kept has room."""
    *cut, left = rows
    identical, asked = (sum(row[name] for row in cut) for name in ("identical", "answers"))
    least = min(row["cuts"] / row["answers"] for row in cut)
    return [
        f"identical: {identical} of {asked}, cut {least:.0f} times each at least (bar: all, 20)",
        f"{left['streams']} streams that nobody reads: {left['bytes'] / 2**20:.0f} MiB, by the "
        f"gateway's estimate {left['estimated_bytes'] / 2**20:.0f} (bar: {BAR_BYTES >> 20})",
    ]


BENCHMARK = Benchmark(
    name="back",
    title=f"Clients who come back: {NUM_ANSWERS:,} answers, each cut {NUM_CUTS} times at random",
    definitions={
        "identical": "answers of which all events in all, with their ids, are byte for byte those "
        "of a stream that was read in one piece, but for the time of creation; over gRPC messages, "
        "joined",
        "connections cut": "after a number of events, over gRPC of tokens, drawn from seed "
        f"{SEED}; what comes after it is thrown away. Each time the client goes on at "
        "once, with the last id",
        "MiB": f"of the gateway's resident memory, for all streams together: each has "
        f"{NUM_TOKENS_LEFT} tokens, of which its reader had the first",
    },
    measure=measure,
    table=table,
    verdicts=verdicts,
)
