"""gRPC edge of the gateway: check, convert, delegate. No state, no policy."""

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from evenflow.gateway.v1 import gateway_pb2 as pb
from evenflow.gateway.v1 import gateway_pb2_grpc as pb_grpc
from services.gateway import convert
from services.gateway.access.api_keys import bind_address
from services.gateway.access.fairness import stated_fairness_id
from services.gateway.checks import check_begun, session_of
from services.gateway.errors import UnknownRequestError
from services.gateway.live.dispatcher import Dispatcher
from services.gateway.live.repacing import repace
from services.gateway.resumable.step_queue import StepQueue
from services.gateway.resumable.stream import ResumableStream
from services.gateway.resumable.streams import ResumableStreams
from services.gateway.types import Finish, GenerationRequest, RequestId, Token
from services.generation.convert import hint_from_proto, prompt_to_proto, sampling_from_proto
from services.generation.logprobs import EchoedPrompt
from services.generation.prompts import Prompt
from services.generation.retention import RetentionHint
from services.generation.sampling_params import SamplingParams
from services.kit.errors import InvalidRequestError
from services.kit.rpc import REQUEST_ID_KEY, Context, current_request_id
from services.kit.telemetry.tracing import bind_parent, context_from
from services.pacing.deposit import release_interval_s

PACE_FIELDS = MappingProxyType(
    {name: name for name in ("consumption_rate_tps", "slo_tpot_s", "slo_tbt_s")}
)


@dataclass(frozen=True, slots=True)
class _Part:
    """What one message of an answer says."""

    tokens: Sequence[Token]
    finish: Finish | None = None
    prompt: EchoedPrompt | None = None


