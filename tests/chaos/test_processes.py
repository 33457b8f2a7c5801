"""Gateways, tracker and Redis, as processes, that are killed, stopped and asked to end at random,
beside executors without engines that die, leave, and are cut off.

A client whose gateway is gone sends its request again, from the beginning, to the other one. The
seed is printed; `EVENFLOW_CHAOS_SEED` sets it, `EVENFLOW_CHAOS_TIMES` how often each thing happens.
"""

import asyncio
import itertools
import os
import random
import signal
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from grpc import aio

from lab.stack.logs import log_lines
from lab.stack.processes import Stack
from services.gateway.live.failover.rules import POISON
from tests.chaos.asked import Asked, BrokenOffError, EndedEarlyError, NotTakenError, request_of
from tests.chaos.failing import LINK_STALL_S, OVERLAP_TOKENS, Failing
from tests.fake_executor import EVENT_TIMEOUT_S
from tests.gateways import until

pytestmark = pytest.mark.timeout(3_600)

SEED = int(os.environ.get("EVENFLOW_CHAOS_SEED", "0"))
NUM_TIMES = int(os.environ.get("EVENFLOW_CHAOS_TIMES", "2"))
GATEWAYS = ("gateway", "gateway-2")
NUM_MACHINES, NUM_CLIENTS = 3, 16
ANSWERS_PER_FAULT = 30
RETRY_S = 0.1
MOST_TAKEN_FOR_POISON = 0.05  # of all requests; `test_fakes.py` says why there are any


@dataclass(slots=True)
class Door:
    """A gateway's process, and its clients' connections."""

    name: str
    http: httpx.AsyncClient
    channel: aio.Channel
    num_kills: int = 0


class Place:
    """All processes, and what is done to them."""

    def __init__(self, stack: Stack, doors: Sequence[Door], failing: Sequence[Failing]) -> None:
        self.stack, self.doors, self.failing = stack, doors, failing

    async def kill_gateway(self, rng: random.Random) -> None:
        door = rng.choice(self.doors)
        door.num_kills += 1
        await asyncio.to_thread(self.stack.kill, door.name)
        await asyncio.to_thread(self.stack.start, door.name)

    async def end_gateway(self, rng: random.Random) -> None:
        """Have a gateway drain: its streams end in order, and what comes goes elsewhere."""
        door = rng.choice(self.doors)
        assert await asyncio.to_thread(self.stack.kill, door.name, signal.SIGTERM) == 0
        await asyncio.to_thread(self.stack.start, door.name)

    async def stop_gateway(self, rng: random.Random) -> None:
        await self._stop(rng.choice(self.doors).name, rng)

    async def kill_tracker(self, rng: random.Random) -> None:
        await self._away("tracker", signal.SIGKILL, rng)

    async def end_tracker(self, rng: random.Random) -> None:
        await self._away("tracker", signal.SIGTERM, rng)

    async def stop_tracker(self, rng: random.Random) -> None:
        await self._stop("tracker", rng)

    async def kill_redis(self, rng: random.Random) -> None:
        await self._away("redis", signal.SIGKILL, rng)

    async def end_redis(self, rng: random.Random) -> None:
        await self._away("redis", signal.SIGTERM, rng)

    async def stop_redis(self, rng: random.Random) -> None:
        await self._stop("redis", rng)

    async def an_executor_dies(self, rng: random.Random) -> None:
        await rng.choice(self.failing).die(rng)

    async def an_executor_leaves(self, rng: random.Random) -> None:
        await rng.choice(self.failing).leave(rng)

    async def a_link_is_cut(self, rng: random.Random) -> None:
        await rng.choice(self.failing).be_cut_off(rng)

    async def a_link_is_silent(self, rng: random.Random) -> None:
        await rng.choice(self.failing).be_silent(rng)

    async def a_link_is_slow(self, rng: random.Random) -> None:
        await rng.choice(self.failing).be_slow(rng)

    async def _stop(self, name: str, rng: random.Random) -> None:
        with self.stack.frozen(name):
            await asyncio.sleep(rng.uniform(0.2, LINK_STALL_S))

    async def _away(self, name: str, signum: int, rng: random.Random) -> None:
        await asyncio.to_thread(self.stack.kill, name, signum)
        await asyncio.sleep(rng.uniform(0.0, 1.0))
        await asyncio.to_thread(self.stack.start, name)


FAULTS: Sequence[Callable[[Place, random.Random], Coroutine[Any, Any, None]]] = (
    Place.kill_gateway,
    Place.end_gateway,
    Place.stop_gateway,
    Place.kill_tracker,
    Place.end_tracker,
    Place.stop_tracker,
    Place.kill_redis,
    Place.end_redis,
    Place.stop_redis,
    Place.an_executor_dies,
    Place.an_executor_leaves,
    Place.a_link_is_cut,
    Place.a_link_is_silent,
    Place.a_link_is_slow,
)


