"""The ranges of sampling parameters, and their way over the wire and back."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenflow.gateway.v1 import generation_pb2 as gen
from services.generation.convert import sampling_from_proto, sampling_to_proto
from services.generation.sampling_params import (
    DEFAULT_SAMPLING,
    AnswerForm,
    SamplingParams,
    StructuredOutputs,
    check_sampling,
)
from services.kit.errors import InvalidRequestError

NAN, INF = float("nan"), float("inf")
CHOICES = gen.Choices(texts=["yes", "no"])


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": NAN}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_p": NAN}, "top_p"),
        ({"top_k": -1}, "top_k"),
        ({"min_p": -0.1}, "min_p"),
        ({"min_p": 1.1}, "min_p"),
        ({"min_p": NAN}, "min_p"),
        ({"presence_penalty": -2.1}, "presence_penalty"),
        ({"presence_penalty": NAN}, "presence_penalty"),
        ({"frequency_penalty": 2.1}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"repetition_penalty": 10.1}, "repetition_penalty"),
        ({"repetition_penalty": INF}, "repetition_penalty"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"min_tokens": 3, "max_tokens": 2}, "min_tokens"),
        ({"logprobs": -1}, "logprobs"),
        ({"logprobs": 21}, "logprobs"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"stop": ["a" * 257]}, "stop"),
        ({"stop": [""]}, "stop"),
        ({"bad_words": ["a"] * 129}, "bad_words"),
        ({"bad_words": [""]}, "bad_words"),
        ({"bad_words": ["a" * 257]}, "bad_words"),
        ({"allowed_token_ids": [-1]}, "allowed_token_ids"),
        ({"allowed_token_ids": [0] * 1025}, "allowed_token_ids"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"stop_token_ids": [1] * 129}, "stop_token_ids"),
        ({"logit_bias": {-1: 1.0}}, "logit_bias"),
        ({"logit_bias": {1: 100.1}}, "logit_bias"),
        ({"logit_bias": {1: NAN}}, "logit_bias"),
        ({"logit_bias": dict.fromkeys(range(1025), 0.0)}, "logit_bias"),
        ({"structured_outputs": gen.StructuredOutputs()}, "structured_outputs"),
        ({"structured_outputs": gen.StructuredOutputs(json_object=False)}, "structured_outputs"),
        ({"structured_outputs": gen.StructuredOutputs(json_schema=" ")}, "structured_outputs"),
        ({"structured_outputs": gen.StructuredOutputs(regex="")}, "structured_outputs"),
        (
            {"structured_outputs": gen.StructuredOutputs(choice=gen.Choices())},
            "structured_outputs",
        ),
        (
            {"structured_outputs": gen.StructuredOutputs(choice=gen.Choices(texts=["a", ""]))},
            "structured_outputs",
        ),
        (
            {"structured_outputs": gen.StructuredOutputs(grammar="x" * ((64 << 10) + 1))},
            "structured_outputs",
        ),
    ],
)
def test_a_field_out_of_its_range_is_named(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        sampling_from_proto(gen.SamplingParams(**fields), path="sampling")

    assert caught.value.field == f"sampling.{field}"
    assert f"sampling.{field}" in str(caught.value)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"max_tokens": 1},
        {"temperature": 0.0},
        {"temperature": 2.0},
        {"top_p": 1.0},
        {"stop": ("a" * 256,) * 16},
        {"seed": -1},
        {"seed": 0},
        {"top_k": 1},
        {"min_p": 1.0},
        {"presence_penalty": -2.0, "frequency_penalty": 2.0},
        {"repetition_penalty": 10.0},
        {"min_tokens": 2, "max_tokens": 2},
        {"min_tokens": 2},
        {"logprobs": 0},
        {"logprobs": 20},
        {"ignore_eos": True},
        {"bad_words": ("a" * 256,) * 128},
        {"allowed_token_ids": (0,) * 1024},
        {"keep_special_tokens": True, "include_stop": True},
        {"stop_token_ids": (0, 2**31 - 1)},
        {"logit_bias": {0: -100.0, 2**31 - 1: 100.0}},
        {"structured_outputs": StructuredOutputs(form=AnswerForm.JSON_OBJECT)},
        {"structured_outputs": StructuredOutputs(form=AnswerForm.JSON_SCHEMA, text="{}")},
        {"structured_outputs": StructuredOutputs(form=AnswerForm.REGEX, text="a+")},
        {"structured_outputs": StructuredOutputs(form=AnswerForm.GRAMMAR, text="root ::= x")},
        {"structured_outputs": StructuredOutputs(form=AnswerForm.CHOICE, choices=("a", "b"))},
    ],
)
def test_fields_in_range_make_the_round_trip(fields: dict[str, Any]) -> None:
    params = SamplingParams(**fields)

    assert sampling_from_proto(sampling_to_proto(params), path="") == params


def test_what_is_left_at_its_default_is_not_sent() -> None:
    assert sampling_to_proto(DEFAULT_SAMPLING) == gen.SamplingParams()
    assert sampling_from_proto(gen.SamplingParams(), path="") == DEFAULT_SAMPLING


def test_a_temperature_of_zero_is_sent() -> None:
    assert sampling_to_proto(SamplingParams(temperature=0)).HasField("temperature")


def test_an_empty_path_names_the_field_alone() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        check_sampling(SamplingParams(top_p=2))

    assert caught.value.field == "top_p"


@given(
    st.builds(
        gen.SamplingParams,
        max_tokens=st.none() | st.integers(-2, 5),
        temperature=st.none() | st.floats(),
        top_p=st.none() | st.floats(),
        stop=st.lists(st.text(max_size=3), max_size=6),
        top_k=st.integers(-2, 2**31 - 1),
        min_p=st.floats(),
        presence_penalty=st.floats(),
        repetition_penalty=st.none() | st.floats(),
        logit_bias=st.dictionaries(st.integers(-2, 9), st.floats(), max_size=3),
        min_tokens=st.integers(-2, 7),
        logprobs=st.none() | st.integers(-2, 22),
    )
)
def test_any_message_is_taken_whole_or_refused_by_name(message: gen.SamplingParams) -> None:
    try:
        params = sampling_from_proto(message, path="sampling")
    except InvalidRequestError as error:
        is_right = error.field.startswith("sampling.")
    else:
        # What was taken is the same on the next hop.
        is_right = sampling_from_proto(sampling_to_proto(params), path="") == params
    assert is_right
