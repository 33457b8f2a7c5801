"""The connection to one executor: one multiplexed stream, remade whenever it breaks."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TypeAlias

import structlog
from grpc import aio
from prometheus_client import Counter, Gauge

from evenflow.executor.v1 import executor_pb2 as pb
from evenflow.executor.v1 import executor_pb2_grpc as pb_grpc
from services.gateway import convert
from services.gateway.errors import BodyTooLargeError, LinkBrokenError, LinkStalledError
from services.gateway.executors.heartbeat import CHECK_INTERVAL_S, Heartbeat, StallLimits
from services.gateway.executors.inflight import InflightRequests
from services.gateway.executors.outbox import Outbox
from services.gateway.executors.probe import Probe
from services.gateway.executors.routing import Candidate, candidate_of
from services.gateway.types import (
    GenerationRequest,
    RequestId,
    RequestSink,
    Resume,
    ServedModel,
    estimated_num_tokens,
)
from services.generation.prompts import (
    ChatPrompt,
    TextPrompt,
    Tokenization,
    TokenizeOptions,
    TokenPrompt,
)
from services.generation.sampling_params import SamplingParams
from services.kit.clock import Clock, process_epoch
from services.kit.errors import InvalidRequestError, ServiceError, UnavailableError
from services.kit.rpc import make_channel, own_request_id, service_errors
from services.kit.telemetry.trace_context import TraceContext
from services.kit.transport import PLAIN, Transport
from services.kit.wire import read
from services.pacing.types import ServiceLevel
from services.reporting.load import ExecutorLoad

log = structlog.get_logger()

MIN_BACKOFF_S = 0.1
MAX_BACKOFF_S = 2.0
ENGINE_TIMEOUT_S = 10.0  # for an engine's next step, behind which it answers
MODEL_INFO_TIMEOUT_S = 5.0
MAX_SUBMIT_FRAC = 0.25  # of the largest message that the connection carries
LOST_MESSAGE = "the connection to the executor was lost"

CONNECTED = Gauge(
    "evenflow_gateway_executor_connected", "1 while the executor takes requests.", ["executor"]
)
DROPPED_LOADS = Counter(
    "evenflow_gateway_dropped_loads_total",
    "Reports of an executor's load that cannot be; this gateway's requests stood in for them.",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkOptions:
    """What the links of one gateway have in common."""

    gateway_id: str
    transport: Transport = PLAIN
    stalls: StallLimits = StallLimits()  # noqa: RUF009 - it is frozen


@dataclass(frozen=True, slots=True)
class Asked:
    """One answer, as it is asked for."""

    request: GenerationRequest
    sink: RequestSink  # hears what becomes of it
    trace: TraceContext | None = None  # that it is part of
    resume: Resume | None = None  # of a lone one: it was begun elsewhere


_Call: TypeAlias = "aio.StreamStreamCall[pb.StreamRequest, pb.StreamResponse]"


@dataclass(slots=True)
class _Session:
    """One life of the stream."""

    info: ServedModel
    stub: "pb_grpc.ExecutorServiceAsyncStub"
    outbox: Outbox
    inflight: InflightRequests
    heartbeat: Heartbeat
    candidate: Candidate  # as it was at the beginning
    load: ExecutorLoad | None = None  # newest that the executor told
    is_leaving: bool = False  # the executor is
    is_proven: bool = True  # its engine is taken to live


class ExecutorLink:
    """Submits requests to one executor and hands its answers to their sinks.

    Nothing is connected unless `run` runs. When the stream breaks, every request in hand fails
    with LinkBrokenError; the model is asked for again after each reconnect.
    """

    def __init__(
        self,
        address: str,
        options: LinkOptions,
        *,
        clock: Clock,
        changed: Callable[[], None] = lambda: None,
    ) -> None:
        """`changed` is called when the executor has been connected or lost, or begins to leave."""
        self.address = address
        self._options = options
        self._changed = changed
        self._clock = clock
        self._has_stalled = False  # nothing has shown since that the engine lives
        self._tells_nonsense = False  # of its load; it has been logged
        self._session: _Session | None = None
        self.is_gone = False  # it is not found any more, and takes nothing new
        self._num_calls = 0  # under way beside the stream

    @property
    def is_idle(self) -> bool:
        """Say whether nothing of this gateway is at the executor."""
        has_requests = self._session is not None and len(self._session.inflight) > 0
        return not has_requests and not self._num_calls

    @property
    def info(self) -> ServedModel | None:
        """Return what the executor serves, to any thread; None while it is not connected."""
        session = self._session
        return session.info if session else None

    @property
    def is_leaving(self) -> bool:
        """Say whether the executor is shutting down, and its requests should go on elsewhere."""
        return self._session is not None and self._session.is_leaving

    def candidate(self) -> Candidate | None:
        """Describe this executor for routing, to any thread; None while it takes no requests."""
        session = self._session
        if self.is_gone or session is None or session.is_leaving or not session.is_proven:
            return None
        return replace(
            session.candidate,
            num_inflight=len(session.inflight),
            load=session.load,
            num_unreported_tokens=session.inflight.num_unreported_tokens,
        )

    def submit(self, answers: Sequence[Asked], generation: int) -> None:
        """Hand over answers to one prompt, which differ in their ids, seeds and traces.

        Raises UnavailableError while not connected, DuplicateRequestError if an id is in hand,
        BodyTooLargeError for what might break the stream, which all requests share.
        """
        session = self._connected()
        first, *others = answers
        resume = first.resume
        submit = convert.submit_to_proto(first.request, generation, first.trace, resume)
        submit.further_answers.extend(
            convert.further_answer_to_proto(other.request, other.trace) for other in others
        )
        self._check_size(submit.ByteSize())
        session.inflight.add(
            {answer.request.request_id: answer.sink for answer in answers},
            num_known=0 if resume is None else resume.num_known_tokens,
            num_prompt_tokens=estimated_num_tokens(first.request.prompt),
        )
        session.outbox.submit(submit)

    def _check_size(self, num_bytes: int) -> None:
        most = int(MAX_SUBMIT_FRAC * self._options.transport.max_message_bytes)
        if num_bytes > most:
            raise BodyTooLargeError(f"the request is larger than {most} bytes")

    def abort(self, request_id: str) -> None:
        """Have a request ended; its sink hears how. Ignored if it is not in hand."""
        if self._session is not None and self._session.inflight.abort(request_id):
            self._session.outbox.abort(request_id)

    def abandon(self, request_id: str) -> None:
        """Have a request ended; its sink hears nothing more. Ignored if it is not in hand."""
        if self._session is not None and self._session.inflight.abandon(request_id):
            self._session.outbox.abort(request_id)

    def delivered(self, request_id: str, num_delivered: int) -> None:
        """Pass on how far a reader has come; ignored if the request is not in hand."""
        if self._session is not None and request_id in self._session.inflight:
            self._session.outbox.delivered(request_id, num_delivered)

    async def tokenize(
        self, prompt: TextPrompt | ChatPrompt, options: TokenizeOptions
    ) -> Tokenization:
        """Have the executor tokenise. Raises InvalidRequestError if it cannot be rendered,
        UnavailableError while not connected.
        """
        session = self._connected()
        request = convert.tokenize_to_proto(session.info.model, prompt, options)
        self._check_size(request.ByteSize())
        field = "messages" if isinstance(prompt, ChatPrompt) else "prompt"
        with self._calling(), _errors_about(field):
            return convert.tokenization_from_proto(await session.stub.Tokenize(request))

    async def detokenize(self, ids: Sequence[int], *, fair_key: str) -> str:
        """Have the executor turn tokens into text. Raises as `tokenize` does."""
        session = self._connected()
        request = pb.DetokenizeRequest(model=session.info.model, ids=ids, fair_key=fair_key)
        with self._calling(), _errors_about("tokens"):
            return (await session.stub.Detokenize(request)).text

    async def release_session(self, account: str, session_id: str) -> int:
        """Have the executor keep nothing for a session; return how many tokens it did. Raises
        ServiceError.
        """
        asked = pb.ReleaseSessionRequest(account=account, session_id=session_id)
        with self._calling(), service_errors():
            stub = self._connected().stub
            return (await stub.ReleaseSession(asked, timeout=ENGINE_TIMEOUT_S)).num_tokens

    async def kv_holders(self, limit: int) -> pb.GetKVHoldersResponse:
        """Return what holds KV there, at most `limit` entries of a kind. Raises ServiceError."""
        asked = pb.GetKVHoldersRequest(limit=limit)
        with self._calling(), service_errors():
            return await self._connected().stub.GetKVHolders(asked, timeout=ENGINE_TIMEOUT_S)

    @contextmanager
    def _calling(self) -> Iterator[None]:
        self._num_calls += 1
        try:
            yield
        finally:
            self._num_calls -= 1

    async def watch(self, max_updates_per_s: float) -> AsyncIterator[pb.WatchRequestsResponse]:
        """Yield what the executor's scheduler sees, until its stream ends. Raises ServiceError."""
        asked = pb.WatchRequestsRequest(max_updates_per_s=max_updates_per_s)
        call = self._connected().stub.WatchRequests(asked)
        try:
            with service_errors():
                async for update in call:
                    yield update
        finally:
            call.cancel()

    def _connected(self) -> _Session:
        if self._session is None:
            raise UnavailableError("the executor is not connected")
        return self._session

    def hold(self, request_id: str, held: bool) -> bool:
        """Have a request's generation held, or go on. False, and ignored, if it is not in hand."""
        if self._session is None or request_id not in self._session.inflight:
            return False
        self._session.outbox.hold(request_id, held)
        return True

    def pace(self, request_id: str, level: ServiceLevel) -> None:
        """Pass on what a request is promised from now on; ignored if it is not in hand."""
        if self._session is not None and request_id in self._session.inflight:
            self._session.outbox.pace(request_id, level)

    async def run(self) -> None:
        """Keep the stream open until cancelled. Never raises because of the executor."""
        backoff_s = MIN_BACKOFF_S
        try:
            async with await self._open() as channel:
                while True:
                    was_connected = await self._connect_once(pb_grpc.ExecutorServiceStub(channel))
                    backoff_s = MIN_BACKOFF_S if was_connected else backoff_s
                    await asyncio.sleep(backoff_s)
                    backoff_s = min(2 * backoff_s, MAX_BACKOFF_S)
        finally:
            self._lose(UnavailableError("the gateway is shutting down"))
            if self.is_gone:
                CONNECTED.remove(self.address)

    async def _open(self) -> aio.Channel:
        while True:
            try:
                return make_channel(self.address, transport=self._options.transport)
            except OSError as error:  # of certificates, which may be half written
                log.warning("certificates_not_read", error=type(error).__name__)
                await asyncio.sleep(MAX_BACKOFF_S)

    async def _connect_once(self, stub: "pb_grpc.ExecutorServiceAsyncStub") -> bool:
        """Run one life of the stream. Returns False if it did not come about."""
        was_connected, detail, how = False, "internal error; see server log", LinkBrokenError
        try:
            with service_errors():
                info = await stub.GetModelInfo(
                    pb.GetModelInfoRequest(), timeout=MODEL_INFO_TIMEOUT_S, wait_for_ready=True
                )
                was_connected = True
                await self._serve(stub, info)
        except ServiceError as failure:
            detail = str(failure)
            if has_stalled := isinstance(failure, LinkStalledError):
                how = type(failure)
            # One that could not be reached has ended, and is another one when it is back.
            self._has_stalled = has_stalled or (self._has_stalled and was_connected)
        except Exception:
            log.exception("executor_link_crashed", address=self.address)
        finally:
            self._lose(how(f"{LOST_MESSAGE}: {detail}"))
        if was_connected:
            log.warning("executor_lost", address=self.address, detail=detail)
        else:
            log.debug("executor_unreachable", address=self.address, detail=detail)
        return was_connected

    async def _serve(
        self, stub: "pb_grpc.ExecutorServiceAsyncStub", told: pb.GetModelInfoResponse
    ) -> None:
        """Carry one stream until it ends, which raises why."""
        info = convert.model_info_from_proto(told)
        call: _Call = stub.Stream()
        session = self._session = _Session(
            info,
            stub,
            Outbox(self._options.gateway_id, process_epoch()),
            InflightRequests(),
            Heartbeat(self._options.stalls, self._clock()),
            candidate_of(self.address, info),
            self._load(told.load) if told.HasField("load") else None,
        )
        self._changed()
        CONNECTED.labels(self.address).set(1)
        log.info("executor_connected", address=self.address, model=info.model)
        if self._has_stalled:
            self._probe(session)
        works = (_write(call, session.outbox), self._read(call, session), self._watch(session))
        tasks = [asyncio.create_task(work) for work in works]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            call.cancel()
            await asyncio.wait(tasks)

    async def _read(self, call: _Call, session: _Session) -> None:
        """Take frames until the stream ends, which is a LinkBrokenError at best."""
        async for frame in call:
            now_s = self._clock()
            is_told = frame.HasField("num_engine_steps")
            session.heartbeat.took(frame.num_engine_steps if is_told else None, now_s)
            for request_id in session.inflight.apply(frame, now_s):
                session.outbox.abort(request_id)
            if frame.HasField("load"):
                session.load = self._load(frame.load)
                session.inflight.reported()
            if frame.is_leaving and not session.is_leaving:
                session.is_leaving = True
                log.info("executor_leaving", address=self.address)
                self._changed()
        raise LinkBrokenError("the executor closed the stream")

    def _load(self, load: pb.Load) -> ExecutorLoad | None:
        """Return what an executor says of its load; None, and counted, if it cannot be."""
        try:
            return read(ExecutorLoad, load, "load")
        except InvalidRequestError as error:
            if not self._tells_nonsense:
                log.warning("executor_load_dropped", address=self.address, detail=str(error))
            self._tells_nonsense = True
            DROPPED_LOADS.inc()
            return None

    def _probe(self, session: _Session) -> None:
        """Have requests go elsewhere until the executor has answered one of a token."""

        def proven() -> None:
            self._has_stalled, session.is_proven = False, True
            self._changed()

        session.is_proven = False
        request = GenerationRequest(
            request_id=RequestId(own_request_id("probe")),
            model=session.info.model,
            prompt=TokenPrompt((0,)),
            sampling=SamplingParams(max_tokens=1),
        )
        self.submit([Asked(request, Probe(proven))], 1)

    async def _watch(self, session: _Session) -> None:
        """Raise LinkStalledError when the executor hangs."""
        inflight = session.inflight
        while True:
            await asyncio.sleep(CHECK_INTERVAL_S)
            now_s = self._clock()
            fault = session.heartbeat.fault(
                now_s, is_live=inflight.is_live, is_waited_for=inflight.is_waited_for(now_s)
            )
            if fault is not None:
                raise fault

    def _lose(self, error: ServiceError) -> None:
        session, self._session = self._session, None
        self._changed()
        CONNECTED.labels(self.address).set(0)
        if session is not None:
            session.outbox.close()
            session.inflight.fail_all(error)


@contextmanager
def _errors_about(field: str) -> Iterator[None]:
    """Raise a call's errors as service errors; one about the request is about `field`."""
    try:
        with service_errors():
            yield
    except InvalidRequestError as error:
        error.field = field
        raise


async def _write(call: _Call, outbox: Outbox) -> None:
    """Send what the outbox holds until cancelled or the stream ends, which the reader reports."""
    try:
        async for message in outbox.messages():
            await call.write(message)
    except (aio.AioRpcError, aio.BaseError, asyncio.InvalidStateError):
        return
