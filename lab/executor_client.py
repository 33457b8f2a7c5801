"""A gateway's side of the step stream, which checks the stream's promises as it reads."""

import asyncio
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

from grpc import aio

from evenflow.executor.v1 import executor_pb2 as pb
from evenflow.executor.v1 import executor_pb2_grpc as pb_grpc
from evenflow.gateway.v1 import generation_pb2 as gen

ANSWER_TIMEOUT_S = 900.0  # a guard against hangs
MODEL = "exactness"


@dataclass(kw_only=True)
class Answer:
    """What came back for one request."""

    num_known: int = 0  # tokens that the request came with
    taken: pb.Accepted | None = None
    rejected: pb.Rejected | None = None
    tokens: list[pb.Token] = field(default_factory=list)
    arrived_s: list[float] = field(default_factory=list)  # one per token, monotonic
    ending: pb.Ending | None = None
    prompt: gen.EchoedPrompt | None = None  # given back
    done: asyncio.Event = field(default_factory=asyncio.Event)
    accepted: asyncio.Event = field(default_factory=asyncio.Event)
    started: asyncio.Event = field(default_factory=asyncio.Event)  # has a token

    @property
    def num_prompt_tokens(self) -> int | None:
        return None if self.taken is None else self.taken.num_prompt_tokens

    @property
    def ids(self) -> list[int]:
        return [token.id for token in self.tokens]

    @property
    def text(self) -> str:
        return "".join(token.text for token in self.tokens)

    @property
    def finish_reason(self) -> str:
        assert self.ending is not None
        assert self.ending.WhichOneof("how") == "finish_reason", self.ending
        return gen.FinishReason.Name(self.ending.finish_reason).removeprefix("FINISH_REASON_")

    @property
    def reject_code(self) -> str:
        assert self.rejected is not None, self
        return pb.RejectCode.Name(self.rejected.code).removeprefix("REJECT_CODE_")


def make_submit(request_id: str, **overrides: Any) -> pb.Submit:
    """Return a submit; `sampling` may be a dict, `chat` a single user turn."""
    fields: dict[str, Any] = {"generation": 1, "model": MODEL, **overrides}
    if isinstance(fields.get("sampling"), dict):
        fields["sampling"] = gen.SamplingParams(**fields["sampling"])
    if isinstance(fields.get("chat"), str):
        turn = gen.ChatMessage(role="user", content=fields["chat"])
        fields["chat"] = pb.Chat(messages=[turn])
    return pb.Submit(request_id=request_id, **fields)


def places(
    scored: Sequence[gen.TokenLogprobs],
) -> list[dict[str, tuple[float, str]]]:
    """Return what the executor sent as the stock engine's answers have it, in JSON."""
    return [
        {str(one.id): (one.logprob, one.token) for one in (place.chosen, *place.top)}
        for place in scored
    ]


def resume_of(answer: Answer, num_tokens: int) -> pb.Resume:
    """Return what another executor needs to go on behind the first tokens of an answer."""
    assert answer.taken is not None
    assert answer.ending is not None
    return pb.Resume(
        output_ids=answer.ids[:num_tokens],
        max_tokens=answer.taken.max_tokens,
        num_delivered_tokens=num_tokens // 2,
        last_due_age_s=0.5,
        arrived_age_s=3.0,
        num_cached_tokens=answer.ending.num_cached_tokens,
        prompt_digest=answer.taken.prompt_digest,
    )


