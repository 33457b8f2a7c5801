"""What readers feel of streams that move in beside them, on an emulated device.

One executor has streams of 2,000 tokens, another one has readers. The first one is killed: all that
its streams have, prompt and output, is computed at the second one, beside its readers.
"""

import asyncio
import math
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from grpc import aio

from bench.document import Benchmark, Row
from bench.e2e.stack import planner
from bench.e2e.systems import SYSTEMS, Device
from bench.failover.asked import MARK, RATE_TPS, TIMEOUT_S, longest_gap_s
from bench.failover.site import Site
from bench.gateway.heavy_requests import Edge
from evenflow.gateway.v1 import gateway_pb2 as pb
from evenflow.gateway.v1 import gateway_pb2_grpc as pb_grpc
from evenflow.gateway.v1 import generation_pb2 as gen
from services.pacing.reading import REBUFFERING, Reading

POLICIES = ("evenflow", "vllm")
NUM_EACH = 11  # streams that move in, and readers beside which they do
MOVING_TOKENS, MOVING_ANSWER = 1_980, 600  # of a prompt, and of an answer at most
READER_TOKENS, READER_ANSWER = 100, 300
MIN_MOVING = 20  # tokens of each answer when its executor is killed
FAULT_AFTER_S = 1.5  # from the last reader's first token
SOON_S = 10.0  # after the kill
FIRST_ID, LAST_ID = 300, 2_000  # of the tokens that prompts are made of
MAX_REBUFFERING_FRAC = 0.02
# A prompt's token takes as long as 1/100 of a step of one reader: 5,000 tokens a second.
DEVICE = Device(per_token_s=2.5e-5, pool_tokens=65_536, max_num_seqs=2 * NUM_EACH)
SETTINGS = {"MAX_MODEL_LEN": 4_096, "MAX_NUM_BATCHED_TOKENS": 2_048}


@dataclass(slots=True, kw_only=True)
class Reader:
    """One stream, read at a pace."""

    name: str
    num_prompt_tokens: int
    max_tokens: int
    arrived_s: list[float] = field(default_factory=list)  # of each token
    moves: int = 0
    error: str = ""

    async def read(self, edge: Edge) -> None:
        rng = random.Random(self.name)
        ids = [rng.randrange(FIRST_ID, LAST_ID) for _ in range(self.num_prompt_tokens)]
        sampling = gen.SamplingParams(max_tokens=self.max_tokens, temperature=0, ignore_eos=True)
        request = pb.GenerateRequest(
            model=edge.model, token_ids=gen.TokenIds(ids=ids), sampling=sampling
        )
        request.service_level.consumption_rate_tps = RATE_TPS
        request.service_level.pace_tail = True
        try:
            async with aio.insecure_channel(edge.grpc_address) as channel:
                call = pb_grpc.GatewayServiceStub(channel).Generate(
                    request,
                    metadata=[("x-request-id", f"{MARK}-{self.name}")],
                    timeout=TIMEOUT_S,
                )
                async for part in call:
                    self.arrived_s += [time.monotonic()] * len(part.tokens)
                    if part.HasField("finish"):
                        self.moves = part.finish.moves
        except aio.AioRpcError as error:
            self.error = f"{error.code()}: {error.details()}"

    @property
    def reading(self) -> Reading:
        reading = Reading(interval_s=1 / RATE_TPS)
        for at_s in self.arrived_s:
            reading.took(at_s)
        return reading

    def waited_s(self, since_s: float, until_s: float) -> float:
        """Return how long it waited for the tokens that came between two instants."""
        reading = Reading(interval_s=1 / RATE_TPS)
        waits_s = [(at_s, reading.took(at_s)) for at_s in self.arrived_s]
        return sum(wait_s for at_s, wait_s in waits_s if since_s < at_s <= until_s)


def measure() -> list[Row]:
    with tempfile.TemporaryDirectory() as folder, planner(Path(folder) / "planner.log") as address:
        return [_of_policy(name, Path(folder), address) for name in POLICIES]