class GatewayServicer(pb_grpc.GatewayServiceServicer):
    def __init__(self, dispatcher: Dispatcher, streams: ResumableStreams) -> None:
        self._dispatcher = dispatcher
        self._streams = streams

    async def Generate(
        self, request: pb.GenerateRequest, context: Context
    ) -> AsyncIterator[pb.GenerateResponse]:
        prompt = convert.prompt_from_proto(request)
        # As in vLLM's server, a model's own limit is for conversations.
        default = replace(self._dispatcher.default_sampling(request.model), max_tokens=None)
        checked = _to_generation_request(request, prompt, default, _text_metadata(context))
        checked = replace(checked, echo=request.echo)
        check_begun(checked)
        async for part in self._stream(checked, context):
            yield pb.GenerateResponse(
                tokens=map(convert.token_to_proto, part.tokens),
                finish=convert.finish_to_proto(part.finish) if part.finish else None,
                prompt=prompt_to_proto(part.prompt) if part.prompt else None,
            )

    async def Chat(
        self, request: pb.ChatRequest, context: Context
    ) -> AsyncIterator[pb.ChatResponse]:
        checked = _to_generation_request(
            request,
            convert.chat_from_proto(request.messages, request.options),
            self._dispatcher.default_sampling(request.model),
            _text_metadata(context),
        )
        check_begun(checked)
        async for part in self._stream(checked, context):
            yield pb.ChatResponse(
                tokens=map(convert.token_to_proto, part.tokens),
                finish=convert.finish_to_proto(part.finish) if part.finish else None,
                prompt=prompt_to_proto(part.prompt) if part.prompt else None,
            )

    async def Attach(
        self, request: pb.AttachRequest, context: Context
    ) -> AsyncIterator[pb.AttachResponse]:
        if not request.request_id:
            raise InvalidRequestError("request_id is required", field="request_id")
        stream = self._streams.named(RequestId(request.request_id))
        if stream.num_answers > 1:
            raise UnknownRequestError(f'"{request.request_id}" has several answers')
        if not 0 <= request.num_tokens <= stream.num_steps - stream.is_over:
            rule = "the stream has fewer tokens so far"
            raise InvalidRequestError(f"num_tokens: {rule}", field="num_tokens")
        async for part in self._read(stream, request.num_tokens, context):
            yield pb.AttachResponse(
                tokens=map(convert.token_to_proto, part.tokens),
                finish=convert.finish_to_proto(part.finish) if part.finish else None,
                prompt=prompt_to_proto(part.prompt) if part.prompt else None,
            )

    async def Cancel(self, request: pb.CancelRequest, context: Context) -> pb.CancelResponse:
        if not request.request_id:
            raise InvalidRequestError("request_id is required", field="request_id")
        self._dispatcher.cancel(RequestId(request.request_id))
        return pb.CancelResponse()

    async def ChangePace(
        self, request: pb.ChangePaceRequest, context: Context
    ) -> pb.ChangePaceResponse:
        if not request.request_id:
            raise InvalidRequestError("request_id is required", field="request_id")
        bounds = {field.name for field, _ in request.ListFields()} - {"request_id"}
        stated = {name: getattr(request, name) or None for name in bounds}
        level = repace(self._dispatcher, RequestId(request.request_id), stated, PACE_FIELDS)
        return pb.ChangePaceResponse(release_interval_s=release_interval_s(level))

    async def ReleaseSession(
        self, request: pb.ReleaseSessionRequest, context: Context
    ) -> pb.ReleaseSessionResponse:
        if not request.session_id:
            raise InvalidRequestError("session_id is required", field="session_id")
        num_tokens = await self._dispatcher.release_session(request.session_id)
        return pb.ReleaseSessionResponse(num_tokens=num_tokens)

    async def ListModels(
        self, request: pb.ListModelsRequest, context: Context
    ) -> pb.ListModelsResponse:
        return pb.ListModelsResponse(models=map(convert.model_to_proto, self._dispatcher.models()))

    async def _stream(self, request: GenerationRequest, context: Context) -> AsyncIterator[_Part]:
        """Yield token batches, the first one with an echo, then the ending.

        A call that ends early aborts the request, unless it is resumable.
        """
        await context.send_initial_metadata(((REQUEST_ID_KEY, request.request_id),))
        bind_parent(context_from(_text_metadata(context)))
        bind_address(convert.host_from_peer(context.peer()))
        if request.is_resumable:
            stream = await self._streams.begin([request])
            async for part in self._read(stream, 0, context):
                yield part
            return
        async with self._dispatcher.generate(request) as generation:
            # A cancelled call does not close this generator before it is collected.
            context.add_done_callback(lambda _: self._dispatcher.drop(generation))  # type: ignore[arg-type]
            is_first = not request.num_delivered_tokens  # else the client has the prompt, too
            async for tokens in generation.batches():
                yield _Part(tokens, prompt=generation.prompt if is_first else None)
                is_first = False
            yield _Part((), finish=generation.finish)

    async def _read(
        self, stream: ResumableStream, num_had: int, context: Context
    ) -> AsyncIterator[_Part]:
        """Yield what comes after so many tokens of a stream of one answer."""
        queue = StepQueue(stream, num_had)
        # A cancelled call does not close this generator before it is collected.
        context.add_done_callback(lambda _: queue.close())  # type: ignore[arg-type]
        is_first = not num_had
        async for steps in queue.batches():
            tokens = [step for step in steps if isinstance(step, Token)]
            if tokens:
                yield _Part(tokens, prompt=stream.prompts.get(0) if is_first else None)
                is_first = False
            match steps[-1]:
                case Finish() as finish:
                    yield _Part((), finish=finish)
                case Exception() as error:
                    raise error


def _text_metadata(context: Context) -> dict[str, str]:
    metadata = context.invocation_metadata() or ()
    return {key: value for key, value in metadata if isinstance(value, str)}


def _to_generation_request(
    request: pb.GenerateRequest | pb.ChatRequest,
    prompt: Prompt,
    default: SamplingParams,
    metadata: Mapping[str, str],
) -> GenerationRequest:
    hint = hint_from_proto(request, path="retention")
    session = session_of(hint.session_id if hint else "", metadata)
    if session:
        hint = replace(hint or RetentionHint(), session_id=session)
    return GenerationRequest(
        request_id=RequestId(current_request_id()),
        model=convert.model_from_proto(request.model),
        prompt=prompt,
        sampling=sampling_from_proto(request.sampling, path="sampling", default=default),
        service_level=convert.checked_service_level(request.service_level),
        priority=request.priority if request.HasField("priority") else None,
        returns_prompt_ids=request.returns_prompt_ids,
        is_resumable=request.resumable,
        begun=convert.begun_from_proto(request.resume) if request.HasField("resume") else None,
        session_id=session,
        retention=hint,
        fairness_id=stated_fairness_id(metadata),
    )
