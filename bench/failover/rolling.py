"""Everything is started again, one process after the other, while readers read and others come.

Two executors with layer-wise KV, two gateways, planner, tracker and Redis. Clients do what a load
balancer does: they ask gateways that are ready, and another one if a gateway refuses.
"""

import asyncio
import itertools
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from bench.document import Benchmark, Row
from bench.failover.asked import NUM_TOKENS, RATE_TPS, Asked, Got, load
from bench.failover.doors import Answer, Doors
from bench.failover.site import time_of
from bench.failover.whole_stack import (
    EXECUTORS,
    GATEWAYS,
    edges_of,
    restart,
    stack_in,
    start_all,
    told,
    undisturbed,
)
from lab.stack.processes import MODEL, Stack

ORDER = (*EXECUTORS, *GATEWAYS, "planner", "tracker", "redis")
LAME_DUCK_S = 2.0
NUM_SHORT_TOKENS = 24  # of an answer to one that comes
ARRIVAL_INTERVAL_S = 1.0
PAUSE_S = 3.0  # after a process is back


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
        stack = stack_in(Path(folder), GATEWAY_LAME_DUCK_S=LAME_DUCK_S)
        try:
            start_all(stack)
            return asyncio.run(_measured(stack))
        finally:
            stack.stop()


async def _measured(stack: Stack) -> list[Row]:
    edges = edges_of(stack)
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
    f"of {RATE_TPS:.0f} tokens/s, that ask again and again, and a newcomer each second",
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