def _of_policy(policy: str, folder: Path, planner_address: str) -> Row:
    own = folder / policy
    own.mkdir()
    settings = DEVICE.settings() | SETTINGS | {"PLANNER_ADDRESS": planner_address}
    site = Site(own, layer_time=DEVICE.layer_time, **settings | dict(SYSTEMS[policy]))
    moving = _readers("moving", MOVING_TOKENS, MOVING_ANSWER)
    readers = _readers("reader", READER_TOKENS, READER_ANSWER)
    with site.running(num_linked=1):
        killed_s = asyncio.run(_storm(site, moving, readers))
        moved = site.told("request_moved")
    waited_s = sum(reader.reading.waited_s for reader in readers)
    reading_s = sum(reader.reading.reading_s for reader in readers)
    return {
        "policy": policy,
        "errors": [one.error for one in (*moving, *readers) if one.error],
        "moved": sum(one.moves > 0 for one in moving),
        "moved_tokens": [MOVING_TOKENS + line["num_tokens"] for line in moved],
        "readers_moved": sum(one.moves > 0 for one in readers),
        "waited_s": waited_s,
        "reading_s": reading_s,
        "rebuffering_frac": waited_s / reading_s if reading_s else math.nan,
        "waited_before_s": sum(one.waited_s(0, killed_s) for one in readers),
        "waited_soon_s": sum(one.waited_s(killed_s, killed_s + SOON_S) for one in readers),
        "each_waited_s": [reader.reading.waited_s for reader in readers],
        "longest_gap_s": max(longest_gap_s(reader.arrived_s) for reader in readers),
        "moving_waited_s": [one.reading.waited_s for one in moving],
    }


def _readers(
    kind: str, num_prompt_tokens: int, max_tokens: int, *, number: int = NUM_EACH
) -> list[Reader]:
    return [
        Reader(name=f"{kind}-{index}", num_prompt_tokens=num_prompt_tokens, max_tokens=max_tokens)
        for index in range(number)
    ]


async def _storm(site: Site, moving: Sequence[Reader], readers: Sequence[Reader]) -> float:
    """Have the first executor take `moving` and the second one `readers`, and kill the first.
    Returns when.
    """
    place = site.place_in_log
    (warm_up,) = _readers("warm-up", MOVING_TOKENS, MIN_MOVING, number=1)
    with ExitStack() as links:
        async with asyncio.TaskGroup() as tasks:
            for one in moving:
                tasks.create_task(one.read(site.edge))
            await _until(lambda: all(one.arrived_s for one in moving))
            links.enter_context(site.links[1])
            await asyncio.to_thread(site.wait_connected, 1, since=place)
            await warm_up.read(site.edge)  # the second one knows what prompts take
            for one in readers:
                tasks.create_task(one.read(site.edge))
            await _until(lambda: all(one.arrived_s for one in readers))
            await _until(lambda: all(len(one.arrived_s) >= MIN_MOVING for one in moving))
            await asyncio.sleep(FAULT_AFTER_S)
            killed_s = time.monotonic()
            await asyncio.to_thread(site.executors[0].kill)
    return killed_s


async def _until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def table(rows: Sequence[Row]) -> list[list[str]]:
    return [
        [
            "policy",
            "moved",
            "tokens of each",
            "rebuffering",
            "before, s",
            "soon after, s",
            "longest gap, s",
            "errors",
        ],
        *(
            [
                row["policy"],
                str(row["moved"]),
                f"{min(row['moved_tokens'])} to {max(row['moved_tokens'])}"
                if row["moved_tokens"]
                else "",
                f"{row['rebuffering_frac']:.1%}",
                f"{row['waited_before_s']:.1f}",
                f"{row['waited_soon_s']:.1f}",
                f"{row['longest_gap_s']:.1f}",
                str(len(row["errors"])),
            ]
            for row in rows
        ),
    ]


def verdicts(rows: Sequence[Row]) -> list[str]:
    """Say whether readers under `evenflow` hardly felt it, and what those under `vllm` felt."""
    by_policy = {row["policy"]: row["rebuffering_frac"] for row in rows}
    return [
        f"rebuffering of the readers: {by_policy['evenflow']:.1%} "
        f"(bar: {MAX_REBUFFERING_FRAC:.0%}), vllm {by_policy['vllm']:.1%}",
        f"moved: {' and '.join(str(row['moved']) for row in rows)} (bar: {NUM_EACH} each)",
    ]


BENCHMARK = Benchmark(
    name="survivors",
    title=f"{NUM_EACH} streams move in beside {NUM_EACH} readers of {RATE_TPS:.0f} tokens/s, "
    "emulated device",
    definitions={
        "tokens of each": "that were computed anew: prompt, and answer so far",
        "rebuffering": f"of the {NUM_EACH} readers that were there before: {REBUFFERING}; tokens "
        "as they came over gRPC",
        "before, soon after": "what all of them waited before the executor was killed, and within "
        f"{SOON_S:.0f} s of it",
        "longest gap": "between two tokens of one of them",
        "device": f"{DEVICE.layer_time}, {DEVICE.pool_tokens} tokens of KV, {SETTINGS}",
    },
    measure=measure,
    table=table,
    verdicts=verdicts,
)
