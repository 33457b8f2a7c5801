"""Executors without engines that die, hang, leave and are cut off at random, under many requests.

The k-th token of an answer is a function of prompt, seed and k, so that any splice shows. The seed
is printed; `EVENFLOW_CHAOS_SEED` sets it, `EVENFLOW_CHAOS_REQUESTS` how many requests there are.
"""

import asyncio
import itertools
import os
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any

import pytest
from structlog.testing import capture_logs

from services.gateway.live.failover.rules import POISON
from tests.chaos.asked import Asked, EndedEarlyError, NotTakenError, request_of
from tests.chaos.failing import LINK_STALL_S, OVERLAP_TOKENS, Failing
from tests.gateways import Client, gateway_for, until

pytestmark = pytest.mark.timeout(3_600)

NUM_REQUESTS = int(os.environ.get("EVENFLOW_CHAOS_REQUESTS", "10000"))
NUM_FAULTS = NUM_REQUESTS // 50
SEED = int(os.environ.get("EVENFLOW_CHAOS_SEED", "0"))
NUM_MACHINES, NUM_CLIENTS = 3, 24
REQUESTS_PER_FAULT = 40
NOTICED_S = 0.2  # a gateway has heard by then of a connection that is gone, as a rule
# Of all requests: executors were lost under them twice in a row, just after they had begun.
MOST_TAKEN_FOR_POISON = 0.05


FAULTS: Sequence[tuple[Callable[[Failing, random.Random], Coroutine[Any, Any, None]], float]] = (
    (Failing.die, 0.4),
    (Failing.be_cut_off, 0.35),
    (Failing.leave, 0.15),
    (Failing.be_silent, 0.05),
    (Failing.be_slow, 0.05),
)


async def fail_at_random(
    failing: Sequence[Failing],
    clients: Sequence[Client],
    rng: random.Random,
    seen: Counter[str],
) -> None:
    """Have one executor fail after so many answers, when all are connected: others serve on. Until
    there were enough of both.
    """
    links = [link for one in clients for link in one.gateway.dispatcher.placing._links.values()]
    kinds, weights = zip(*FAULTS, strict=True)
    while True:
        num_due = seen["answers"] + rng.randrange(REQUESTS_PER_FAULT)
        await until(lambda least=num_due: seen["answers"] >= least or is_enough(seen))
        if is_enough(seen):
            break
        await until(lambda: all(link.candidate() for link in links))
        (fault,) = rng.choices(kinds, weights)
        await fault(rng.choice(failing), rng)
        await asyncio.sleep(NOTICED_S)
        seen["faults"] += 1
        seen[fault.__name__] += 1


def is_enough(seen: Counter[str]) -> bool:
    return seen["answers"] >= NUM_REQUESTS and seen["faults"] >= NUM_FAULTS


@asynccontextmanager
async def two_gateways(failing: Sequence[Failing]) -> AsyncIterator[Sequence[Client]]:
    async with AsyncExitStack() as stack:
        clients = []
        for number in range(2):
            gateway = gateway_for(
                *(one.link for one in failing),
                id=f"gateway-{number}",
                link_stall_s=LINK_STALL_S,
                failover_overlap_tokens=OVERLAP_TOKENS,
                max_live_requests=4 * NUM_CLIENTS,
                grpc_keepalive_s=5.0,
            )
            clients.append(await stack.enter_async_context(gateway))
        for client in clients:
            await client.wait_ready()
        yield clients


async def test_nothing_is_lost_doubled_or_wrong_whatever_executors_do() -> None:
    rng, seen, refused = random.Random(SEED), Counter[str](), dict[str, str]()
    print(f"seed {SEED}, {NUM_REQUESTS} requests")
    failing = [Failing(number) for number in range(NUM_MACHINES)]
    numbers = itertools.count()

    async def ask_on_and_on(clients: Sequence[Client], own: random.Random) -> None:
        while not is_enough(seen):
            asked = Asked(next(numbers), own)
            try:
                while True:
                    with suppress(NotTakenError):
                        await asked.ask(own.choice(clients))
                        break
                    seen["not taken"] += 1
                    await asyncio.sleep(NOTICED_S)
            except EndedEarlyError as error:
                refused[asked.name] = str(error)
            seen["answers"] += 1

    with capture_logs() as logs:
        async with AsyncExitStack() as stack:
            for one in failing:
                await one.machine.start()
                stack.push_async_callback(one.machine.kill)
                stack.enter_context(one.link)
            clients = await stack.enter_async_context(two_gateways(failing))
            beats = [asyncio.create_task(one.beat()) for one in failing]
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(fail_at_random(failing, clients, rng, seen))
                for number in range(NUM_CLIENTS):
                    tasks.create_task(ask_on_and_on(clients, random.Random(f"{SEED} {number}")))
            for beat in beats:
                beat.cancel()
            await asyncio.wait(beats)
            for client in clients:
                await client.wait_idle()

    assert [submit for one in failing for submit in one.machine.wrong] == []
    told = {request_of(line) for line in logs if is_an_ending(line)}
    unexplained = {name: why for name, why in refused.items() if name not in told}
    assert not unexplained, "streams ended early, and no line says why"
    assert all(POISON in why for why in refused.values()), refused
    num_moved = sum(line["event"] == "request_moved" for line in logs)
    print(f"{dict(seen)}, moves {num_moved}, taken for poison {len(refused)}")
    assert len(refused) <= MOST_TAKEN_FOR_POISON * seen["answers"]
    assert num_moved >= seen["faults"]


def is_an_ending(line: Any) -> bool:
    return line["event"] == "request_not_moved"
