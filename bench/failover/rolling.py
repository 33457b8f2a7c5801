"""Everything is started again, one process after the other, while readers read and others come.

Two executors with layer-wise KV, two gateways, planner, tracker and Redis. Clients do what a load
balancer does: they ask gateways that are ready, and another one if a gateway refuses.
"""

import asyncio
import itertools
import json
import signal
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from bench.document import Benchmark, Row
from bench.failover.asked import NUM_TOKENS, RATE_TPS, Asked, Got, ask, ask_all, load
from bench.failover.site import time_of
from bench.gateway.heavy_requests import Edge
from lab.stack.processes import MODEL, Stack, kind_of, wait_until

GATEWAYS = ("gateway", "gateway-2")
EXECUTORS = ("executor", "executor-2")
ORDER = (*EXECUTORS, *GATEWAYS, "planner", "tracker", "redis")
LAME_DUCK_S = 2.0
LOOK_INTERVAL_S, LOOK_TIMEOUT_S = 0.25, 2.0  # for which gateways are ready
NUM_SHORT_TOKENS = 24  # of an answer to one that comes
ARRIVAL_INTERVAL_S = 1.0
PAUSE_S = 3.0  # after a process is back
PATIENCE_S = 60.0  # of a client that no gateway takes


@dataclass(slots=True, kw_only=True)
class Answer:
    """What became of one request."""

    asked: Asked
    expected: Got
    began_s: float
    ended_s: float = 0.0
    got: Got = field(default_factory=Got)
    refusals: list[str] = field(default_factory=list)  # before a gateway took it
    num_times_by_all: int = 0  # that gateways refused it one after the other

    @property
    def is_identical(self) -> bool:
        return not self.got.error and self.got.said == self.expected.said

    def overlaps(self, began_s: float, ended_s: float) -> bool:
        return self.began_s <= ended_s and began_s <= self.ended_s


class Doors:
    """The gateways, as a load balancer has them."""

    def __init__(self, edges: Sequence[Edge]) -> None:
        self._edges = edges
        self._ready = list(edges)
        self._turns = itertools.count()

    async def look(self) -> None:
        """Look which gateways are ready, until cancelled."""
        async with httpx.AsyncClient(timeout=LOOK_TIMEOUT_S) as client:
            while True:
                ready = [edge for edge in self._edges if await _is_ready(client, edge)]
                self._ready = ready or list(self._edges)
                await asyncio.sleep(LOOK_INTERVAL_S)

    async def ask(self, asked: Asked, expected: Got) -> Answer:
        answer = Answer(asked=asked, expected=expected, began_s=time.time())
        while not answer.ended_s:
            for edge in self._in_turn():
                answer.got = await ask(edge, asked)
                if answer.got.is_taken:
                    break
                answer.refusals.append(f"{edge.url}: {answer.got.error}")
            else:
                answer.num_times_by_all += 1
                await asyncio.sleep(LOOK_INTERVAL_S)
            if answer.got.is_taken or time.time() - answer.began_s > PATIENCE_S:
                answer.ended_s = time.time()
        return answer

    def _in_turn(self) -> list[Edge]:
        """Return those that are ready, by turns, and then the others."""
        turn = next(self._turns) % len(self._ready)
        others = [edge for edge in self._edges if edge not in self._ready]
        return [*self._ready[turn:], *self._ready[:turn], *others]


async def _is_ready(client: httpx.AsyncClient, edge: Edge) -> bool:
    with suppress(httpx.TransportError):
        return (await client.get(f"{edge.url}/ready")).is_success
    return False


class Readers:
    """A load whose requests are asked for again and again, and short ones beside it."""

    def __init__(self, doors: Doors, expected: Mapping[str, Got], short: Mapping[str, Got]) -> None:
        self._doors = doors
        self._load = [(one, expected[one.name]) for one in load(MODEL)]
        self._short = [(one, short[one.name]) for one in load(MODEL, num_tokens=NUM_SHORT_TOKENS)]
        self._is_over = asyncio.Event()
        self.answers: list[Answer] = []

    def stop(self) -> None:
        """Ask for nothing more; what was asked for is read to its end."""
        self._is_over.set()

    async def run(self) -> None:
        looking = asyncio.create_task(self._doors.look())
        async with asyncio.TaskGroup() as tasks:
            for asked, expected in self._load:
                tasks.create_task(self._on_and_on(asked, expected))
            for asked, expected in itertools.cycle(self._short):
                tasks.create_task(self._once(asked, expected))
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._is_over.wait(), ARRIVAL_INTERVAL_S)
                if self._is_over.is_set():
                    break
        looking.cancel()

    async def _on_and_on(self, asked: Asked, expected: Got) -> None:
        while not self._is_over.is_set():
            await self._once(asked, expected)

    async def _once(self, asked: Asked, expected: Got) -> None:
        self.answers.append(await self._doors.ask(asked, expected))


