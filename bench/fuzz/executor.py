"""An executor without an engine that answers whatever comes, as a process.

`python -m bench.fuzz.executor PORT`. To "Count." it says when it made each token, slowly, for
readers that measure; to a `LONG` prompt it has much to say; to all else it says a little at once.
"""

import asyncio
import sys
import time
from collections.abc import AsyncIterator

import uvloop
from grpc import aio

from bench.gateway.synthetic_executor import LENGTH, MODEL
from evenflow.executor.v1 import executor_pb2 as pb
from evenflow.executor.v1 import executor_pb2_grpc as pb_grpc
from evenflow.gateway.v1 import generation_pb2 as gen
from lab.submits import answers_of
from services.kit.rpc import Context

LONG = "Tell me everything."
COUNT = "Count."
CONTEXT = 4_096
NUM_PROMPT_TOKENS = 7
NUM_COUNTED, COUNT_INTERVAL_S = 400, 0.045  # a tenth faster than they are read
NUM_LONG, LONG_BURST, LONG_INTERVAL_S = 1_500, 50, 0.5  # 100 tokens per second and answer
NUM_SHORT = 6
_CANCELLED = pb.Ending(finish_reason=gen.FINISH_REASON_CANCELLED)


class FuzzedExecutor(pb_grpc.ExecutorServiceServicer):
    async def GetModelInfo(  # noqa: N802
        self, request: pb.GetModelInfoRequest, context: Context
    ) -> pb.GetModelInfoResponse:
        return pb.GetModelInfoResponse(executor_id="fuzzed", model=MODEL, max_model_len=CONTEXT)

    async def Tokenize(  # noqa: N802
        self, request: pb.TokenizeRequest, context: Context
    ) -> pb.TokenizeResponse:
        text = request.text or "".join(message.content for message in request.chat.messages)
        return pb.TokenizeResponse(
            ids=map(ord, text),
            max_model_len=CONTEXT,
            texts=text if request.with_texts else (),
        )

    async def Detokenize(  # noqa: N802
        self, request: pb.DetokenizeRequest, context: Context
    ) -> pb.DetokenizeResponse:
        return pb.DetokenizeResponse(text="x" * len(request.ids))

    async def Stream(  # noqa: N802
        self, requests: AsyncIterator[pb.StreamRequest], context: Context
    ) -> AsyncIterator[pb.StreamResponse]:
        answers = _Answers()
        reading = asyncio.create_task(answers.read(requests))
        sequence = 0
        try:
            while True:
                frame = await answers.frame()
                frame.sequence, sequence = sequence, sequence + 1
                yield frame
        finally:
            reading.cancel()
            answers.close()


class _Answers:
    """Those to one gateway."""

    def __init__(self) -> None:
        self._frame = pb.StreamResponse()
        self._outputs: dict[str, pb.RequestOutput] = {}  # of the frame
        self._news = asyncio.Event()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._held: dict[str, asyncio.Event] = {}

    async def frame(self) -> pb.StreamResponse:
        """Return what has been said since the last time."""
        await self._news.wait()
        self._news.clear()
        frame, self._frame, self._outputs = self._frame, pb.StreamResponse(), {}
        return frame

    def _output(self, request_id: str, num_said: int) -> pb.RequestOutput:
        """Return the request's only entry in the next frame."""
        if request_id not in self._outputs:
            self._outputs[request_id] = self._frame.outputs.add(
                request_id=request_id, first_token_index=num_said
            )
        self._news.set()
        return self._outputs[request_id]

    async def read(self, requests: AsyncIterator[pb.StreamRequest]) -> None:
        async for request in requests:
            match request.WhichOneof("message"):
                case "submit":
                    for submit in answers_of(request.submit):
                        self._take(submit)
                case "abort" if task := self._tasks.get(request.abort.request_id):
                    task.cancel()
                case "hold":
                    for hold in request.hold.requests:
                        if running := self._held.get(hold.request_id):
                            (running.clear if hold.held else running.set)()

    def close(self) -> None:
        for task in self._tasks.values():
            task.cancel()

    def _take(self, submit: pb.Submit) -> None:
        self._frame.accepted.add(request_id=submit.request_id, num_prompt_tokens=NUM_PROMPT_TOKENS)
        self._news.set()
        said = submit.text or "".join(message.content for message in submit.chat.messages)
        if said not in (LONG, COUNT):
            num_tokens = min(submit.sampling.max_tokens or NUM_SHORT, NUM_SHORT)
            self._say(submit, 0, num_tokens)
            self._end(submit, num_tokens, LENGTH)
            return
        id = submit.request_id
        self._held[id] = asyncio.Event()
        self._held[id].set()
        self._tasks[id] = asyncio.create_task(self._go_on(submit, counts=said == COUNT))

    async def _go_on(self, submit: pb.Submit, *, counts: bool) -> None:
        """Say much, piece by piece."""
        burst, interval_s, most = LONG_BURST, LONG_INTERVAL_S, NUM_LONG
        if counts:
            burst, interval_s, most = 1, COUNT_INTERVAL_S, NUM_COUNTED
        num_said, ending = 0, LENGTH
        try:
            while num_said < most:
                await self._held[submit.request_id].wait()
                self._say(submit, num_said, burst)
                num_said += burst
                await asyncio.sleep(interval_s)
        except asyncio.CancelledError:
            ending = _CANCELLED
        finally:
            self._end(submit, num_said, ending)
            del self._tasks[submit.request_id], self._held[submit.request_id]

    def _say(self, submit: pb.Submit, num_said: int, num_tokens: int) -> None:
        token = pb.Token(id=1, text=f"{time.monotonic():.6f}")
        chosen = gen.Logprob(id=1, token=token.text, logprob=-1)
        if submit.sampling.HasField("logprobs"):
            token.logprobs.chosen.CopyFrom(chosen)
            token.logprobs.top.extend([chosen] * submit.sampling.logprobs)
        output = self._output(submit.request_id, num_said)
        output.tokens.extend([token] * num_tokens)
        if submit.echo and not num_said:
            output.prompt.text = submit.text
            if submit.sampling.HasField("logprobs"):
                output.prompt.logprobs.add(chosen=gen.Logprob(id=1, token=submit.text))
        if submit.returns_prompt_ids and not num_said:
            output.prompt.token_ids.extend(range(NUM_PROMPT_TOKENS))

    def _end(self, submit: pb.Submit, num_said: int, ending: pb.Ending) -> None:
        self._output(submit.request_id, num_said).ending.CopyFrom(ending)


async def serve(port: int) -> None:
    server = aio.server(options=[("grpc.max_receive_message_length", 64 << 20)])
    pb_grpc.add_ExecutorServiceServicer_to_server(FuzzedExecutor(), server)
    server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    await server.wait_for_termination()


if __name__ == "__main__":
    uvloop.run(serve(int(sys.argv[1])))
