"""Sampling parameters in vLLM's form, and what a model's makers advise."""

from typing import Any

import pytest
from vllm.exceptions import VLLMValidationError

from services.executor.prompts.sampling import advised_sampling, to_vllm_sampling
from services.executor.types import Submission
from services.generation.prompts import TextPrompt
from services.generation.sampling_params import DEFAULT_SAMPLING, SamplingParams


def test_lists_and_switches_reach_vllm() -> None:
    asked = SamplingParams(
        bad_words=("x",),
        allowed_token_ids=(5, 6),
        keep_special_tokens=True,
        stop=("s",),
        include_stop=True,
    )
    plain, told = (
        to_vllm_sampling(
            Submission(
                request_id="r",
                generation=1,
                model="m",
                prompt=TextPrompt("Hi"),
                sampling=sampling,
            ),
            8,
        )
        for sampling in (DEFAULT_SAMPLING, asked)
    )

    assert (plain.bad_words, plain.allowed_token_ids) == ([], None)
    assert (plain.skip_special_tokens, plain.include_stop_str_in_output) == (True, False)
    assert (told.bad_words, told.allowed_token_ids) == (["x"], [5, 6])
    assert (told.skip_special_tokens, told.include_stop_str_in_output) == (False, True)


def test_all_that_vllm_reads_is_told() -> None:
    advice = {
        "temperature": 0.6,
        "top_p": 0.95,
        "top_k": 20,
        "min_p": 0.1,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.05,
        "max_tokens": 2048,
    }

    assert advised_sampling(advice) == SamplingParams(**advice)
    assert advised_sampling(advice, drafts=True) == SamplingParams(**{**advice, "min_p": 0.0})


@pytest.mark.parametrize("asked", [{"min_p": 0.1}, {"logit_bias": {5: 1.0}}])
def test_what_vllm_does_not_do_beside_drafts_is_refused_by_name(asked: dict[str, Any]) -> None:
    submission = Submission(
        request_id="r",
        generation=1,
        model="m",
        prompt=TextPrompt("Hi"),
        sampling=SamplingParams(**asked),
    )
    (name,) = asked

    to_vllm_sampling(submission, 8)
    with pytest.raises(VLLMValidationError, match=f"{name}: not with speculative") as refused:
        to_vllm_sampling(submission, 8, drafts=True)
    assert refused.value.parameter == name


@pytest.mark.parametrize(
    ("advice", "expected"),
    [
        ({}, DEFAULT_SAMPLING),
        ({"top_k": -1}, DEFAULT_SAMPLING),  # vLLM's way to say all
        ({"temperature": 3.0, "top_k": 20}, SamplingParams(top_k=20)),
        ({"temperature": 0}, SamplingParams(temperature=0)),
    ],
)
def test_what_no_request_may_have_is_left_out(
    advice: dict[str, Any], expected: SamplingParams
) -> None:
    assert advised_sampling(advice) == expected
