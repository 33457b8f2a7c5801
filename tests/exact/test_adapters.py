"""LoRA adapters pass through layer-wise KV: requests with one and without, in the same steps."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from lab.models import HEAD_DIM, HIDDEN_SIZE, MLP_GAIN, NUM_KV_HEADS, NUM_LAYERS
from lab.step_runner import Arrival, first_difference, run_case, stock
from lab.workloads import churn, mixed
from tests.exact.cases import make_case

# Engines run in this process: their warnings are not ours to fail on.
pytestmark = [
    pytest.mark.filterwarnings("default"),
    pytest.mark.timeout(900),
    pytest.mark.nightly,
]

RANK = 8
OUTPUTS = {"q_proj": HIDDEN_SIZE, "v_proj": NUM_KV_HEADS * HEAD_DIM}


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return an adapter that moves queries and values of every layer."""
    directory = tmp_path_factory.mktemp("adapter")
    generator = torch.Generator().manual_seed(7)
    weights = {}
    for layer in range(NUM_LAYERS):
        for name, num_outputs in OUTPUTS.items():
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            for part, shape in (("A", (RANK, HIDDEN_SIZE)), ("B", (num_outputs, RANK))):
                drawn = torch.randn(shape, generator=generator) * MLP_GAIN / shape[1] ** 0.5
                weights[f"{prefix}.lora_{part}.weight"] = drawn
    save_file(weights, directory / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": 4 * RANK}
    config |= {"target_modules": list(OUTPUTS), "bias": "none", "base_model_name_or_path": ""}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return directory


def test_tokens_with_adapters_are_stock_vllms(adapter: Path) -> None:
    case = make_case(takes_adapters=True)
    plain = mixed(NUM_LAYERS)
    workload: list[Arrival] = [
        replace(arrival, adapter=adapter) if number % 2 else arrival
        for number, arrival in enumerate(plain)
    ]

    expected = run_case(stock(case), workload)
    without = run_case(stock(case), plain)
    actual = run_case(case, workload, hook=churn(1))

    assert first_difference(expected, actual) == {}
    adapted = {arrival.request_id for arrival in workload if arrival.adapter is not None}
    assert first_difference(without, expected).keys() >= adapted  # else it would prove nothing
    assert actual.num_offloads >= 20
    assert actual.sums["num_loads"] >= 1_000
