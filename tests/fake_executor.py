"""An executor without an engine: a real gRPC server that speaks evenflow.executor.v1.

It answers every submit as its `Script` says. A test holds it still at the script's gates, plays
frames of its own, and sees what the gateway sent.
"""

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

import grpc
from grpc import aio

from evenflow.executor.v1 import executor_pb2 as pb
from evenflow.executor.v1 import executor_pb2_grpc as pb_grpc
from evenflow.gateway.v1 import generation_pb2 as gen
from lab.stack.ports import free_port
from lab.submits import answers_of
from services.kit.rpc import name_of_request
from services.kit.tls import server_credentials
from services.kit.transport import PLAIN, Certificates

MODEL = "test-model"
NUM_PROMPT_TOKENS = 7
EVENT_TIMEOUT_S = 600.0
FIRST_SURROGATE = 0xD800  # from here on the fake's tokens have no text
UNRENDERABLE = "unrenderable"  # what `Tokenize` refuses
NOTHING_MORE = pb.Submit()
PROMPT_DIGEST = 1 << 63  # of every prompt
FINGERPRINT = "like-any-other"  # of executors that are to be


def open_gate() -> asyncio.Event:
    gate = asyncio.Event()
    gate.set()
    return gate


@dataclass(kw_only=True)
class Script:
    """What happens to a request."""

    # One token each, as a text or whole; ids count from 100.
    texts: Sequence[str | pb.Token] = ("Hello", ",", " world")
    interval_s: float = 0.0  # between two steps
    tokens_per_step: int = 1  # in one frame, but for the last one's
    finish_reason: gen.FinishReason.ValueType = gen.FINISH_REASON_STOP
    num_reasoning_tokens: int | None = None  # told with the finish reason
    num_cached_tokens: int = 0  # so is this
    stop_string: str = ""  # and this
    retained: gen.Retained | None = None  # and this
    failure: pb.Failure | None = None  # instead of the finish reason
    reject: pb.Rejected | None = None  # instead of everything; its request id is filled in
    accepting: asyncio.Event = field(default_factory=open_gate)  # nothing is answered before
    generating: asyncio.Event = field(default_factory=open_gate)  # no token comes before
    midway: asyncio.Event = field(default_factory=open_gate)  # no second half comes before
    ending: asyncio.Event = field(default_factory=open_gate)  # no ending comes before


def make_token(id: int, said: str | pb.Token) -> pb.Token:
    """Return a token that says something, with an id; one that says no text is not read."""
    if isinstance(said, str):
        return pb.Token(id=id, text=said)
    token = pb.Token(id=id)
    token.MergeFrom(said)
    token.not_read |= bool(said.reasoning or said.tool_calls)
    return token


def make_logprobs(token: pb.Token, num_likeliest: int) -> gen.TokenLogprobs:
    """Return made-up probabilities: the chosen token is the second of the likeliest ones."""
    chosen = gen.Logprob(id=token.id, token=token.text, logprob=-1)
    likeliest = [gen.Logprob(id=1, token="<1>", logprob=-0.5), chosen]
    likeliest += [gen.Logprob(id=k, token=f"<{k}>", logprob=-k) for k in range(2, 20)]
    return gen.TokenLogprobs(chosen=chosen, top=likeliest[:num_likeliest])


def prompt_ids(submit: pb.Submit) -> Sequence[int]:
    """Return the prompt's own ids, made-up ones where it has none."""
    return list(submit.token_ids.ids) or range(NUM_PROMPT_TOKENS)


def make_prompt(submit: pb.Submit) -> gen.EchoedPrompt:
    """Return what is asked for of the prompt; its text is two tokens, the first character and the
    rest.
    """
    ids = prompt_ids(submit) if submit.returns_prompt_ids else ()
    if not submit.echo:
        return gen.EchoedPrompt(token_ids=ids)
    text = submit.text or f"{list(submit.token_ids.ids)}"
    if not submit.sampling.HasField("logprobs"):
        return gen.EchoedPrompt(text=text, token_ids=ids)
    first = gen.TokenLogprobs(chosen=gen.Logprob(id=8, token=text[0]))
    rest = make_logprobs(pb.Token(id=9, text=text[1:]), submit.sampling.logprobs)
    return gen.EchoedPrompt(text=text, logprobs=[first, rest], token_ids=ids)


