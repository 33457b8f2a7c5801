"""Many streams at once over both edges, for tests of what happens to them."""

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TypeAlias

import grpc

from evenflow.executor.v1 import executor_pb2, executor_pb2_grpc
from evenflow.tracker.v1 import tracker_pb2 as tracker_pb
from lab.stack.processes import RPC_TIMEOUT_S, Stack, wait_until
from tests.clients import Received, grpc_chat, http_chat, recorded

NUM_PAIRS = 11  # of an HTTP and a gRPC stream with the same prompt: 22 live streams
MORE_TOKENS = 3

Ending: TypeAlias = Received | BaseException
Endings: TypeAlias = tuple[list[Ending], list[Ending]]  # over HTTP, and over gRPC


@dataclass(frozen=True, kw_only=True)
class Streams:
    """Pairs of streams, each pair with a prompt of its own."""

    stack: Stack
    name: str  # begins every request id
    max_tokens: int
    rate_tps: float | None = None
    num_pairs: int = NUM_PAIRS
    received: defaultdict[str, Received] = field(default_factory=lambda: defaultdict(Received))

    @property
    def ids(self) -> list[str]:
        return self.http_ids + self.grpc_ids

    @property
    def http_ids(self) -> list[str]:
        return [f"{self.name}-http-{i}" for i in range(self.num_pairs)]

    @property
    def grpc_ids(self) -> list[str]:
        return [f"{self.name}-grpc-{i}" for i in range(self.num_pairs)]

    async def run(self) -> list[tuple[Received, Received]]:
        """Stream them all to their end; raises what the first failing one raises."""
        return await asyncio.gather(
            *(asyncio.gather(self._http(i), self._grpc(i)) for i in range(self.num_pairs))
        )

    async def endings(self) -> Endings:
        """Stream them all; return what became of each over HTTP, and over gRPC."""
        edges: list[Callable[[int], Awaitable[Received]]] = [self._http, self._grpc]
        ended = await asyncio.gather(
            *(edge(i) for edge in edges for i in range(self.num_pairs)), return_exceptions=True
        )
        return ended[: self.num_pairs], ended[self.num_pairs :]

    async def wait_live(self) -> None:
        """Wait until every reader has had some tokens."""

        def live() -> bool:
            records = recorded(self.stack)
            return all(id_ in records and records[id_].num_delivered_tokens > 2 for id_ in self.ids)

        await asyncio.to_thread(wait_until, live, "all streams live")

    async def go_on(self) -> None:
        """Wait until every reader has some more tokens than now."""
        goal = {id_: len(self.received[id_].arrived_s) + MORE_TOKENS for id_ in self.ids}

        def have_gone_on() -> bool:
            return all(len(self.received[id_].arrived_s) >= num for id_, num in goal.items())

        await asyncio.to_thread(wait_until, have_gone_on, "all streams have more tokens")

    async def wait_recorded(self, state: "tracker_pb.RequestState.ValueType") -> None:
        """Wait until the tracker says that all of them are in `state`."""

        def settled() -> bool:
            records = recorded(self.stack)
            return all(id_ in records and records[id_].state == state for id_ in self.ids)

        await asyncio.to_thread(wait_until, settled, f"the tracker's records are in state {state}")

    async def _http(self, i: int) -> Received:
        return await http_chat(
            self.stack.base_url,
            _prompt(i),
            max_tokens=self.max_tokens,
            request_id=self.http_ids[i],
            rate_tps=self.rate_tps,
            got=self.received[self.http_ids[i]],
        )

    async def _grpc(self, i: int) -> Received:
        return await grpc_chat(
            self.stack.address("gateway"),
            _prompt(i),
            max_tokens=self.max_tokens,
            request_id=self.grpc_ids[i],
            rate_tps=self.rate_tps,
            got=self.received[self.grpc_ids[i]],
        )


def _prompt(i: int) -> str:
    return f"Stream {i}: " + "tell me more. " * (i + 1)


def assert_complete(pair: tuple[Received, Received], reference: Received, num_tokens: int) -> None:
    """Both streams hold each token of the reference once and in order."""
    http, rpc = pair
    assert rpc.token_indices == list(range(num_tokens))
    assert rpc.token_ids == reference.token_ids
    assert (http.status, http.errors, http.done) == (200, [], True)
    assert (http.text, rpc.text) == (reference.text, reference.text)
    assert (http.num_output_tokens, rpc.num_output_tokens) == (num_tokens, num_tokens)


def num_in_engine(stack: Stack) -> int:
    """Return how many requests run in the engine, or have yet to; -1 while it does not answer."""
    with grpc.insecure_channel(stack.address("executor")) as channel:
        try:
            info = executor_pb2_grpc.ExecutorServiceStub(channel).GetModelInfo(
                executor_pb2.GetModelInfoRequest(), timeout=RPC_TIMEOUT_S
            )
        except grpc.RpcError:
            return -1
    return int(info.load.num_running_reqs + info.load.num_newcomers)
