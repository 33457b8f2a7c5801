"""Executors without engines that die, hang, leave and are cut off at random, under many requests.

The k-th token of an answer is a function of prompt, seed and k, so that any splice shows. The seed
is printed; `EVENFLOW_CHAOS_SEED` sets it, `EVENFLOW_CHAOS_REQUESTS` how many requests there are.
"""

import asyncio
import itertools
import json
import os
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any

import grpc
import pytest
from grpc import aio
from structlog.testing import capture_logs

from evenflow.executor.v1 import executor_pb2 as pb
from evenflow.gateway.v1 import gateway_pb2 as pb_gateway
from evenflow.gateway.v1 import gateway_pb2_grpc as pb_gateway_grpc
from evenflow.gateway.v1 import generation_pb2 as gen
from lab.stack.link_proxy import LinkProxy
from services.gateway.live.failover.rules import POISON
from tests.fake_executor import MODEL
from tests.gateways import Client, gateway_for, until
from tests.machine import Machine, token_at

pytestmark = pytest.mark.timeout(3_600)

NUM_REQUESTS = int(os.environ.get("EVENFLOW_CHAOS_REQUESTS", "10000"))
NUM_FAULTS = NUM_REQUESTS // 50
SEED = int(os.environ.get("EVENFLOW_CHAOS_SEED", "0"))
NUM_MACHINES, NUM_CLIENTS = 3, 24
LINK_STALL_S, BEAT_S = 2.0, 0.25
REQUESTS_PER_FAULT = 40
NOTICED_S = 0.2  # a gateway has heard by then of a connection that is gone, as a rule
# Of all requests: executors were lost under them twice in a row, just after they had begun.
MOST_TAKEN_FOR_POISON = 0.25
NO_EXECUTOR = "no executor is connected"  # what a gateway says at its door
BREAKS_OFF = 0.05  # of all clients


class Failing:
    """One executor, and the link to it."""

    def __init__(self, number: int) -> None:
        self.machine = Machine(number)
        self.machine.interval_s = 0.002
        self.link = LinkProxy(self.machine.address)

    async def beat(self) -> None:
        """Say once in a while how many steps there were, as engines do."""
        for step in range(1, 1 << 30):
            session = self.machine.session
            if session is not None:
                session.num_steps = step
                session.send()
            await asyncio.sleep(BEAT_S)

    async def die(self, rng: random.Random) -> None:
        await self.machine.kill()
        await asyncio.sleep(rng.uniform(0.0, 0.5))
        await self.machine.start()

    async def leave(self, rng: random.Random) -> None:
        session = self.machine.session
        if session is not None:
            session.is_leaving = True
            session.send()
            await asyncio.sleep(rng.uniform(0.05, 0.3))
        await self.die(rng)

    async def be_cut_off(self, rng: random.Random) -> None:
        self.link.cut()

    async def be_silent(self, rng: random.Random) -> None:
        with self.link.silent():
            await asyncio.sleep(LINK_STALL_S + rng.uniform(-0.5, 1.5))


FAULTS: Sequence[tuple[Callable[[Failing, random.Random], Coroutine[Any, Any, None]], float]] = (
    (Failing.die, 0.4),
    (Failing.be_cut_off, 0.35),
    (Failing.leave, 0.2),
    (Failing.be_silent, 0.05),
)


async def fail_at_random(
    failing: Sequence[Failing],
    clients: Sequence[Client],
    rng: random.Random,
    seen: Counter[str],
) -> None:
    """Have one executor fail after so many answers, when all are connected: others serve on."""
    links = [link for one in clients for link in one.gateway.dispatcher.placing._links.values()]
    kinds, weights = zip(*FAULTS, strict=True)
    while True:
        num_due = seen["answers"] + rng.randrange(REQUESTS_PER_FAULT)
        await until(lambda least=num_due: seen["answers"] >= least)
        await until(lambda: all(link.candidate() for link in links))
        (fault,) = rng.choices(kinds, weights)
        await fault(rng.choice(failing), rng)
        await asyncio.sleep(NOTICED_S)
        seen["faults"] += 1
        seen[fault.__name__] += 1


@asynccontextmanager
async def two_gateways(failing: Sequence[Failing]) -> AsyncIterator[Sequence[Client]]:
    async with AsyncExitStack() as stack:
        clients = []
        for number in range(2):
            gateway = gateway_for(
                *(one.link for one in failing),
                id=f"gateway-{number}",
                link_stall_s=LINK_STALL_S,
                max_live_requests=4 * NUM_CLIENTS,
                grpc_keepalive_s=5.0,
            )
            clients.append(await stack.enter_async_context(gateway))
        for client in clients:
            await client.wait_ready()
        yield clients