class Session:
    """One gateway's stream, from the executor's side."""

    def __init__(self, max_model_len: int) -> None:
        self.frames: asyncio.Queue[pb.StreamResponse | None] = asyncio.Queue()
        self.tasks: dict[str, asyncio.Task[None]] = {}
        self.running: defaultdict[str, asyncio.Event] = defaultdict(open_gate)  # unless held
        self.ids: dict[str, str] = {}  # of requests, by what their clients call them
        self.end_code = grpc.StatusCode.OK
        self.num_steps: int | None = None  # None: it is not said
        self.is_leaving = False
        self._sequence = 0
        self._num_left = max_model_len - NUM_PROMPT_TOKENS

    def send(
        self,
        *,
        sequence: int | None = None,
        accepted: Sequence[pb.Accepted] = (),
        rejected: Sequence[pb.Rejected] = (),
        outputs: Sequence[pb.RequestOutput] = (),
        load: pb.Load | None = None,
    ) -> None:
        """Queue one frame; with `sequence` one that is out of order. Outputs may bear names."""
        for output in outputs:
            output.request_id = self.ids.get(output.request_id, output.request_id)
        frame = pb.StreamResponse(
            sequence=self._sequence if sequence is None else sequence,
            accepted=accepted,
            rejected=rejected,
            outputs=outputs,
            num_engine_steps=self.num_steps,
            is_leaving=self.is_leaving,
            load=load,
        )
        if sequence is None:
            self._sequence += 1
        self.frames.put_nowait(frame)

    def acceptance(self, submit: pb.Submit) -> pb.Accepted:
        """Take a request, its output cut to what the context leaves."""
        asked_for = submit.sampling.max_tokens
        return pb.Accepted(
            request_id=submit.request_id,
            num_prompt_tokens=NUM_PROMPT_TOKENS,
            max_tokens=submit.resume.max_tokens or min(asked_for or self._num_left, self._num_left),
            prompt_digest=PROMPT_DIGEST,
        )

    def close(self, code: grpc.StatusCode) -> None:
        """End the stream from the executor's side."""
        self.end_code = code
        self.frames.put_nowait(None)

    def send_tokens(
        self,
        request_id: str,
        first_index: int,
        texts: Sequence[str | pb.Token],
        asked: pb.Submit = NOTHING_MORE,
    ) -> None:
        """Send tokens, and what was asked for beside them."""
        tokens = [make_token(100 + first_index + k, text) for k, text in enumerate(texts)]
        if asked.sampling.HasField("logprobs"):
            for token in tokens:
                token.logprobs.CopyFrom(make_logprobs(token, asked.sampling.logprobs))
        output = pb.RequestOutput(
            request_id=request_id, first_token_index=first_index, tokens=tokens
        )
        if (asked.echo or asked.returns_prompt_ids) and first_index == 0:
            output.prompt.CopyFrom(make_prompt(asked))
        self.send(outputs=[output])

    def end(self, request_id: str, num_tokens: int, ending: pb.Ending) -> None:
        self.send(
            outputs=[
                pb.RequestOutput(request_id=request_id, first_token_index=num_tokens, ending=ending)
            ]
        )


