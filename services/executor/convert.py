"""Protobuf <-> domain. The only executor module besides the servicer and the clients with pb2."""

from dataclasses import replace

from evenflow.executor.v1 import executor_pb2 as pb
from evenflow.gateway.v1 import generation_pb2 as gen
from services.executor.observation import (
    EngineObservation,
    GroupPlace,
    PrefixObservation,
    RequestObservation,
)
from services.executor.serving.kv_account import HeldRequest, KVAccount
from services.executor.serving.step_stream import Frame, Output
from services.executor.types import (
    Failure,
    FurtherAnswer,
    ModelInfo,
    RejectCode,
    Rejection,
    Resume,
    Submission,
    Token,
)
from services.generation.convert import (
    FINISH_TO_PROTO,
    delay_to_proto,
    hint_from_proto,
    logprobs_to_proto,
    options_from_proto,
    part_to_proto,
    prompt_to_proto,
    sampling_from_proto,
    sampling_to_proto,
)
from services.generation.prompts import (
    ChatPrompt,
    Prompt,
    TextPrompt,
    Tokenization,
    TokenizeOptions,
    TokenPrompt,
)
from services.kit.errors import InvalidRequestError, shortened
from services.kit.telemetry.trace_context import TraceContext
from services.kit.wire import numbers, read, write
from services.pacing.types import ServiceLevel
from services.placement.types import RequestPhase
from services.reporting.load import ExecutorLoad

DEFAULT_UPDATES_PER_S = 2.0
MAX_UPDATES_PER_S = 20.0
DEFAULT_HOLDERS, MAX_HOLDERS = 100, 1_000  # entries of each list

_REQUEST_STATES = {
    RequestPhase.WAITING: pb.REQUEST_STATE_QUEUED,
    RequestPhase.PREFILL: pb.REQUEST_STATE_PREFILL,
    RequestPhase.DECODING: pb.REQUEST_STATE_DECODING,
    RequestPhase.PAUSED: pb.REQUEST_STATE_PAUSED,
    RequestPhase.PREEMPTED: pb.REQUEST_STATE_PARKED,
}
_RESIDENCIES = {place.value: number for place, number in numbers(GroupPlace, pb.Residency).items()}


def hello_from_proto(message: pb.StreamRequest | None) -> pb.Hello:
    """Return what the gateway says that opens the stream; InvalidRequestError unless it names
    itself.
    """
    if message is None or message.WhichOneof("message") != "hello":
        raise InvalidRequestError("the first message must be hello", field="hello")
    if not message.hello.gateway_id:
        raise InvalidRequestError("gateway_id is required", field="gateway_id")
    _require(message.hello.epoch >= 0, "epoch", "epoch must be >= 0")
    return message.hello


def request_ids_from_proto(submit: pb.Submit) -> list[str]:
    """Return the ids of all answers that are asked for."""
    return [submit.request_id, *(further.request_id for further in submit.further_answers)]


def submissions_from_proto(submit: pb.Submit) -> list[Submission] | Rejection:
    """Return the requests, which share their prompt, or why they are malformed."""
    try:
        first = _submission(submit)
        return [first, *(_further(first, answer) for answer in submit.further_answers)]
    except InvalidRequestError as error:
        return Rejection(code=RejectCode.INVALID_ARGUMENT, field=error.field, message=str(error))


def _further(first: Submission, answer: pb.FurtherAnswer) -> Submission:
    own = read(FurtherAnswer, answer, trace=_trace(answer.trace_context))
    sampling = replace(first.sampling, seed=own.seed)
    return replace(first, request_id=own.request_id, sampling=sampling, trace=own.trace)


def _submission(submit: pb.Submit) -> Submission:
    return read(
        Submission,
        submit,
        prompt=_prompt(submit),
        sampling=sampling_from_proto(submit.sampling, path=""),
        service_level=read(ServiceLevel, submit.service_level),
        trace=_trace(submit.trace_context),
        resume=_resume(submit),
        retention=hint_from_proto(submit, path="retention"),
    )


