"""KV in eight bits passes through layer-wise KV, where vLLM's CPU backend has it."""

import pytest
import torch

from lab.engine.step_runner import first_difference, run_case, stock
from lab.engine.workloads import churn, mixed
from lab.models import NUM_LAYERS
from tests.exact.cases import make_case

# Engines run in this process: their warnings are not ours to fail on.
pytestmark = [
    pytest.mark.filterwarnings("default"),
    pytest.mark.timeout(900),
    pytest.mark.nightly,
    pytest.mark.skipif(
        not torch.cpu._is_avx512_supported(), reason="vLLM's kernels for it take AVX-512"
    ),
]

ROOMY_FRAC = 1.2  # of full residency: steps are stock vLLM's, and so is what is rounded


@pytest.mark.parametrize("kv_cache_dtype", ["fp8_e4m3", "fp8_e5m2"])
def test_tokens_of_quantised_kv_are_stock_vllms(kv_cache_dtype: str) -> None:
    case = make_case(share=ROOMY_FRAC, kv_cache_dtype=kv_cache_dtype)
    workload = mixed(NUM_LAYERS)

    expected = run_case(stock(case), workload)
    plain = run_case(stock(make_case()), workload)
    actual = run_case(case, workload, hook=churn(1))

    assert first_difference(expected, actual) == {}
    assert first_difference(plain, expected)  # else nothing would be quantised
    assert actual.num_offloads >= 20
    assert actual.sums["num_loads"] >= 1_000
