"""Protobuf <-> domain. The only executor module besides the servicer and the clients with pb2."""

from dataclasses import asdict, replace

from evenflow.executor.v1 import executor_pb2 as pb
from services.executor.observation import (
    EngineObservation,
    GroupPlace,
    RequestObservation,
)
from services.executor.serving.step_stream import Frame, Output
from services.executor.types import (
    EngineLoad,
    Failure,
    ModelInfo,
    PromptOverflow,
    RejectCode,
    Rejection,
    Submission,
    Token,
)
from services.generation.conversation import DEFAULT_OPTIONS
from services.generation.conversation_proto import (
    message_from_proto,
    options_from_proto,
    part_to_proto,
)
from services.generation.delay_proto import CAUSE_TO_PROTO, delay_to_proto
from services.generation.finish_proto import FINISH_TO_PROTO
from services.generation.logprobs_proto import logprobs_to_proto, prompt_to_proto
from services.generation.prompts import (
    ChatPrompt,
    Prompt,
    TextPrompt,
    Tokenization,
    TokenizeOptions,
    TokenPrompt,
)
from services.generation.sampling_proto import sampling_from_proto, sampling_to_proto
from services.generation.service_level_proto import service_level_from_proto
from services.kit.errors import InvalidRequestError, shortened
from services.kit.telemetry.trace_context import TraceContext
from services.kit.wire import write
from services.placement.types import RequestPhase

MAX_REQUEST_ID_LENGTH = 128
DEFAULT_UPDATES_PER_S = 2.0
MAX_UPDATES_PER_S = 20.0

_REJECT_CODES = {code: pb.RejectCode.Value(f"REJECT_CODE_{code.name}") for code in RejectCode}
_REQUEST_STATES = {
    RequestPhase.WAITING: pb.REQUEST_STATE_QUEUED,
    RequestPhase.PREFILL: pb.REQUEST_STATE_PREFILL,
    RequestPhase.DECODING: pb.REQUEST_STATE_DECODING,
    RequestPhase.PAUSED: pb.REQUEST_STATE_PAUSED,
    RequestPhase.PREEMPTED: pb.REQUEST_STATE_PARKED,
}
_RESIDENCIES = {place.value: pb.Residency.Value(f"RESIDENCY_{place.name}") for place in GroupPlace}


def gateway_id_from_proto(message: pb.StreamRequest | None) -> str:
    """Return who opens the stream; InvalidRequestError unless it says so."""
    if message is None or message.WhichOneof("message") != "hello":
        raise InvalidRequestError("the first message must be hello", field="hello")
    if not message.hello.gateway_id:
        raise InvalidRequestError("gateway_id is required", field="gateway_id")
    return message.hello.gateway_id


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
    _check_id(answer.request_id)
    seed = answer.seed if answer.HasField("seed") else None
    return replace(
        first,
        request_id=answer.request_id,
        sampling=replace(first.sampling, seed=seed),
        trace=_trace(answer.trace_context),
    )


def _check_id(request_id: str) -> None:
    rule = f"request_id must have 1 to {MAX_REQUEST_ID_LENGTH} characters"
    _require(1 <= len(request_id) <= MAX_REQUEST_ID_LENGTH, "request_id", rule)


def _submission(submit: pb.Submit) -> Submission:
    _check_id(submit.request_id)
    _require(submit.generation >= 1, "generation", "generation must be at least 1")
    return Submission(
        request_id=submit.request_id,
        generation=submit.generation,
        model=submit.model,
        prompt=_prompt(submit),
        sampling=sampling_from_proto(submit.sampling, path=""),
        service_level=service_level_from_proto(submit.service_level, path=""),
        echo=submit.echo,
        returns_prompt_ids=submit.returns_prompt_ids,
        priority=submit.priority,
        trace=_trace(submit.trace_context),
        cache_salt=submit.cache_salt,
        fair_key=submit.fair_key,
    )


def _trace(context: pb.TraceContext) -> TraceContext | None:
    if not context.traceparent:
        return None
    return TraceContext(traceparent=context.traceparent, tracestate=context.tracestate)


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
    options = DEFAULT_OPTIONS
    if chat.HasField("options"):
        options = options_from_proto(chat.options, path="")
    return ChatPrompt(messages=tuple(map(message_from_proto, chat.messages)), options=options)


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
            )
            for request_id, accepted in frame.accepted.items()
        ],
        rejected=[_rejected(request_id, rejection) for request_id, rejection in frame.rejected],
        outputs=[_output(request_id, output) for request_id, output in frame.outputs.items()],
    )


