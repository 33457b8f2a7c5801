"""Executors without an engine, as a process: generate on schedule, each token's text its time.

`python -m bench.gateway.synthetic_executor PORTS SCHEDULE`, one at each of the comma-separated
ports, the schedule as JSON. They wait until all of its streams are submitted, to one executor or
another, print a line, and begin.
"""

import asyncio
import gc
import json
import sys
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence

import uvloop
from grpc import aio

from bench.gateway.schedule import Schedule, Turn
from evenflow.executor.v1 import executor_pb2 as pb
from evenflow.executor.v1 import executor_pb2_grpc as pb_grpc
from evenflow.gateway.v1 import generation_pb2 as gen
from services.kit.rpc import Context

MODEL = "synthetic"
STEP_S = 0.01  # frames come no closer together, as from an engine whose steps take so long
FIRST_STEP_S = 0.001  # the same while streams begin, so that their turns are spread
SETTLE_S = 1.0  # from the last submit to the first token
LENGTH = pb.Ending(finish_reason=gen.FINISH_REASON_LENGTH)


class EnginelessExecutor(pb_grpc.ExecutorServiceServicer):
    """Tells a gateway what it asks before it sends requests."""

    def __init__(self, executor_id: str = "synthetic") -> None:
        self._executor_id = executor_id

    async def GetModelInfo(  # noqa: N802
        self, request: pb.GetModelInfoRequest, context: Context
    ) -> pb.GetModelInfoResponse:
        return pb.GetModelInfoResponse(
            executor_id=self._executor_id, model=MODEL, max_model_len=1 << 20
        )


class Submits:
    """The streams of a schedule as they are submitted, and to which executor."""

    def __init__(self, num_streams: int) -> None:
        self.executors: list[SyntheticExecutor] = []
        self.all_here = asyncio.Event()
        self._num_streams = num_streams

    def add(self, executor: "SyntheticExecutor") -> int:
        """Return the number of one more stream."""
        self.executors.append(executor)
        if len(self.executors) == self._num_streams:
            self.all_here.set()
        return len(self.executors) - 1


class SyntheticExecutor(EnginelessExecutor):
    def __init__(self, executor_id: str, submits: Submits, burst: int) -> None:
        super().__init__(executor_id)
        self._submits, self._burst = submits, burst
        self._request_ids: dict[int, str] = {}
        self._accepted: asyncio.Queue[pb.Accepted | None] = asyncio.Queue()
        self._start_s = 0.0
        self._turns: Iterator[Turn] = iter(())

    def begin(self, start_s: float, turns: Sequence[Turn]) -> None:
        """Begin to generate, once no stream is to come."""
        self._start_s, self._turns = start_s, iter(turns)
        self._accepted.put_nowait(None)

    async def Stream(  # noqa: N802
        self, requests: AsyncIterator[pb.StreamRequest], context: Context
    ) -> AsyncIterator[pb.StreamResponse]:
        reading = asyncio.create_task(self._read(requests))
        sequence = 0
        async for frame in self._frames():
            frame.sequence = sequence
            sequence += 1
            yield frame
        await reading

    async def _read(self, requests: AsyncIterator[pb.StreamRequest]) -> None:
        async for request in requests:
            if request.WhichOneof("message") == "submit":
                request_id = request.submit.request_id
                self._request_ids[self._submits.add(self)] = request_id
                self._accepted.put_nowait(pb.Accepted(request_id=request_id, num_prompt_tokens=1))

    async def _frames(self) -> AsyncIterator[pb.StreamResponse]:
        while accepted := await self._accepted.get():
            yield pb.StreamResponse(accepted=[accepted])
        turn = next(self._turns, None)
        while turn is not None:
            step_s = STEP_S if turn.number else FIRST_STEP_S
            await asyncio.sleep(max(step_s, self._start_s + turn.at_s - time.monotonic()))
            now_s = time.monotonic()
            frame = pb.StreamResponse()
            while turn is not None and self._start_s + turn.at_s <= now_s:
                self._generate(frame, turn, now_s)
                turn = next(self._turns, None)
            if frame.outputs:
                yield frame

    def _generate(self, frame: pb.StreamResponse, turn: Turn, now_s: float) -> None:
        frame.outputs.add(
            request_id=self._request_ids[turn.stream],
            first_token_index=turn.number * self._burst,
            tokens=[pb.Token(id=1, text=f"{now_s:.6f}")] * self._burst,
            ending=LENGTH if turn.is_last else None,
        )


async def started(executors: Mapping[str, EnginelessExecutor]) -> list[aio.Server]:
    """Start a server for each executor, at the port that is its key."""
    servers = []
    for port, executor in executors.items():
        server = aio.server(options=[("grpc.so_reuseport", 0)])
        pb_grpc.add_ExecutorServiceServicer_to_server(executor, server)
        server.add_insecure_port(f"127.0.0.1:{port}")
        await server.start()
        servers.append(server)
    return servers


async def serve(ports: Sequence[str], schedule: Schedule) -> None:
    submits = Submits(schedule.num_streams)
    executors = [SyntheticExecutor(port, submits, schedule.burst) for port in ports]
    servers = await started(dict(zip(ports, executors, strict=True)))
    await submits.all_here.wait()
    turns: dict[SyntheticExecutor, list[Turn]] = {executor: [] for executor in executors}
    for turn in schedule.turns():
        turns[submits.executors[turn.stream]].append(turn)
    gc.freeze()
    gc.disable()
    await asyncio.sleep(SETTLE_S)
    print("generating", flush=True)
    start_s = time.monotonic()
    for executor in executors:
        executor.begin(start_s, turns[executor])
    await asyncio.gather(*(server.wait_for_termination() for server in servers))


if __name__ == "__main__":
    uvloop.run(serve(sys.argv[1].split(","), Schedule(**json.loads(sys.argv[2]))))
