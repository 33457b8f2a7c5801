"""What a model's makers advise, as requests that name nothing get it."""

from typing import Any

import pytest

from services.executor.prompts.sampling import advised_sampling
from services.generation.sampling_params import DEFAULT_SAMPLING, SamplingParams


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