def _rejected(request_id: str, rejection: Rejection) -> pb.Rejected:
    return pb.Rejected(
        request_id=request_id,
        code=_REJECT_CODES[rejection.code],
        field=rejection.field,
        message=shortened(rejection.message),
        overflow=_overflow(rejection.overflow),
    )


def _overflow(overflow: PromptOverflow | None) -> pb.PromptOverflow | None:
    if overflow is None:
        return None
    return pb.PromptOverflow(
        num_prompt_tokens=overflow.num_prompt_tokens, max_model_len=overflow.max_model_len
    )


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
            )


def tokenize_from_proto(
    request: pb.TokenizeRequest,
) -> tuple[TextPrompt | ChatPrompt, TokenizeOptions]:
    """Return what to tokenise, and how; InvalidRequestError for neither text nor conversation."""
    options = TokenizeOptions(
        add_special_tokens=not request.omits_special_tokens,
        add_generation_prompt=not request.omits_generation_prompt,
        with_texts=request.with_texts,
        fair_key=request.fair_key,
    )
    match request.WhichOneof("input"):
        case "text":
            return TextPrompt(text=request.text), options
        case "chat":
            return chat_from_proto(request.chat), options
    raise InvalidRequestError("a prompt is required", field="prompt")


def tokenization_to_proto(tokenization: Tokenization) -> pb.TokenizeResponse:
    return write(tokenization, pb.TokenizeResponse())


def model_info_to_proto(info: ModelInfo, *, executor_id: str) -> pb.GetModelInfoResponse:
    return pb.GetModelInfoResponse(
        executor_id=executor_id,
        model=info.model,
        max_model_len=info.max_model_len,
        max_num_seqs=info.max_num_seqs,
        max_num_batched_tokens=info.max_num_batched_tokens,
        num_layers=info.num_layers,
        num_kv_heads=info.num_kv_heads,
        head_dim=info.head_dim,
        block_size=info.block_size,
        num_gpu_blocks=info.num_gpu_blocks,
        dtype=info.dtype,
        tensor_parallel_size=info.tensor_parallel_size,
        pipeline_parallel_size=info.pipeline_parallel_size,
        layers_per_group=info.layers_per_group,
        default_sampling=sampling_to_proto(info.default_sampling),
        caches_prefixes=info.caches_prefixes,
        root=info.root,
        adapters=[pb.Adapter(model=one.model, root=one.root) for one in info.adapters],
        template_variables=info.template_variables,
        kv=None if info.kv is None else pb.KVFacts(**asdict(info.kv)),
    )


def load_to_proto(load: EngineLoad, *, num_deposited_tokens: int) -> pb.GetLoadResponse:
    return pb.GetLoadResponse(
        num_running_reqs=load.num_running_reqs,
        num_waiting_reqs=load.num_waiting_reqs,
        kv_cache_usage_frac=load.kv_cache_usage_frac,
        num_deposited_tokens=num_deposited_tokens,
    )


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
    return pb.WatchRequestsResponse(
        requests=[_observed_request(request) for request in observation.requests],
        num_steps=observation.num_steps,
        observed_step_s=observation.observed_step_s,
        predicted_step_s=observation.predicted_step_s,
        num_pool_blocks=observation.num_pool_blocks,
        num_free_pool_blocks=observation.num_free_pool_blocks,
        num_cached_tokens=observation.num_cached_tokens,
    )


def _observed_request(request: RequestObservation) -> pb.ObservedRequest:
    return pb.ObservedRequest(
        request_id=request.request_id,
        state=_REQUEST_STATES[request.phase],
        num_prompt_tokens=request.num_prompt_tokens,
        num_computed_tokens=request.num_computed_tokens,
        num_generated_tokens=request.num_generated_tokens,
        num_delivered_tokens=request.num_delivered_tokens,
        num_deposited_tokens=request.num_deposited_tokens,
        num_late_tokens=request.num_late_tokens,
        release_interval_s=request.interval_s,
        pace_tail=request.pace_tail,
        residency=[_RESIDENCIES[letter] for letter in request.residency],
        late_cause=None if request.late_cause is None else CAUSE_TO_PROTO[request.late_cause],
        why=request.why.value,
        why_text=request.why.text,
    )
