"""gRPC edge of the executor: check, convert, delegate. No state, no policy."""

import asyncio
from collections.abc import AsyncIterator
from functools import partial

from evenflow.executor.v1 import executor_pb2 as pb
from evenflow.executor.v1 import executor_pb2_grpc as pb_grpc
from services.executor import convert
from services.executor.serving.front import Front
from services.executor.serving.session import Session
from services.executor.types import Rejection
from services.kit.errors import InvalidRequestError
from services.kit.rpc import Context


class ExecutorServicer(pb_grpc.ExecutorServiceServicer):
    def __init__(self, front: Front, *, executor_id: str, epoch: int) -> None:
        """`epoch`: number of this start, greater for later ones."""
        self._front = front
        self._executor_id = executor_id
        self._epoch = epoch

    async def Stream(
        self, request_iterator: AsyncIterator[pb.StreamRequest], context: Context
    ) -> AsyncIterator[pb.StreamResponse]:
        hello = convert.hello_from_proto(await anext(request_iterator, None))
        session = self._front.open_session(hello.gateway_id, epoch=hello.epoch)
        name = f"read-{hello.gateway_id}"
        reader = asyncio.create_task(_read(request_iterator, session), name=name)
        reader.add_done_callback(partial(_on_input_end, session))

        def leave(ctx: Context) -> None:
            reader.cancel()
            self._front.close_session(session)

        # The one hook that runs at once, however the call ends.
        context.add_done_callback(leave)  # type: ignore[arg-type]  # the stub lacks Protocol
        async for frame in session.frames():
            yield convert.frame_to_proto(frame)

    async def GetModelInfo(
        self, request: pb.GetModelInfoRequest, context: Context
    ) -> pb.GetModelInfoResponse:
        info = self._front.engine.model_info(self._front.model_id)
        load = self._front.load_for_gateways()
        return convert.model_info_to_proto(
            info, load, executor_id=self._executor_id, epoch=self._epoch
        )

    async def Tokenize(self, request: pb.TokenizeRequest, context: Context) -> pb.TokenizeResponse:
        prompt, options = convert.tokenize_from_proto(request)
        return convert.tokenization_to_proto(
            await self._front.tokenize(request.model, prompt, options)
        )

    async def Detokenize(
        self, request: pb.DetokenizeRequest, context: Context
    ) -> pb.DetokenizeResponse:
        text = await self._front.detokenize(request.model, request.ids, fair_key=request.fair_key)
        return pb.DetokenizeResponse(text=text)

    async def ReleaseSession(
        self, request: pb.ReleaseSessionRequest, context: Context
    ) -> pb.ReleaseSessionResponse:
        if not request.session_id:
            raise InvalidRequestError("session_id is required", field="session_id")
        num_tokens = await self._front.release_session(request.account, request.session_id)
        return pb.ReleaseSessionResponse(num_tokens=num_tokens)

    async def GetKVHolders(
        self, request: pb.GetKVHoldersRequest, context: Context
    ) -> pb.GetKVHoldersResponse:
        limit = convert.holders_limit(request)
        return convert.kv_account_to_proto(await self._front.kv_account(limit))

    async def WatchRequests(
        self, request: pb.WatchRequestsRequest, context: Context
    ) -> AsyncIterator[pb.WatchRequestsResponse]:
        interval_s = convert.watch_interval_s(request)
        async for observation in self._front.observations(interval_s):
            yield convert.observation_to_proto(observation)


async def _read(messages: AsyncIterator[pb.StreamRequest], session: Session) -> None:
    """Pass a gateway's messages on until it sends no more."""
    async for message in messages:
        match message.WhichOneof("message"):
            case "submit":
                _submit(message.submit, session)
            case "abort":
                session.abort(message.abort.request_id)
            case "delivered":
                counts = message.delivered.counts
                session.take_delivered((c.request_id, c.num_delivered_tokens) for c in counts)
            case "hold":
                session.hold((r.request_id, r.held) for r in message.hold.requests)
            case "change_pace":
                session.repace(map(convert.pace_from_proto, message.change_pace.requests))
            case kind:
                raise InvalidRequestError(f"unexpected message: {kind}", field=kind or "message")


def _submit(submit: pb.Submit, session: Session) -> None:
    submissions = convert.submissions_from_proto(submit)
    if isinstance(submissions, Rejection):
        session.reject(convert.request_ids_from_proto(submit), submissions)
    else:
        session.submit(submissions)


def _on_input_end(session: Session, reader: asyncio.Task[None]) -> None:
    """End the session with the reader's error, or let it finish its requests."""
    if reader.cancelled():
        return
    error = reader.exception()
    if isinstance(error, Exception):
        session.end(error)
    else:
        session.end_input()
