"""Protobuf <-> domain: the public gRPC API, the step stream and the tracker's registration."""

from array import array
from collections.abc import Sequence
from typing import Any
from urllib.parse import unquote

from evenflow.executor.v1 import executor_pb2
from evenflow.gateway.v1 import gateway_pb2 as pb
from evenflow.gateway.v1 import generation_pb2 as gen
from evenflow.tracker.v1 import tracker_pb2
from services.gateway import types
from services.gateway.checks import check_service_level, checked_conversation
from services.gateway.errors import (
    CannotResumeError,
    ContextLengthError,
    DuplicateRequestError,
    EngineFailedError,
    FormsBusyError,
    GenerationFailedError,
    UnknownModelError,
)
from services.gateway.request_class import class_of
from services.generation.conversation import ChatMessage
from services.generation.convert import (
    FINISH_FROM_PROTO,
    delay_from_proto,
    logprobs_from_proto,
    logprobs_to_proto,
    options_from_proto,
    part_from_proto,
    part_to_proto,
    sampling_from_proto,
    sampling_to_proto,
)
from services.generation.finish import FinishReason
from services.generation.prompts import (
    ChatPrompt,
    Prompt,
    TextPrompt,
    Tokenization,
    TokenizeOptions,
    TokenPrompt,
)
from services.generation.retention import Retained, RetentionHint
from services.kit.errors import (
    InvalidRequestError,
    OverloadedError,
    ServiceError,
    UnavailableError,
)
from services.kit.telemetry.trace_context import TraceContext
from services.kit.wire import read, write
from services.pacing.types import ServiceLevel

_BOUNDS = ("slo_ttft_s", "slo_tpot_s", "slo_tbt_s", "consumption_rate_tps", "max_in_hand_s")

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


def begun_from_proto(resume: pb.Resume) -> types.Begun:
    num_delivered = resume.delivered if resume.HasField("delivered") else len(resume.token_ids)
    ids = array("i", resume.token_ids)
    return types.Begun(token_ids=ids, num_delivered=num_delivered, name="resume")


def chat_from_proto(
    messages: Sequence[gen.ChatMessage], options: gen.ConversationOptions
) -> ChatPrompt:
    return checked_conversation(
        [read(ChatMessage, message) for message in messages],
        options_from_proto(options, path="options"),
    )


def host_from_peer(peer: str) -> str:
    """Return the address in what gRPC calls a client, as at HTTP's edge; empty: it has none."""
    family, _, place = peer.partition(":")
    if family not in ("ipv4", "ipv6"):
        return ""
    return unquote(place).rpartition(":")[0].strip("[]")


def checked_service_level(level: gen.ServiceLevel) -> ServiceLevel:
    own = read(ServiceLevel, level, "service_level")
    check_service_level(own, {name: f"service_level.{name}" for name in _BOUNDS})
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
    return write(finish, pb.Finish, usage=write(finish, gen.Usage))


def model_to_proto(model: types.ServedModel) -> pb.Model:
    return write(model, pb.Model, id=model.model)


# Domain -> executor and tracker


def submit_to_proto(
    request: types.GenerationRequest,
    generation: int,
    trace: TraceContext | None = None,
    resume: types.Resume | None = None,
) -> executor_pb2.Submit:
    return write(
        request,
        executor_pb2.Submit,
        **_input(request.prompt),
        generation=generation,
        sampling=sampling_to_proto(request.sampling),
        cache_salt=request.shared_cache,
        retention=_hint_to_proto(request),
        holder=executor_pb2.Holder(
            account=request.tenant,
            session_id=request.session_name,
            request_class=class_of(request).value,
        ),
        trace_context=_trace(trace),
        further_answers=(),
        resume=None if resume is None else write(resume, executor_pb2.Resume),
    )


def _hint_to_proto(request: types.GenerationRequest) -> gen.RetentionHint | None:
    if request.retention is None and not request.tenant:
        return None
    hint = request.retention or RetentionHint()  # whose it is concerns tool calls without any, too
    return write(hint, gen.RetentionHint, account=request.tenant)


def _input(prompt: Prompt) -> dict[str, Any]:
    """Return the field of a message that a prompt goes into, and its value."""
    match prompt:
        case TextPrompt(text):
            return {"text": text}
        case TokenPrompt(token_ids):
            return {"token_ids": gen.TokenIds(ids=token_ids)}
        case ChatPrompt():
            return {"chat": write(prompt, executor_pb2.Chat)}


def further_answer_to_proto(
    request: types.GenerationRequest, trace: TraceContext | None = None
) -> executor_pb2.FurtherAnswer:
    return executor_pb2.FurtherAnswer(
        request_id=request.request_id,
        seed=request.sampling.seed,
        trace_context=_trace(trace),
    )


def _trace(trace: TraceContext | None) -> executor_pb2.TraceContext | None:
    return None if trace is None else write(trace, executor_pb2.TraceContext)


def tokenize_to_proto(
    model: str, prompt: TextPrompt | ChatPrompt, options: TokenizeOptions
) -> executor_pb2.TokenizeRequest:
    return write(options, executor_pb2.TokenizeRequest, **_input(prompt), model=model)


def registration_to_proto(
    request: types.GenerationRequest, *, executor_id: str, generation: int, num_prompt_tokens: int
) -> tracker_pb2.Registration:
    return write(
        request,
        tracker_pb2.Registration,
        executor_id=executor_id,
        generation=generation,
        num_prompt_tokens=num_prompt_tokens,
    )


# Executor -> domain


def tokenization_from_proto(response: executor_pb2.TokenizeResponse) -> Tokenization:
    return read(Tokenization, response)


def token_from_proto(token: executor_pb2.Token, index: int) -> types.Token:
    logprobs = logprobs_from_proto(token.logprobs) if token.HasField("logprobs") else None
    delay = delay_from_proto(token.delay) if token.HasField("delay") else None
    is_read = not token.not_read
    if not token.reasoning and not token.tool_calls:
        return types.Token(index, token.id, token.text, logprobs, delay=delay, is_read=is_read)
    calls, thought = tuple(map(part_from_proto, token.tool_calls)), token.reasoning
    return types.Token(index, token.id, token.text, logprobs, thought, calls, delay, is_read)


def model_info_from_proto(info: executor_pb2.GetModelInfoResponse) -> types.ServedModel:
    return read(
        types.ServedModel,
        info,
        default_sampling=sampling_from_proto(info.default_sampling, path="default_sampling"),
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


def retained_from_proto(ending: executor_pb2.Ending) -> Retained | None:
    """Return what is kept of a request's KV; None: nothing was asked for, or nothing is known of
    such an answer.
    """
    is_known = ending.retained.status in gen.RetentionStatus.values()
    return read(Retained, ending.retained) if ending.HasField("retained") and is_known else None


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
        case executor_pb2.REJECT_CODE_CANNOT_RESUME:
            return CannotResumeError(message)
    return GenerationFailedError(message)


def failure_from_proto(failure: executor_pb2.Failure) -> ServiceError:
    message = failure.message or "the engine gave up on the request"
    return EngineFailedError(message) if failure.retryable else GenerationFailedError(message)
