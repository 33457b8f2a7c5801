"""Each request's sampling parameters, once per draft: vLLM's own on a CPU, and what repairs it."""

import pytest
import torch
from vllm.platforms import current_platform
from vllm.utils import cpu_triton_utils
from vllm.v1.sample import rejection_sampler

from services.executor.plugin import draft_sampling

ENDS = torch.tensor([2, 5, 5, 6], dtype=torch.int32)  # of requests of 2, 3, no and 1 tokens


def test_each_value_comes_once_per_token() -> None:
    temperatures = torch.tensor([0.0, 0.7, 0.3, 1.5])
    numbers = torch.tensor([40, 1, 2, 3], dtype=torch.int32)

    found = draft_sampling.expand_batch_to_tokens(temperatures, ENDS, 6, replace_to=1)

    assert found.tolist() == torch.tensor([1.0, 1.0, 0.7, 0.7, 0.7, 1.5]).tolist()
    assert found.dtype == temperatures.dtype
    assert draft_sampling.expand_batch_to_tokens(numbers, ENDS, 6).tolist() == [40, 40, 1, 1, 1, 3]


def test_vllms_own_still_leaves_its_result_as_it_was() -> None:
    """Where this fails the repair has had its day."""
    current_platform.import_kernels()
    result = torch.full((6,), 7.0)

    cpu_triton_utils._expand_kernel_impl(result, torch.ones(4), ENDS, 0, 1, 32)

    assert result.tolist() == [7.0] * 6


def test_the_sampler_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rejection_sampler, "expand_batch_to_tokens", object())

    draft_sampling.repair()

    assert rejection_sampler.expand_batch_to_tokens is draft_sampling.expand_batch_to_tokens