def _resume(submit: pb.Submit) -> Resume | None:
    if not submit.HasField("resume"):
        return None
    resume = read(Resume, submit.resume, path="resume")
    num_known = len(resume.output_ids)
    _require(not submit.further_answers, "resume", "resume: is of one answer")
    _require(num_known > 0, "resume.output_ids", "resume.output_ids: must not be empty")
    _require(
        resume.max_tokens == 0 or num_known <= resume.max_tokens,
        "resume.max_tokens",
        "resume.max_tokens: is less than the answer has",
    )
    _require(
        resume.num_delivered_tokens <= num_known,
        "resume.num_delivered_tokens",
        "resume.num_delivered_tokens: is more than the answer has",
    )
    _require(
        resume.num_retold_tokens <= num_known,
        "resume.num_retold_tokens",
        "resume.num_retold_tokens: is more than the answer has",
    )
    return resume


def _trace(context: pb.TraceContext) -> TraceContext | None:
    return read(TraceContext, context) if context.traceparent else None


def _prompt(submit: pb.Submit) -> Prompt:
    match submit.WhichOneof("input"):
        case "text":
            return TextPrompt(text=submit.text)
        case "token_ids":
            _require(len(submit.token_ids.ids) > 0, "prompt", "the prompt holds no tokens")
            return TokenPrompt(token_ids=tuple(submit.token_ids.ids))
        case "chat":
            _require(not submit.echo, "echo", "echo is not for a conversation")
            return chat_from_proto(submit.chat)
        case _:
            raise InvalidRequestError("a prompt is required", field="prompt")


def chat_from_proto(chat: pb.Chat) -> ChatPrompt:
    _require(len(chat.messages) > 0, "messages", "messages must not be empty")
    return read(ChatPrompt, chat, options=options_from_proto(chat.options, path=""))


def _require(holds: bool, field: str, message: str) -> None:
    if not holds:
        raise InvalidRequestError(message, field=field)


def frame_to_proto(frame: Frame) -> pb.StreamResponse:
    return pb.StreamResponse(
        sequence=frame.sequence,
        accepted=[
            pb.Accepted(
                request_id=request_id,
                num_prompt_tokens=accepted.num_prompt_tokens,
                max_tokens=accepted.max_tokens,
                prompt_digest=accepted.prompt_digest,
            )
            for request_id, accepted in frame.accepted.items()
        ],
        rejected=[_rejected(request_id, rejection) for request_id, rejection in frame.rejected],
        outputs=[_output(request_id, output) for request_id, output in frame.outputs.items()],
        num_engine_steps=frame.num_engine_steps,
        is_leaving=frame.is_leaving,
        load=None if frame.load is None else write(frame.load, pb.Load),
    )


def _rejected(request_id: str, rejection: Rejection) -> pb.Rejected:
    message = shortened(rejection.message)
    return write(rejection, pb.Rejected, request_id=request_id, message=message)


def _output(request_id: str, output: Output) -> pb.RequestOutput:
    return pb.RequestOutput(
        request_id=request_id,
        first_token_index=output.first_token_index,
        tokens=[_token(token) for token in output.tokens],
        ending=_ending(output),
        prompt=None if output.prompt is None else prompt_to_proto(output.prompt),
    )


def _token(token: Token) -> pb.Token:
    message = pb.Token(id=token.id, text=token.text, reasoning=token.reasoning)
    if token.logprobs is not None:
        message.logprobs.CopyFrom(logprobs_to_proto(token.logprobs))
    if token.tool_calls:
        message.tool_calls.extend(map(part_to_proto, token.tool_calls))
    if not token.is_read:
        message.not_read = True
    if token.delay is not None:
        message.delay.CopyFrom(delay_to_proto(token.delay))
    return message


