"""Protobuf <-> domain: the public gRPC API, the step stream and the tracker's registration."""

from collections.abc import Sequence
from urllib.parse import unquote

from evenflow.executor.v1 import executor_pb2
from evenflow.gateway.v1 import gateway_pb2 as pb
from evenflow.gateway.v1 import generation_pb2 as gen
from evenflow.tracker.v1 import tracker_pb2
from services.gateway import types
from services.gateway.checks import check_service_level, checked_conversation
from services.gateway.errors import (
    ContextLengthError,
    DuplicateRequestError,
    EngineFailedError,
    FormsBusyError,
    GenerationFailedError,
    UnknownModelError,
)
from services.generation.conversation_proto import (
    message_from_proto,
    message_to_proto,
    options_from_proto,
    options_to_proto,
    part_from_proto,
    part_to_proto,
)
from services.generation.delay_proto import delay_from_proto
from services.generation.finish import FinishReason
from services.generation.finish_proto import FINISH_FROM_PROTO, FINISH_TO_PROTO
from services.generation.logprobs_proto import logprobs_from_proto, logprobs_to_proto
from services.generation.prompts import (
    ChatPrompt,
    Prompt,
    TextPrompt,
    Tokenization,
    TokenizeOptions,
    TokenPrompt,
)
from services.generation.sampling_proto import sampling_from_proto, sampling_to_proto
from services.generation.service_level_proto import (
    BOUNDS,
    service_level_from_proto,
    service_level_to_proto,
)
from services.kit.errors import (
    InvalidRequestError,
    OverloadedError,
    ServiceError,
    UnavailableError,
)
from services.kit.telemetry.trace_context import TraceContext
from services.pacing.types import NO_SERVICE_LEVEL, ServiceLevel

# Public API -> domain


def model_from_proto(model: str) -> str:
    if not model:
        raise InvalidRequestError("model is required", field="model")
    return model


def prompt_from_proto(request: pb.GenerateRequest) -> Prompt:
    match request.WhichOneof("prompt"):
        case "text" if request.text:
            return TextPrompt(request.text)
        case "token_ids" if request.token_ids.ids:
            ids = tuple(request.token_ids.ids)
            if min(ids) < 0:
                raise InvalidRequestError("token_ids.ids: negative id", field="token_ids.ids")
            return TokenPrompt(ids)
        case None:
            raise InvalidRequestError("prompt: text or token_ids is required", field="prompt")
        case name:
            raise InvalidRequestError(f"{name}: must not be empty", field=str(name))


def chat_from_proto(
    messages: Sequence[gen.ChatMessage], options: gen.ConversationOptions
) -> ChatPrompt:
    return checked_conversation(
        [message_from_proto(message) for message in messages],
        options_from_proto(options, path="options"),
    )


def host_from_peer(peer: str) -> str:
    """Return the address in what gRPC calls a client, as at HTTP's edge; empty: it has none."""
    family, _, place = peer.partition(":")
    if family not in ("ipv4", "ipv6"):
        return ""
    return unquote(place).rpartition(":")[0].strip("[]")


def checked_service_level(level: gen.ServiceLevel) -> ServiceLevel:
    own = service_level_from_proto(level, path="service_level")
    check_service_level(own, {name: f"service_level.{name}" for name in BOUNDS})
    return own


# Domain -> public API


def token_to_proto(token: types.Token) -> pb.Token:
    message = pb.Token(index=token.index, id=token.id, text=token.text, reasoning=token.reasoning)
    if token.logprobs is not None:
        message.logprobs.CopyFrom(logprobs_to_proto(token.logprobs))
    if token.tool_calls:
        message.tool_calls.extend(map(part_to_proto, token.tool_calls))
    return message


def finish_to_proto(finish: types.Finish) -> pb.Finish:
    return pb.Finish(
        reason=FINISH_TO_PROTO[finish.reason],
        usage=gen.Usage(
            num_prompt_tokens=finish.num_prompt_tokens,
            num_output_tokens=finish.num_output_tokens,
            num_reasoning_tokens=finish.num_reasoning_tokens,
            num_cached_tokens=finish.num_cached_tokens,
        ),
        clipped_max_tokens=finish.clipped_max_tokens,
    )


def model_to_proto(model: types.ServedModel) -> pb.Model:
    return pb.Model(
        id=model.model,
        max_model_len=model.max_model_len,
        root=model.root,
        parent=model.parent or "",
    )


# Domain -> executor and tracker


def submit_to_proto(
    request: types.GenerationRequest, generation: int, trace: TraceContext | None = None
) -> executor_pb2.Submit:
    submit = executor_pb2.Submit(
        request_id=request.request_id,
        generation=generation,
        model=request.model,
        sampling=sampling_to_proto(request.sampling),
        echo=request.echo,
        returns_prompt_ids=request.returns_prompt_ids,
        priority=request.priority,
        cache_salt=request.shared_cache,
        fair_key=request.fair_key,
    )
    if request.service_level != NO_SERVICE_LEVEL:
        submit.service_level.CopyFrom(service_level_to_proto(request.service_level))
    if trace is not None:
        submit.trace_context.CopyFrom(_trace_to_proto(trace))
    match request.prompt:
        case TextPrompt(text):
            submit.text = text
        case TokenPrompt(token_ids):
            submit.token_ids.ids.extend(token_ids)
        case ChatPrompt():
            submit.chat.CopyFrom(_chat_to_proto(request.prompt))
    return submit


