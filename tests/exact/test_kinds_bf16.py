"""Gated delta nets beside full attention, whose kernels take bf16 only, on stock vLLM's steps."""

import pytest
import torch

from lab.engine.step_runner import first_difference
from lab.engine.workloads import at_distances, churn
from services.placement.blocks import STATE
from tests.exact.cases import num_groups
from tests.exact.kinds import WORKLOADS, kind_case, kind_reference, start

pytestmark = [
    pytest.mark.filterwarnings("default"),
    pytest.mark.timeout(900),
    pytest.mark.nightly,
    pytest.mark.skipif(
        not torch.cpu._is_avx512_bf16_supported(), reason="the kernels need AVX-512 with bf16"
    ),
]

MIXED = WORKLOADS["mixed"]


def test_delta_nets_on_the_same_step_schedule() -> None:
    """Rounding depends on who is in a step, so steps are stock's: everybody has room."""
    expected = kind_reference("qwen3_next")["mixed"]
    case = kind_case("qwen3_next", num_blocks=400)
    runner = start(case)
    try:
        assert set(runner.scheduler.block_owner.geometry.side_windows) == {STATE}
        for hook in (at_distances(MIXED, num_groups(case), first=1), churn(6)):
            outcome = runner.run(MIXED, hook=hook)
            assert outcome.num_steps == expected.num_steps, "not the same schedule"
            assert first_difference(expected, outcome) == {}
            assert outcome.sums["num_loads"] >= 50
        assert min(outcome.num_offloads, outcome.num_restores) >= 10
    finally:
        runner.close()
