"""The CPU worker: tiles, generators of dropped tokens, nothing compiled where eager was asked."""

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch._dynamo.utils import counters
from vllm.v1.attention.backends.cpu_attn import _get_attn_isa
from vllm.v1.sample.ops.logprobs import batched_count_greater_than

from services.executor.plugin.cpu_worker import (
    CPUWorker,
    EvenflowCPUWorker,
    _generators_of_dropped_tokens_away,
    allow_tiles,
)

TILES_BIT = 18  # XFEATURE_XTILE_DATA
READ_PERMISSIONS = f"""
import ctypes
from services.executor.plugin.cpu_worker import allow_tiles, torch

def permitted():
    features = ctypes.c_ulong()
    assert ctypes.CDLL(None).syscall(158, 0x1022, ctypes.byref(features)) == 0
    return bool(features.value >> {TILES_BIT} & 1)

before = permitted()
allow_tiles()
print(torch.cpu._is_amx_tile_supported(), before, permitted())
"""


def make_runner(dropped: list[bool], seeded: dict[int, str]) -> Any:
    mask = np.array([*dropped, True])  # the last is no row of this step
    batch = SimpleNamespace(num_reqs=len(dropped), generators=dict(seeded))
    return SimpleNamespace(input_batch=batch, discard_request_mask=SimpleNamespace(np=mask))


def test_only_rows_with_a_dropped_token_are_without_their_generator() -> None:
    runner = make_runner([True, False, True], {0: "a", 1: "b", 3: "d"})

    with _generators_of_dropped_tokens_away(runner):
        assert runner.input_batch.generators == {1: "b", 3: "d"}

    assert runner.input_batch.generators == {0: "a", 1: "b", 3: "d"}


def test_a_step_that_fails_gives_them_back() -> None:
    runner = make_runner([True], {0: "a"})

    with pytest.raises(ValueError, match="failed"), _generators_of_dropped_tokens_away(runner):
        raise ValueError("failed")

    assert runner.input_batch.generators == {0: "a"}


@pytest.mark.skipif(not torch.cpu._is_amx_tile_supported(), reason="a processor without AMX")
def test_a_process_may_use_tiles_once_it_has_asked() -> None:
    said = subprocess.run([sys.executable, "-c", READ_PERMISSIONS], capture_output=True, text=True)

    assert said.stdout.split() == ["True", "False", "True"], said.stderr


@pytest.mark.parametrize(
    ("is_supported", "is_allowed", "are_tiles_used"),
    [(True, True, True), (True, False, False), (False, False, False)],
)
def test_vllm_uses_tiles_only_where_the_kernel_allows_them(
    monkeypatch: pytest.MonkeyPatch, is_supported: bool, is_allowed: bool, are_tiles_used: bool
) -> None:
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: is_supported)
    monkeypatch.setattr(torch.cpu, "_init_amx", lambda: is_allowed)

    allow_tiles()

    assert (_get_attn_isa(torch.bfloat16, block_size=32) == "amx") is are_tiles_used


@pytest.mark.parametrize("is_eager", [True, False])
def test_functions_that_vllm_would_compile_run_as_they_are_where_eager_was_asked_for(
    monkeypatch: pytest.MonkeyPatch, is_eager: bool
) -> None:
    monkeypatch.setattr(CPUWorker, "load_model", lambda self: None)
    worker = object.__new__(EvenflowCPUWorker)
    worker.model_config = SimpleNamespace(enforce_eager=is_eager)
    values = torch.tensor([[1.0, 3.0, 2.0]])
    stances: list[str] = []
    set_stance = torch.compiler.set_stance
    monkeypatch.setattr(torch.compiler, "set_stance", stances.append)

    worker.load_model()

    assert stances == ["force_eager"] * is_eager
    for stance in stances:
        counters.clear()
        with set_stance(stance):
            assert batched_count_greater_than(values, torch.tensor([[2.0]])).tolist() == [2]
        assert "frames" not in counters  # Dynamo has looked at nothing