def measure() -> list[Row]:
    with tempfile.TemporaryDirectory() as folder:
        stack = Stack(
            Path(folder),
            further=(GATEWAYS[1], EXECUTORS[1]),
            GATEWAY_LAME_DUCK_S=LAME_DUCK_S,
        )
        try:
            stack.start_all()
            wait_until(lambda: _num_connected(stack) == _CONNECTIONS, "all are connected")
            return asyncio.run(_measured(stack))
        finally:
            stack.stop()


_CONNECTIONS = [len(EXECUTORS)] * len(GATEWAYS)


async def _measured(stack: Stack) -> list[Row]:
    edges = [Edge(stack.url(name), stack.address(name), MODEL) for name in GATEWAYS]
    expected, short = [
        await undisturbed(edges[0], num_tokens) for num_tokens in (NUM_TOKENS, NUM_SHORT_TOKENS)
    ]
    readers = Readers(Doors(edges), expected, short)
    reading = asyncio.create_task(readers.run())
    spans = []
    for name in ORDER:
        await asyncio.sleep(PAUSE_S)
        began_s = time.time()
        await asyncio.to_thread(restart, stack, name)
        spans.append((name, began_s, time.time()))
    await asyncio.sleep(PAUSE_S)
    readers.stop()
    await reading
    rows = [_row(stack, readers.answers, *span) for span in spans]
    return [*rows, _row(stack, readers.answers, "all", spans[0][1], time.time())]


async def undisturbed(edge: Edge, num_tokens: int) -> dict[str, Got]:
    requests = load(MODEL, num_tokens=num_tokens)
    await ask_all(edge, requests)  # forms are compiled
    answers = await ask_all(edge, requests)
    assert not any(got.error for got in answers.values()), answers
    return answers


def restart(stack: Stack, name: str) -> None:
    """Ask a process to end, start it again, and wait until all others have it back."""
    before = _num_connected(stack)
    if name == "redis":
        stack.redis.stop()
        stack.redis.start()
        return
    stack.kill(name, signal.SIGTERM)
    stack.start(name)
    if kind_of(name) == "executor":
        wanted = [num + 1 for num in before]
        wait_until(lambda: _num_connected(stack) == wanted, "the executor is connected")


def _num_connected(stack: Stack) -> list[int]:
    return [len(told(stack, name, "executor_connected")) for name in GATEWAYS]


def told(stack: Stack, name: str, event: str) -> list[Row]:
    """Return what a process' log says of an event."""
    lines = [json.loads(line) for line in stack.log(name).splitlines() if line.startswith("{")]
    return [line for line in lines if line.get("event") == event]


def _row(stack: Stack, answers: Sequence[Answer], name: str, began_s: float, ended_s: float) -> Row:
    meant = [one for one in answers if one.overlaps(began_s, ended_s)]
    moved = [line for gateway in GATEWAYS for line in told(stack, gateway, "request_moved")]
    return {
        "restarted": name,
        "took_s": ended_s - began_s,
        "answers": len(meant),
        "arrived": sum(began_s <= one.began_s <= ended_s for one in meant),
        "identical": sum(one.is_identical for one in meant),
        "differing": [
            [one.asked.name, one.got.error, one.expected.said, one.got.said]
            for one in meant
            if not one.is_identical
        ],
        "errors": [one.got.error for one in meant if one.got.error],
        "moved": sum(began_s <= time_of(line) <= ended_s for line in moved),
        "elsewhere": sum(bool(one.refusals) for one in meant),
        "refused": sum(one.num_times_by_all for one in meant),
        "refusals": [refusal for one in meant for refusal in one.refusals],
        "longest_gap_s": max((one.got.longest_gap_s for one in meant), default=0.0),
    }


def table(rows: Sequence[Row]) -> list[list[str]]:
    header = ["restarted", "took, s", "answers", "identical", "errors", "moved", "elsewhere"]
    return [
        [*header, "refused"],
        *(
            [
                row["restarted"],
                f"{row['took_s']:.0f}",
                str(row["answers"]),
                str(row["identical"]),
                str(len(row["errors"])),
                str(row["moved"]),
                str(row["elsewhere"]),
                str(row["refused"]),
            ]
            for row in rows
        ),
    ]


def verdicts(rows: Sequence[Row]) -> list[str]:
    """Say whether nothing was lost, doubled, ended with an error, or refused."""
    whole = rows[-1]
    return [
        f"identical: {whole['identical']} of {whole['answers']} (bar: all)",
        f"errors: {len(whole['errors'])} (bar: 0)",
        f"refused: {whole['refused']} of {whole['arrived']} that came (bar: 0)",
    ]


BENCHMARK = Benchmark(
    name="rolling",
    title="Everything is started again, one process after the other, under 22 readers "
    f"of {RATE_TPS:.0f} tokens/s, who ask again and again, and a newcomer each second",
    definitions={
        "took": "from SIGTERM until the process serves again, and all others are connected to it",
        "answers": "those that were being read meanwhile",
        "identical": "of these: text, ids, calls, log-probabilities (three places), counts and "
        "ending are those of an undisturbed run",
        "moved": "answers that went on at the other executor",
        "elsewhere": "requests that a gateway did not take and the other one did",
        "refused": "times that no gateway took a request",
    },
    measure=measure,
    table=table,
    verdicts=verdicts,
)