class GatewayStream:
    """One open stream to an executor."""

    def __init__(self, address: str, *, gateway_id: str = "gateway-test", epoch: int = 0) -> None:
        self._channel = aio.insecure_channel(address)
        self._hello = pb.Hello(gateway_id=gateway_id, epoch=epoch)
        self.stub = pb_grpc.ExecutorServiceStub(self._channel)
        self.answers: dict[str, Answer] = defaultdict(Answer)
        self.frames: list[pb.StreamResponse] = []
        self._writing = asyncio.Lock()

    async def __aenter__(self) -> Self:
        self._call = self.stub.Stream()
        await self.send(hello=self._hello)
        self.reader = asyncio.create_task(self._read())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.drop()
        await asyncio.wait([self.reader], timeout=ANSWER_TIMEOUT_S)
        if self.reader.done() and not self.reader.cancelled():
            self.reader.exception()
        await self._channel.close()

    @property
    def load(self) -> pb.Load:
        """Return what the executor told last of its load."""
        told = (frame.load for frame in reversed(self.frames) if frame.HasField("load"))
        return next(told, pb.Load())

    def drop(self) -> None:
        """Break the stream off, as a gateway does that dies."""
        self._call.cancel()

    async def send(self, **message: Any) -> None:
        async with self._writing:  # a gRPC call takes one write at a time
            await self._call.write(pb.StreamRequest(**message))

    async def end_input(self) -> None:
        """Say that nothing more will be sent; the answers still come."""
        await self._call.done_writing()

    async def submit(self, request_id: str, **fields: Any) -> Answer:
        """Submit a request and return its answer, which fills as frames arrive."""
        answer, submit = self.answers[request_id], make_submit(request_id, **fields)
        answer.num_known = len(submit.resume.output_ids)
        await self.send(submit=submit)
        return answer

    async def ask(self, request_id: str, **fields: Any) -> Answer:
        """Submit a request and wait for its end."""
        answer = await self.submit(request_id, **fields)
        await self.wait(answer.done)
        return answer

    async def abort(self, answer: Answer, request_id: str) -> None:
        """Abort a request that has an answer, and wait for its end."""
        await self.send(abort=pb.Abort(request_id=request_id))
        await self.wait(answer.done)

    async def hold(self, request_id: str, *, held: bool = True) -> None:
        """Say that a request's reader has stopped, or reads again."""
        await self.send(hold=pb.Hold(requests=[pb.RequestHold(request_id=request_id, held=held)]))

    async def updates(self) -> AsyncIterator[pb.WatchRequestsResponse]:
        """Yield what the scheduler has of its requests; a watch that stands still is an error."""
        watch = self.stub.WatchRequests(
            pb.WatchRequestsRequest(max_updates_per_s=20), timeout=ANSWER_TIMEOUT_S
        )
        try:
            async for update in watch:
                yield update
        finally:
            watch.cancel()

    async def observed(
        self, request_id: str, state: "pb.RequestState.ValueType"
    ) -> pb.ObservedRequest:
        """Return what the scheduler has of a request as soon as it is in a state."""
        async for update in self.updates():
            for request in update.requests:
                if (request.request_id, request.state) == (request_id, state):
                    return request
        raise AssertionError("the watch ended")

    async def wait(self, event: asyncio.Event) -> None:
        """Wait for `event`; raises what ended the stream if that comes first."""
        waiter = asyncio.create_task(event.wait())
        await asyncio.wait(
            [waiter, self.reader],
            timeout=ANSWER_TIMEOUT_S,
            return_when=asyncio.FIRST_COMPLETED,
        )
        waiter.cancel()
        if not event.is_set():
            assert self.reader.done(), "no answer in time"
            self.reader.result()
            raise AssertionError("the stream ended first")

    async def has_tokens(self, answer: Answer, num_tokens: int) -> None:
        """Wait until `answer` has come as far as `num_tokens`."""
        await self.until(lambda: len(answer.tokens) >= num_tokens)

    async def until(self, holds: Callable[[], bool]) -> None:
        """Wait until what has come makes something true."""
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            while True:
                if holds():
                    return
                await asyncio.sleep(0.02)

    async def _read(self) -> None:
        async for frame in self._call:
            assert frame.sequence == len(self.frames)
            self.frames.append(frame)
            self._take(frame)

    def _take(self, frame: pb.StreamResponse) -> None:
        for accepted in frame.accepted:
            assert self.answers[accepted.request_id].taken is None
            self.answers[accepted.request_id].taken = accepted
            self.answers[accepted.request_id].accepted.set()
        for rejected in frame.rejected:
            answer = self.answers[rejected.request_id]
            answer.rejected = rejected
            answer.done.set()
        for output in frame.outputs:
            self._take_output(output)

    def _take_output(self, output: pb.RequestOutput) -> None:
        answer = self.answers[output.request_id]
        assert answer.taken is not None, "tokens before the acceptance"
        assert answer.ending is None, "something after the ending"
        assert output.first_token_index == answer.num_known + len(answer.tokens), "a gap"
        if output.HasField("prompt"):
            assert output.tokens, "an echo without a token"
            assert not answer.tokens, "an echo after the first token"
            answer.prompt = output.prompt
        answer.tokens.extend(output.tokens)
        answer.arrived_s.extend([time.monotonic()] * len(output.tokens))
        if answer.tokens:
            answer.started.set()
        if output.HasField("ending"):
            answer.ending = output.ending
            answer.done.set()