class Asked:
    """One request, and what its answer must be."""

    def __init__(self, number: int, rng: random.Random) -> None:
        self.name = f"chaos-{number}"
        self.text = f"prompt {rng.randrange(1_000)}"
        self.seed = rng.randrange(1_000)
        self.num_tokens = rng.randrange(3, 40)  # three are of thoughts
        self.is_whole = rng.random() < 0.2
        self.is_over_grpc = rng.random() < 0.3
        self.breaks_off_after = rng.randrange(1, 20) if rng.random() < BREAKS_OFF else None
        sampling = gen.SamplingParams(seed=self.seed)
        submit = pb.Submit(text=self.text, sampling=sampling)
        tokens = [token_at(submit, k) for k in range(self.num_tokens)]
        self.expected = "".join(token.text for token in tokens)
        self.expected_ids = [token.id for token in tokens]

    async def ask(self, client: Client) -> tuple[str, list[int]]:
        """Return the text and the ids that came."""
        return await (self._over_grpc(client) if self.is_over_grpc else self._over_http(client))

    async def _over_http(self, client: Client) -> tuple[str, list[int]]:
        body = {
            "model": MODEL,
            "prompt": self.text,
            "seed": self.seed,
            "max_tokens": self.num_tokens,
            "stream": not self.is_whole,
            "return_token_ids": True,
        }
        headers = {"x-request-id": self.name}
        text, ids = "", list[int]()
        async with client.http.stream(
            "POST", "/v1/completions", json=body, headers=headers
        ) as answer:
            if answer.status_code != 200 or self.is_whole:
                said = json.loads(await answer.aread())
                if answer.status_code == 503 and NO_EXECUTOR in said["error"]["message"]:
                    raise NotTakenError
                if "error" in said:
                    raise EndedEarlyError(said["error"]["message"])
                return said["choices"][0]["text"], said["choices"][0]["token_ids"]
            async for line in answer.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                said = json.loads(line.removeprefix("data: "))
                if "error" in said:
                    raise EndedEarlyError(said["error"]["message"])
                for choice in said["choices"]:
                    text += choice["text"]
                    ids += choice.get("token_ids") or []
                if self.breaks_off_after is not None and len(ids) >= self.breaks_off_after:
                    return text, ids
        return text, ids

    async def _over_grpc(self, client: Client) -> tuple[str, list[int]]:
        sampling = gen.SamplingParams(seed=self.seed, max_tokens=self.num_tokens)
        request = pb_gateway.GenerateRequest(model=MODEL, text=self.text, sampling=sampling)
        stub = pb_gateway_grpc.GatewayServiceStub(client.channel)
        text, ids = "", list[int]()
        call = stub.Generate(request, metadata=[("x-request-id", self.name)])
        try:
            async for part in call:
                text += "".join(token.text for token in part.tokens)
                ids += [token.id for token in part.tokens]
                if self.breaks_off_after is not None and len(ids) >= self.breaks_off_after:
                    call.cancel()
                    return text, ids
        except aio.AioRpcError as error:
            if NO_EXECUTOR in (error.details() or ""):
                raise NotTakenError from None
            raise EndedEarlyError(f"{error.code()}: {error.details()}") from None
        assert await call.code() is grpc.StatusCode.OK
        return text, ids

    def check(self, text: str, ids: Sequence[int]) -> None:
        """Assert that nothing is lost, doubled or another's."""
        if self.breaks_off_after is not None:
            assert self.expected.startswith(text), self.name
            assert list(ids) == self.expected_ids[: len(ids)], self.name
        else:
            assert (text, list(ids)) == (self.expected, self.expected_ids), self.name


class NotTakenError(Exception):
    """No executor was connected: it is asked again."""


class EndedEarlyError(Exception):
    """An answer ended with an error."""


async def test_nothing_is_lost_doubled_or_wrong_whatever_executors_do() -> None:
    rng, seen, refused = random.Random(SEED), Counter[str](), dict[str, str]()
    print(f"seed {SEED}, {NUM_REQUESTS} requests")
    failing = [Failing(number) for number in range(NUM_MACHINES)]
    numbers = itertools.count()

    async def ask_on_and_on(clients: Sequence[Client], own: random.Random) -> None:
        while seen["answers"] < NUM_REQUESTS or seen["faults"] < NUM_FAULTS:
            asked = Asked(next(numbers), own)
            try:
                while True:
                    with suppress(NotTakenError):
                        asked.check(*await asked.ask(own.choice(clients)))
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
            background = [asyncio.create_task(one.beat()) for one in failing]
            background.append(asyncio.create_task(fail_at_random(failing, clients, rng, seen)))
            async with asyncio.TaskGroup() as asking:
                for number in range(NUM_CLIENTS):
                    asking.create_task(ask_on_and_on(clients, random.Random(f"{SEED} {number}")))
            for task in background:
                task.cancel()
            await asyncio.wait(background)
            for client in clients:
                await client.wait_idle()

    assert [submit for one in failing for submit in one.machine.wrong] == []
    told = {str(line["request_id"]).rpartition(":")[0] for line in logs if is_an_ending(line)}
    unexplained = {name: why for name, why in refused.items() if name not in told}
    assert not unexplained, "streams ended early, and no line says why"
    assert all(POISON in why for why in refused.values()), refused
    num_moved = sum(line["event"] == "request_moved" for line in logs)
    print(f"{dict(seen)}, moves {num_moved}, taken for poison {len(refused)}")
    assert len(refused) <= MOST_TAKEN_FOR_POISON * seen["answers"]
    assert num_moved >= seen["faults"]


def is_an_ending(line: Any) -> bool:
    return line["event"] == "request_not_moved"
