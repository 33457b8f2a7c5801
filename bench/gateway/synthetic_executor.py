"""An executor without an engine, as a process: generates on schedule, each token's text its time.

`python -m bench.gateway.synthetic_executor PORT SCHEDULE`, the schedule as JSON. It waits until
all streams of the schedule are submitted, prints a line, and begins.
"""

import asyncio
import gc
import json
import sys
import time
from collections.abc import AsyncIterator

import uvloop
from grpc import aio

from bench.gateway.schedule import Schedule
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

    async def GetModelInfo(  # noqa: N802
        self, request: pb.GetModelInfoRequest, context: Context
    ) -> pb.GetModelInfoResponse:
        return pb.GetModelInfoResponse(executor_id="synthetic", model=MODEL, max_model_len=1 << 20)


class SyntheticExecutor(EnginelessExecutor):
    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self._request_ids: list[str] = []
        self._accepted: asyncio.Queue[pb.Accepted] = asyncio.Queue()

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
                self._request_ids.append(request_id)
                self._accepted.put_nowait(pb.Accepted(request_id=request_id, num_prompt_tokens=1))

    async def _frames(self) -> AsyncIterator[pb.StreamResponse]:
        for _ in range(self._schedule.num_streams):
            yield pb.StreamResponse(accepted=[await self._accepted.get()])
        gc.freeze()
        gc.disable()
        await asyncio.sleep(SETTLE_S)
        print("generating", flush=True)
        start_s = time.monotonic()
        turns = self._schedule.turns()
        turn = next(turns, None)
        while turn is not None:
            step_s = STEP_S if turn[2] else FIRST_STEP_S
            await asyncio.sleep(max(step_s, start_s + turn[0] - time.monotonic()))
            now_s = time.monotonic()
            frame = pb.StreamResponse()
            while turn is not None and start_s + turn[0] <= now_s:
                self._generate(frame, turn, now_s)
                turn = next(turns, None)
            if frame.outputs:
                yield frame

    def _generate(
        self, frame: pb.StreamResponse, turn: tuple[float, int, int], now_s: float
    ) -> None:
        _, stream, number = turn
        burst = self._schedule.burst
        is_last = number + 1 == self._schedule.num_bursts
        frame.outputs.add(
            request_id=self._request_ids[stream],
            first_token_index=number * burst,
            tokens=[pb.Token(id=1, text=f"{now_s:.6f}")] * burst,
            ending=LENGTH if is_last else None,
        )


async def serve(port: int, schedule: Schedule) -> None:
    server = aio.server()
    pb_grpc.add_ExecutorServiceServicer_to_server(SyntheticExecutor(schedule), server)
    server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    await server.wait_for_termination()


if __name__ == "__main__":
    uvloop.run(serve(int(sys.argv[1]), Schedule(**json.loads(sys.argv[2]))))