def _ending(output: Output) -> pb.Ending | None:
    match output.ending:
        case None:
            return None
        case Failure(retryable=retryable, message=message):
            return pb.Ending(failure=pb.Failure(retryable=retryable, message=message))
        case reason:
            return pb.Ending(
                finish_reason=FINISH_TO_PROTO[reason],
                num_reasoning_tokens=output.num_reasoning_tokens,
                num_cached_tokens=output.num_cached_tokens,
                stop_string=output.stop_string,
                retained=None if output.retained is None else write(output.retained, gen.Retained),
            )


def tokenize_from_proto(
    request: pb.TokenizeRequest,
) -> tuple[TextPrompt | ChatPrompt, TokenizeOptions]:
    """Return what to tokenise, and how; InvalidRequestError for neither text nor conversation."""
    options = read(TokenizeOptions, request)
    match request.WhichOneof("input"):
        case "text":
            return TextPrompt(text=request.text), options
        case "chat":
            return chat_from_proto(request.chat), options
    raise InvalidRequestError("a prompt is required", field="prompt")


def tokenization_to_proto(tokenization: Tokenization) -> pb.TokenizeResponse:
    return write(tokenization, pb.TokenizeResponse)


def model_info_to_proto(
    info: ModelInfo, load: ExecutorLoad, *, executor_id: str, epoch: int = 0
) -> pb.GetModelInfoResponse:
    return write(
        info,
        pb.GetModelInfoResponse,
        executor_id=executor_id,
        epoch=epoch,
        default_sampling=sampling_to_proto(info.default_sampling),
        load=write(load, pb.Load),
    )


def pace_from_proto(pace: pb.RequestPace) -> tuple[str, ServiceLevel]:
    """Return a request and what it is promised. Raises InvalidRequestError."""
    return pace.request_id, read(ServiceLevel, pace.service_level, "change_pace.service_level")


def watch_interval_s(request: pb.WatchRequestsRequest) -> float:
    """Return the time between two updates; InvalidRequestError for an impossible rate."""
    rate = request.max_updates_per_s or DEFAULT_UPDATES_PER_S
    _require(
        0 < rate <= MAX_UPDATES_PER_S,
        "max_updates_per_s",
        f"max_updates_per_s must be in (0, {MAX_UPDATES_PER_S:g}]",
    )
    return 1.0 / rate


def observation_to_proto(observation: EngineObservation) -> pb.WatchRequestsResponse:
    requests = map(_observed_request, observation.requests)
    prefixes = map(_observed_prefix, observation.prefixes)
    return write(observation, pb.WatchRequestsResponse, requests=requests, prefixes=prefixes)


def _observed_prefix(prefix: PrefixObservation) -> pb.ObservedPrefix:
    residency = map(_RESIDENCIES.__getitem__, prefix.residency)
    return write(prefix, pb.ObservedPrefix, residency=residency)


def _observed_request(request: RequestObservation) -> pb.ObservedRequest:
    return write(
        request,
        pb.ObservedRequest,
        state=_REQUEST_STATES[request.phase],
        release_interval_s=request.interval_s,
        residency=map(_RESIDENCIES.__getitem__, request.residency),
        why=request.why.value,
        why_text=request.why.text,
    )


def holders_limit(request: pb.GetKVHoldersRequest) -> int:
    """Return how many entries are asked for; InvalidRequestError for too many, or fewer than 1."""
    limit = request.limit or DEFAULT_HOLDERS
    _require(0 < limit <= MAX_HOLDERS, "limit", f"limit must be in [1, {MAX_HOLDERS}]")
    return limit


def kv_account_to_proto(account: KVAccount) -> pb.GetKVHoldersResponse:
    requests = map(_held_request, account.requests)
    return write(account, pb.GetKVHoldersResponse, requests=requests)


def _held_request(held: HeldRequest) -> pb.HoldingRequest:
    holding, use = held.holding, held.holding.use
    return write(
        holding,
        pb.HoldingRequest,
        holder=write(held.holder, pb.Holder),
        state=_REQUEST_STATES[holding.phase],
        why=holding.why.value,
        why_text=holding.why.text,
        num_pool_tokens=use.num_pool_tokens,
        num_host_tokens=use.num_host_tokens,
        num_shared_tokens=use.num_shared_tokens,
    )