def further_answer_to_proto(
    request: types.GenerationRequest, trace: TraceContext | None = None
) -> executor_pb2.FurtherAnswer:
    return executor_pb2.FurtherAnswer(
        request_id=request.request_id,
        seed=request.sampling.seed,
        trace_context=None if trace is None else _trace_to_proto(trace),
    )


def _trace_to_proto(trace: TraceContext) -> executor_pb2.TraceContext:
    return executor_pb2.TraceContext(traceparent=trace.traceparent, tracestate=trace.tracestate)


def _chat_to_proto(prompt: ChatPrompt) -> executor_pb2.Chat:
    return executor_pb2.Chat(
        messages=map(message_to_proto, prompt.messages), options=options_to_proto(prompt.options)
    )


def tokenize_to_proto(
    model: str, prompt: TextPrompt | ChatPrompt, options: TokenizeOptions
) -> executor_pb2.TokenizeRequest:
    request = executor_pb2.TokenizeRequest(
        model=model,
        omits_special_tokens=not options.add_special_tokens,
        omits_generation_prompt=not options.add_generation_prompt,
        with_texts=options.with_texts,
        fair_key=options.fair_key,
    )
    match prompt:
        case TextPrompt(text):
            request.text = text
        case ChatPrompt():
            request.chat.CopyFrom(_chat_to_proto(prompt))
    return request


def registration_to_proto(
    request: types.GenerationRequest, *, executor_id: str, generation: int, num_prompt_tokens: int
) -> tracker_pb2.Registration:
    registration = tracker_pb2.Registration(
        executor_id=executor_id,
        request_id=request.request_id,
        generation=generation,
        num_prompt_tokens=num_prompt_tokens,
    )
    if request.service_level != NO_SERVICE_LEVEL:
        registration.service_level.CopyFrom(service_level_to_proto(request.service_level))
    return registration


# Executor -> domain


def tokenization_from_proto(response: executor_pb2.TokenizeResponse) -> Tokenization:
    return Tokenization(
        ids=tuple(response.ids),
        texts=tuple(response.texts),
        max_model_len=response.max_model_len,
    )


def token_from_proto(token: executor_pb2.Token, index: int) -> types.Token:
    logprobs = logprobs_from_proto(token.logprobs) if token.HasField("logprobs") else None
    delay = delay_from_proto(token.delay) if token.HasField("delay") else None
    if not token.reasoning and not token.tool_calls:
        return types.Token(index, token.id, token.text, logprobs, delay=delay)
    calls = tuple(map(part_from_proto, token.tool_calls))
    return types.Token(index, token.id, token.text, logprobs, token.reasoning, calls, delay)


def model_info_from_proto(info: executor_pb2.GetModelInfoResponse) -> types.ServedModel:
    return types.ServedModel(
        executor_id=info.executor_id,
        model=info.model,
        max_model_len=info.max_model_len,
        default_sampling=sampling_from_proto(info.default_sampling, path="default_sampling"),
        caches_prefixes=info.caches_prefixes,
        root=info.root,
        adapters=tuple(types.Adapter(model=one.model, root=one.root) for one in info.adapters),
        template_variables=frozenset(info.template_variables),
    )


def ending_from_proto(ending: executor_pb2.Ending) -> tuple[FinishReason, int | None, int, str]:
    """Return why a request ended, its tokens of reasoning where anything tells, those of its
    prompt that were cached, and the stop string that it came to, if any. A reason that this build
    does not know ended normally.
    """
    has_count = ending.HasField("num_reasoning_tokens")
    reason = FINISH_FROM_PROTO.get(ending.finish_reason, FinishReason.STOP)
    num_reasoning = ending.num_reasoning_tokens if has_count else None
    return reason, num_reasoning, ending.num_cached_tokens, ending.stop_string


def rejection_from_proto(rejected: executor_pb2.Rejected) -> ServiceError:
    message, field = rejected.message or "the executor refused the request", rejected.field
    match rejected.code:
        case executor_pb2.REJECT_CODE_INVALID_ARGUMENT:
            return InvalidRequestError(message, field=field)
        case executor_pb2.REJECT_CODE_CONTEXT_LENGTH:
            overflow = rejected.overflow
            return ContextLengthError(
                message,
                field=field,
                num_tokens=overflow.num_prompt_tokens,
                max_model_len=overflow.max_model_len,
            )
        case executor_pb2.REJECT_CODE_UNKNOWN_MODEL:
            return UnknownModelError(message=message)
        case executor_pb2.REJECT_CODE_DUPLICATE:
            return DuplicateRequestError(rejected.request_id)
        case executor_pb2.REJECT_CODE_OVERLOADED:
            return OverloadedError(message)
        case executor_pb2.REJECT_CODE_UNAVAILABLE:
            return UnavailableError(message)
        case executor_pb2.REJECT_CODE_BUSY:
            return FormsBusyError(message)
    return GenerationFailedError(message)


def failure_from_proto(failure: executor_pb2.Failure) -> ServiceError:
    message = failure.message or "the engine gave up on the request"
    return EngineFailedError(message) if failure.retryable else GenerationFailedError(message)
