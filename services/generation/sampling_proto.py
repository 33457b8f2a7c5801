"""Sampling parameters on the wire, as every service reads and writes them."""

from dataclasses import replace
from types import MappingProxyType

from evenflow.gateway.v1 import generation_pb2 as gen
from services.generation.sampling_params import (
    ADVISABLE,
    DEFAULT_SAMPLING,
    AnswerForm,
    SamplingParams,
    StructuredOutputs,
    check_sampling,
)
from services.kit.errors import InvalidRequestError

# Fields whose absence is their default on the wire as well.
_PLAIN = ("min_tokens", "ignore_eos", "keep_special_tokens", "include_stop")
# Fields that tell an absent value from zero.
_OPTIONAL = ("max_tokens", "seed", "logprobs", *ADVISABLE)
_FORM_BY_FIELD = MappingProxyType(
    {
        "json_schema": AnswerForm.JSON_SCHEMA,
        "json_object": AnswerForm.JSON_OBJECT,
        "regex": AnswerForm.REGEX,
        "choice": AnswerForm.CHOICE,
        "grammar": AnswerForm.GRAMMAR,
    }
)
_FIELD_BY_FORM = MappingProxyType({form: name for name, form in _FORM_BY_FIELD.items()})


def sampling_from_proto(
    sampling: gen.SamplingParams, *, path: str, default: SamplingParams = DEFAULT_SAMPLING
) -> SamplingParams:
    """Return the parameters of a message, those of `default` where it has none. Raises
    InvalidRequestError naming `path.name`; an empty path names the field alone.
    """
    present = {field.name for field, _ in sampling.ListFields()}
    stated = {name: getattr(sampling, name) for name in (*_PLAIN, *_OPTIONAL) if name in present}
    outputs = None
    if sampling.HasField("structured_outputs"):
        outputs = _form_from_proto(sampling.structured_outputs, path)
    params = replace(
        default,
        **stated,
        stop=tuple(sampling.stop),
        stop_token_ids=tuple(sampling.stop_token_ids),
        bad_words=tuple(sampling.bad_words),
        allowed_token_ids=tuple(sampling.allowed_token_ids),
        logit_bias=MappingProxyType(dict(sampling.logit_bias)),
        structured_outputs=outputs,
    )
    check_sampling(params, path=path)
    return params


def sampling_to_proto(params: SamplingParams) -> gen.SamplingParams:
    """Return the message; what is at its default is left unset."""
    changed = {
        name: value
        for name in (*_PLAIN, *_OPTIONAL)
        if (value := getattr(params, name)) != getattr(DEFAULT_SAMPLING, name)
    }
    outputs = params.structured_outputs
    return gen.SamplingParams(
        **changed,
        stop=params.stop,
        stop_token_ids=params.stop_token_ids,
        bad_words=params.bad_words,
        allowed_token_ids=params.allowed_token_ids,
        logit_bias=params.logit_bias,
        structured_outputs=None if outputs is None else _form_to_proto(outputs),
    )


def _form_from_proto(outputs: gen.StructuredOutputs, path: str) -> StructuredOutputs:
    name = outputs.WhichOneof("form")
    if name is None or (name == "json_object" and not outputs.json_object):
        field = f"{path}.structured_outputs" if path else "structured_outputs"
        raise InvalidRequestError(f"{field}: a form is required", field=field)
    form = _FORM_BY_FIELD[name]
    match form:
        case AnswerForm.JSON_OBJECT:
            return StructuredOutputs(form=form)
        case AnswerForm.CHOICE:
            return StructuredOutputs(form=form, choices=tuple(outputs.choice.texts))
        case _:
            return StructuredOutputs(form=form, text=getattr(outputs, name))


def _form_to_proto(outputs: StructuredOutputs) -> gen.StructuredOutputs:
    match outputs.form:
        case AnswerForm.JSON_OBJECT:
            return gen.StructuredOutputs(json_object=True)
        case AnswerForm.CHOICE:
            return gen.StructuredOutputs(choice=gen.Choices(texts=outputs.choices))
        case form:
            message = gen.StructuredOutputs()
            setattr(message, _FIELD_BY_FORM[form], outputs.text)
            return message