class FakeExecutor(pb_grpc.ExecutorServiceServicer):
    """Serves one model. `start` and `kill` may alternate; the port stays."""

    def __init__(
        self,
        *,
        model: str = MODEL,
        executor_id: str = "executor-0",
        max_model_len: int = 4096,
        default_sampling: gen.SamplingParams | None = None,
        certificates: Certificates | None = None,
        caches_prefixes: bool = False,
        root: str = "",
        adapters: Sequence[pb.Adapter] = (),
        template_variables: Sequence[str] = (),
        fingerprint: str = "",
        numerics: str = "",
        host: str = "127.0.0.1",
        port: int = 0,
    ) -> None:
        self._certificates = certificates
        self.caches_prefixes = caches_prefixes
        self.root = root
        self.adapters = adapters
        self.template_variables = template_variables
        self.fingerprint = fingerprint
        self.numerics = numerics
        self.is_repeatable = True
        self.load: pb.Load | None = None  # told with the model
        self.model = model
        self.executor_id = executor_id
        self.max_model_len = max_model_len
        self.default_sampling = default_sampling
        self.script = Script()
        self.script_for: Callable[[pb.Submit], Script] = lambda _: self.script
        self.submits: list[pb.Submit] = []  # one for each answer
        self.num_answers: list[int] = []  # of each message that submits
        self.tokenized: list[pb.TokenizeRequest] = []
        self.detokenized: list[pb.DetokenizeRequest] = []
        self.aborted: list[str] = []
        self.delivered: dict[str, int] = {}
        self.delivered_messages: list[pb.Delivered] = []
        self.holds: list[tuple[str, bool]] = []  # in the order in which they came
        self.paces: list[pb.RequestPace] = []  # likewise
        self.gateway_ids: list[str] = []
        self.epochs: list[int] = []  # of its streams
        self.observed = pb.WatchRequestsResponse()  # what whoever watches sees
        self.observing = open_gate()  # nobody sees anything before
        self.watched_at: list[float] = []  # rates asked for
        self.sessions: dict[tuple[str, str], int] = {}  # tokens kept, by account and session
        self.holders = pb.GetKVHoldersResponse()  # what holds KV
        self.holder_limits: list[int] = []  # of entries, that were asked for
        self.num_watchers = 0
        self.session: Session | None = None  # newest
        self.host, self.port = host, port or free_port()
        self.num_starts = 0
        self._server: aio.Server | None = None
        self._news = asyncio.Condition()

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"

    async def start(self) -> None:
        self.num_starts += 1
        # It is no strike of the gateway's to ping, however long a test lasts.
        options = [
            ("grpc.so_reuseport", 0),
            ("grpc.http2.max_ping_strikes", 0),
            ("grpc.max_receive_message_length", PLAIN.max_message_bytes),
        ]
        self._server = aio.server(options=options)
        pb_grpc.add_ExecutorServiceServicer_to_server(self, self._server)
        if self._certificates is None:
            self._server.add_insecure_port(self.address)
        else:
            credentials = server_credentials(self._certificates)
            self._server.add_secure_port(self.address, credentials)
        await self._server.start()

    async def kill(self) -> None:
        """Cut every stream without a word, and stop listening."""
        if self._server is not None:
            await self._server.stop(grace=None)
            self._server = None

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until `condition` holds; it is looked at whenever the gateway sent something."""
        async with asyncio.timeout(EVENT_TIMEOUT_S), self._news:
            await self._news.wait_for(condition)

    async def GetModelInfo(  # noqa: N802
        self, request: pb.GetModelInfoRequest, context: aio.ServicerContext
    ) -> pb.GetModelInfoResponse:
        return pb.GetModelInfoResponse(
            executor_id=self.executor_id,
            model=self.model,
            max_model_len=self.max_model_len,
            default_sampling=self.default_sampling,
            caches_prefixes=self.caches_prefixes,
            root=self.root,
            adapters=self.adapters,
            template_variables=self.template_variables,
            fingerprint=self.fingerprint,
            numerics=self.numerics,
            is_repeatable=self.is_repeatable,
            epoch=self.num_starts,
            block_size=16,
            num_gpu_blocks=1_000,
            layers_per_group=1,
            pipeline_parallel_size=1,
            num_layers=8,
            max_loras=2 if self.adapters else 0,
            load=self.load,
        )

    async def ReleaseSession(  # noqa: N802
        self, request: pb.ReleaseSessionRequest, context: aio.ServicerContext
    ) -> pb.ReleaseSessionResponse:
        num_tokens = self.sessions.pop((request.account, request.session_id), 0)
        return pb.ReleaseSessionResponse(num_tokens=num_tokens)

    async def GetKVHolders(  # noqa: N802
        self, request: pb.GetKVHoldersRequest, context: aio.ServicerContext
    ) -> pb.GetKVHoldersResponse:
        self.holder_limits.append(request.limit)
        return self.holders

    async def WatchRequests(  # noqa: N802
        self, request: pb.WatchRequestsRequest, context: aio.ServicerContext
    ) -> AsyncIterator[pb.WatchRequestsResponse]:
        self.watched_at.append(request.max_updates_per_s)
        self.num_watchers += 1
        try:
            while True:
                await self.observing.wait()
                yield self.observed
                await asyncio.sleep(1 / request.max_updates_per_s)
        finally:
            self.num_watchers -= 1

    async def Tokenize(  # noqa: N802
        self, request: pb.TokenizeRequest, context: aio.ServicerContext
    ) -> pb.TokenizeResponse:
        """Take every character for a token."""
        self.tokenized.append(request)
        text = request.text or "".join(message.content for message in request.chat.messages)
        if text == UNRENDERABLE:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "cannot be rendered")
        return pb.TokenizeResponse(
            ids=map(ord, text),
            max_model_len=self.max_model_len,
            texts=text if request.with_texts else (),
        )

    async def Detokenize(  # noqa: N802
        self, request: pb.DetokenizeRequest, context: aio.ServicerContext
    ) -> pb.DetokenizeResponse:
        self.detokenized.append(request)
        text = "".join(chr(id) if id < FIRST_SURROGATE else "?" for id in request.ids)
        return pb.DetokenizeResponse(text=text)

    async def Stream(  # noqa: N802
        self, requests: AsyncIterator[pb.StreamRequest], context: aio.ServicerContext
    ) -> AsyncIterator[pb.StreamResponse]:
        first = await anext(requests)
        if first.WhichOneof("message") != "hello":
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "hello comes first")
        self.gateway_ids.append(first.hello.gateway_id)
        self.epochs.append(first.hello.epoch)
        session = self.session = Session(self.max_model_len)
        reader = asyncio.create_task(self._read(requests, session))
        try:
            while (frame := await session.frames.get()) is not None:
                yield frame
            if session.end_code is not grpc.StatusCode.OK:
                await context.abort(session.end_code, "by the test")
        finally:
            reader.cancel()
            for task in session.tasks.values():
                task.cancel()

    async def _read(self, requests: AsyncIterator[pb.StreamRequest], session: Session) -> None:
        async for request in requests:
            async with self._news:
                if request.WhichOneof("message") == "submit":
                    await self._start_all(request.submit, session)
                else:
                    self._take(request, session)
                self._news.notify_all()
        session.frames.put_nowait(None)

    def _take(self, request: pb.StreamRequest, session: Session) -> None:
        match request.WhichOneof("message"):
            case "abort":
                self.aborted.append(name_of_request(request.abort.request_id))
                session.tasks[request.abort.request_id].cancel()
            case "hold":
                for request_hold in request.hold.requests:
                    self._hold(request_hold, session)
            case "change_pace":
                self.paces += request.change_pace.requests
            case "delivered":
                self.delivered_messages.append(request.delivered)
                for count in request.delivered.counts:
                    self.delivered[name_of_request(count.request_id)] = count.num_delivered_tokens

    async def _start_all(self, submit: pb.Submit, session: Session) -> None:
        self.num_answers.append(1 + len(submit.further_answers))
        for answer in answers_of(submit):
            self._start(answer, session)
            await asyncio.sleep(0)  # a copy of a large prompt takes a millisecond

    def _start(self, submit: pb.Submit, session: Session) -> None:
        self.submits.append(submit)
        session.ids[name_of_request(submit.request_id)] = submit.request_id
        playing = _play(session, submit, self.script_for(submit))
        session.tasks[submit.request_id] = asyncio.create_task(playing)

    def _hold(self, hold: pb.RequestHold, session: Session) -> None:
        self.holds.append((name_of_request(hold.request_id), hold.held))
        running = session.running[hold.request_id]
        if hold.held:
            running.clear()
        else:
            running.set()


async def _play(session: Session, submit: pb.Submit, script: Script) -> None:
    """Act out one request; a cancelled one ends as the contract says."""
    request_id, num_tokens, is_accepted = submit.request_id, 0, False
    try:
        await script.accepting.wait()
        if script.reject is not None:
            rejected = pb.Rejected()
            rejected.CopyFrom(script.reject)
            rejected.request_id = request_id
            session.send(rejected=[rejected])
            return
        session.send(accepted=[session.acceptance(submit)])
        is_accepted = True
        await script.generating.wait()
        num_tokens = len(submit.resume.output_ids) - submit.resume.num_retold_tokens
        while texts := script.texts[num_tokens : num_tokens + script.tokens_per_step]:
            if num_tokens == len(script.texts) // 2:
                await script.midway.wait()
            await session.running[request_id].wait()
            session.send_tokens(request_id, num_tokens, texts, submit)
            num_tokens += len(texts)
            await asyncio.sleep(script.interval_s)
        await script.ending.wait()
    except asyncio.CancelledError:
        if not is_accepted:
            session.send(accepted=[pb.Accepted(request_id=request_id)])
        session.end(request_id, num_tokens, pb.Ending(finish_reason=gen.FINISH_REASON_CANCELLED))
        raise
    if script.failure is not None:
        session.end(request_id, num_tokens, pb.Ending(failure=script.failure))
    else:
        ending = pb.Ending(
            finish_reason=script.finish_reason,
            num_reasoning_tokens=script.num_reasoning_tokens,
            num_cached_tokens=script.num_cached_tokens,
            stop_string=script.stop_string,
            retained=script.retained,
        )
        session.end(request_id, num_tokens, ending)
