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
from collections import deque
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence

import uvloop
from grpc import aio

from bench.gateway.schedule import Schedule, Turn
from evenflow.executor.v1 import executor_pb2 as pb
from evenflow.executor.v1 import executor_pb2_grpc as pb_grpc
from evenflow.gateway.v1 import generation_pb2 as gen
from services.executor.convert import frame_to_proto, submissions_from_proto
from services.executor.serving.request_trace import RequestTrace
from services.executor.serving.step_stream import BEAT_S, Acceptance, StepStream
from services.executor.serving.streamed_request import StreamedRequest
from services.executor.types import Delta, Rejection, Token
from services.generation.finish import FinishReason
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
    """Has its tokens in frames as an executor has, and beats as it does."""

    def __init__(self, executor_id: str, submits: Submits, burst: int) -> None:
        super().__init__(executor_id)
        self._submits, self._burst = submits, burst
        self._stream = StepStream()
        self._live: dict[int, StreamedRequest] = {}  # by the number of its stream
        self._live_by_id: dict[str, StreamedRequest] = {}

    async def Stream(  # noqa: N802
        self, requests: AsyncIterator[pb.StreamRequest], context: Context
    ) -> AsyncIterator[pb.StreamResponse]:
        reading = asyncio.create_task(self._read(requests))
        while frame := await self._stream.next_frame():
            yield frame_to_proto(frame)
        await reading

    async def _read(self, requests: AsyncIterator[pb.StreamRequest]) -> None:
        async for request in requests:
            match request.WhichOneof("message"):
                case "submit":
                    self._take(request.submit)
                case "delivered":
                    for count in request.delivered.counts:
                        live = self._live_by_id[count.request_id]
                        live.num_delivered = count.num_delivered_tokens

    def _take(self, submit: pb.Submit) -> None:
        submissions = submissions_from_proto(submit)
        assert not isinstance(submissions, Rejection)
        live = StreamedRequest(submission=submissions[0], trace=RequestTrace(submissions[0]))
        live.pace(submissions[0].service_level)
        self._live[self._submits.add(self)] = self._live_by_id[submit.request_id] = live
        self._stream.accept(submit.request_id, Acceptance(num_prompt_tokens=1))

    async def generate(self, start_s: float, turns: Iterable[Turn], *, phase: float) -> None:
        """Generate as is its turn, once no stream is to come. `phase`: of its beats, in [0, 1)."""
        beating = asyncio.create_task(self._beat(phase))
        waiting = deque(turns)
        while waiting:
            step_s = STEP_S if waiting[0].number else FIRST_STEP_S
            await asyncio.sleep(max(step_s, start_s + waiting[0].at_s - time.monotonic()))
            now_s = time.monotonic()
            while waiting and start_s + waiting[0].at_s <= now_s:
                self._step(waiting.popleft(), now_s)
        beating.cancel()

    def _step(self, turn: Turn, now_s: float) -> None:
        live = self._live[turn.stream]
        tokens = (Token(1, f"{now_s:.6f}"),) * self._burst
        delta = Delta(tokens, FinishReason.LENGTH if turn.is_last else None)
        self._stream.push(live.submission.request_id, delta, num_covering=live.num_covering)
        live.take(delta)

    async def _beat(self, phase: float) -> None:
        await asyncio.sleep(phase * BEAT_S)
        while True:
            await asyncio.sleep(BEAT_S)
            self._stream.beat()


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
    generating = (
        one.generate(start_s, turns[one], phase=number / len(executors))
        for number, one in enumerate(executors)
    )
    await asyncio.gather(*generating)
    await asyncio.gather(*(server.wait_for_termination() for server in servers))


if __name__ == "__main__":
    uvloop.run(serve(sys.argv[1].split(","), Schedule(**json.loads(sys.argv[2]))))
