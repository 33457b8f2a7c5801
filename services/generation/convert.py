"""Requests and answers on the wire, as every service reads and writes them."""

from collections.abc import Mapping
from dataclasses import replace
from math import inf
from typing import Any

from evenflow.gateway.v1 import generation_pb2 as gen
from services.generation.conversation import (
    ConversationOptions,
    ToolCallPart,
    ToolChoice,
    check_options,
)
from services.generation.finish import FinishReason
from services.generation.logprobs import EchoedPrompt, Logprob, TokenLogprobs
from services.generation.retention import RetentionHint, check_hint, without_needless
from services.generation.sampling_params import (
    ADVISABLE,
    DEFAULT_SAMPLING,
    AnswerForm,
    SamplingParams,
    StructuredOutputs,
    check_sampling,
)
from services.kit.wire import at, fail, numbers, read, write
from services.pacing.cause import Cause, Delay

FINISH_TO_PROTO = numbers(FinishReason, gen.FinishReason)
FINISH_FROM_PROTO = {number: reason for reason, number in FINISH_TO_PROTO.items()}
# Late by the network is known to gateways only.
CAUSE_TO_PROTO: Mapping[Cause, Any] = numbers(
    (c for c in Cause if c not in (Cause.NETWORK, Cause.FAILOVER)), gen.DelayCause
)
CAUSE_FROM_PROTO = {number: cause for cause, number in CAUSE_TO_PROTO.items()}


def options_from_proto(options: gen.ConversationOptions, *, path: str) -> ConversationOptions:
    """Return checked options. Raises InvalidRequestError naming `path.name`.

    An empty path names the option alone.
    """
    own = read(ConversationOptions, options, path)
    if own.tools and options.tool_choice == gen.TOOL_CHOICE_UNSPECIFIED:
        own = replace(own, tool_choice=ToolChoice.AUTO)
    check_options(own, path=path)
    return own


def hint_from_proto(message: Any, *, path: str) -> RetentionHint | None:
    """Return a message's checked `retention`, which `path` names; None if it has none. Raises
    InvalidRequestError naming the field.
    """
    if not message.HasField("retention"):
        return None
    hint = read(RetentionHint, message.retention, path)
    check_hint(hint, path=path)
    marks = sorted(hint.marks, key=lambda one: (one.num_messages or inf, one.retention_s))
    return replace(hint, marks=without_needless(marks))


def sampling_from_proto(
    sampling: gen.SamplingParams, *, path: str, default: SamplingParams = DEFAULT_SAMPLING
) -> SamplingParams:
    """Return checked parameters; what a model's makers may advise is `default`'s where the message
    has none. Raises InvalidRequestError naming `path.name`; an empty path names the field alone.
    """
    outputs = None
    if sampling.HasField("structured_outputs"):
        outputs = _form_from_proto(sampling.structured_outputs, at(path, "structured_outputs"))
    params = read(SamplingParams, sampling, path, structured_outputs=outputs)
    if default is not DEFAULT_SAMPLING:
        absent = {"max_tokens", *ADVISABLE} - {field.name for field, _ in sampling.ListFields()}
        params = replace(params, **{name: getattr(default, name) for name in absent})
    check_sampling(params, path=path)
    return params


def sampling_to_proto(params: SamplingParams) -> gen.SamplingParams:
    """Return the message; what is at its default is left unset."""
    outputs = params.structured_outputs
    form = None if outputs is None else _form_to_proto(outputs)
    return write(params, gen.SamplingParams, structured_outputs=form)


def _form_from_proto(outputs: gen.StructuredOutputs, path: str) -> StructuredOutputs:
    name = outputs.WhichOneof("form")
    if name is None or (name == "json_object" and not outputs.json_object):
        fail(path, "a form is required")
    form = AnswerForm[name.upper()]
    match form:
        case AnswerForm.JSON_OBJECT:
            return StructuredOutputs(form=form)
        case AnswerForm.CHOICE:
            return StructuredOutputs(form=form, choices=tuple(outputs.choice.texts))
    return StructuredOutputs(form=form, text=getattr(outputs, name))


def _form_to_proto(outputs: StructuredOutputs) -> gen.StructuredOutputs:
    message = gen.StructuredOutputs()
    match outputs.form:
        case AnswerForm.JSON_OBJECT:
            message.json_object = True
        case AnswerForm.CHOICE:
            message.choice.texts.extend(outputs.choices)
        case form:
            setattr(message, form.name.lower(), outputs.text)
    return message


# -- of each token, by hand ----------------------------------------------------------------------


def part_from_proto(part: gen.ToolCallPart) -> ToolCallPart:
    return ToolCallPart(part.index, part.id, part.name, part.arguments)


def part_to_proto(part: ToolCallPart) -> gen.ToolCallPart:
    return gen.ToolCallPart(index=part.index, id=part.id, name=part.name, arguments=part.arguments)


def delay_from_proto(message: gen.Delay) -> Delay:
    return Delay(CAUSE_FROM_PROTO.get(message.cause, Cause.PLANNER), message.late_s)


def delay_to_proto(delay: Delay) -> gen.Delay:
    return gen.Delay(cause=CAUSE_TO_PROTO[delay.cause], late_s=delay.late_s)


def logprobs_from_proto(message: gen.TokenLogprobs) -> TokenLogprobs:
    return TokenLogprobs(_logprob(message.chosen), tuple(map(_logprob, message.top)))


def logprobs_to_proto(logprobs: TokenLogprobs) -> gen.TokenLogprobs:
    top = map(_logprob_to_proto, logprobs.top)
    return gen.TokenLogprobs(chosen=_logprob_to_proto(logprobs.chosen), top=top)


def prompt_from_proto(message: gen.EchoedPrompt) -> EchoedPrompt:
    logprobs = tuple(map(logprobs_from_proto, message.logprobs))
    return EchoedPrompt(message.text, logprobs, tuple(message.token_ids))


def prompt_to_proto(prompt: EchoedPrompt) -> gen.EchoedPrompt:
    logprobs = map(logprobs_to_proto, prompt.logprobs)
    return gen.EchoedPrompt(text=prompt.text, logprobs=logprobs, token_ids=prompt.token_ids)


def _logprob(message: gen.Logprob) -> Logprob:
    logprob = message.logprob if message.HasField("logprob") else None
    return Logprob(message.id, message.token, logprob)


def _logprob_to_proto(logprob: Logprob) -> gen.Logprob:
    return gen.Logprob(id=logprob.id, token=logprob.token, logprob=logprob.logprob)
