"""Quantised weights pass through layer-wise KV: compressed-tensors' INT8, by oneDNN."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from lab.engine.step_runner import Model, first_difference, run_case, stock
from lab.engine.workloads import churn, mixed
from lab.models import NUM_LAYERS, exactness_model
from tests.exact.cases import make_case

# Engines run in this process: their warnings are not ours to fail on.
pytestmark = [
    pytest.mark.filterwarnings("default"),
    pytest.mark.timeout(900),
    pytest.mark.nightly,
]

INT8 = {"num_bits": 8, "type": "int", "symmetric": True}
QUANTISATION = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {**INT8, "strategy": "channel", "dynamic": False},
            "input_activations": {**INT8, "strategy": "token", "dynamic": True},
        }
    },
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the exactness model with its layers' matrices in eight bits, row by row."""
    directory = tmp_path_factory.mktemp("int8") / "model"
    shutil.copytree(exactness_model(), directory)
    weights = load_file(directory / "model.safetensors")
    for name in [name for name in weights if name.endswith("_proj.weight")]:
        scale = weights[name].abs().amax(1, keepdim=True) / 127
        weights[name] = (weights[name] / scale).round().to(torch.int8)
        weights[f"{name}_scale"] = scale
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] = QUANTISATION
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def test_tokens_of_quantised_weights_are_stock_vllms(model: Path) -> None:
    case = make_case(model=Model(directory=lambda: model, num_layers=NUM_LAYERS))
    workload = mixed(NUM_LAYERS)

    expected = run_case(stock(case), workload)
    plain = run_case(stock(make_case()), workload)
    actual = run_case(case, workload, hook=churn(1))

    assert first_difference(expected, actual) == {}
    assert first_difference(plain, expected)  # else nothing would be quantised
    assert actual.num_offloads >= 20
    assert actual.sums["num_loads"] >= 1_000