@asynccontextmanager
async def running(folder: Path) -> AsyncIterator[Place]:
    """Run everything; executors are in this process."""
    failing = [Failing(number) for number in range(NUM_MACHINES)]
    stack = Stack(
        folder,
        further=GATEWAYS[1:],
        GATEWAY_EXECUTORS=",".join(one.link.address for one in failing),
        GATEWAY_LINK_STALL_S=LINK_STALL_S,
        GATEWAY_FAILOVER_OVERLAP_TOKENS=OVERLAP_TOKENS,
    )
    async with AsyncExitStack() as things:
        things.push_async_callback(asyncio.to_thread, stack.stop)
        for one in failing:
            await one.machine.start()
            things.push_async_callback(one.machine.kill)
            things.enter_context(one.link)
        async with asyncio.TaskGroup() as beating:
            beats = [beating.create_task(one.beat()) for one in failing]
            await asyncio.to_thread(stack.start, "redis", "tracker", *GATEWAYS)
            doors = [await things.enter_async_context(door(stack, name)) for name in GATEWAYS]
            yield Place(stack, doors, failing)
            for beat in beats:
                beat.cancel()


@asynccontextmanager
async def door(stack: Stack, name: str) -> AsyncIterator[Door]:
    soon = [(f"grpc.{which}_reconnect_backoff_ms", 100) for which in ("initial", "min", "max")]
    async with (
        httpx.AsyncClient(base_url=stack.url(name), timeout=EVENT_TIMEOUT_S) as http,
        aio.insecure_channel(stack.address(name), options=soon) as channel,
    ):
        yield Door(name, http, channel)


class Clients:
    """They ask on and on, and again at the other gateway if one is gone or refuses."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._numbers = itertools.count()
        self._is_over = asyncio.Event()
        self.seen = Counter[str]()
        self.refused: dict[str, str] = {}

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            for number in range(NUM_CLIENTS):
                tasks.create_task(self._ask_on_and_on(random.Random(f"{SEED} {number}")))

    async def have_more(self, num_answers: int) -> None:
        due = self.seen["answers"] + num_answers
        await until(lambda: self.seen["answers"] >= due)

    def stop(self) -> None:
        self._is_over.set()

    async def _ask_on_and_on(self, rng: random.Random) -> None:
        while not self._is_over.is_set():
            asked = Asked(next(self._numbers), rng)
            try:
                for turn in itertools.count(rng.randrange(len(GATEWAYS))):
                    if await self._is_answered(asked, self._place.doors[turn % len(GATEWAYS)]):
                        break
                    await asyncio.sleep(RETRY_S)
            except EndedEarlyError as error:
                self.refused[asked.name] = str(error)
            self.seen["answers"] += 1

    async def _is_answered(self, asked: Asked, door: Door) -> bool:
        num_kills = door.num_kills
        try:
            await asked.ask(door)
        except NotTakenError:
            self.seen["not taken"] += 1
        except BrokenOffError as broken:
            self.seen["broken off"] += broken.was_taken
            if broken.was_taken and door.num_kills == num_kills:
                raise  # though it was not killed
        else:
            return True
        return False


async def test_whatever_process_dies_hangs_or_ends_answers_are_what_they_would_have_been(
    tmp_path: Path,
) -> None:
    rng = random.Random(SEED)
    faults = list(FAULTS) * NUM_TIMES
    rng.shuffle(faults)
    print(f"seed {SEED}, {len(faults)} faults")
    async with running(tmp_path) as place:
        clients = Clients(place)
        asking = asyncio.create_task(clients.run())
        for fault in faults:
            await one_of(asking, clients.have_more(rng.randrange(ANSWERS_PER_FAULT)))
            await one_of(asking, fault(place, rng))
        await one_of(asking, clients.have_more(ANSWERS_PER_FAULT))
        clients.stop()
        await asking
        logs = [line for name in GATEWAYS for line in log_lines(place.stack.log(name))]
        assert [submit for one in place.failing for submit in one.machine.wrong] == []

    told = {request_of(line) for line in logs if line["event"] == "request_not_moved"}
    seen, refused = clients.seen, clients.refused
    print(f"{dict(seen)}, taken for poison {len(refused)}")
    assert refused.keys() <= told, "streams ended early, and no line says why"
    assert all(POISON in why for why in refused.values()), refused
    assert len(refused) <= MOST_TAKEN_FOR_POISON * seen["answers"]
    assert seen["broken off"] > 0
    assert seen["not taken"] > 0


async def one_of(asking: "asyncio.Task[None]", doing: Coroutine[Any, Any, None]) -> None:
    """Do something while clients ask. Raises what one of them fails with."""
    task = asyncio.create_task(doing)
    await asyncio.wait([asking, task], return_when=asyncio.FIRST_COMPLETED)
    if asking.done():
        task.cancel()
        asking.result()
    await task
