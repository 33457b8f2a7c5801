"""Rows of requests that come with output: their tokens, and a generator that has drawn for them."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.sampling_params import SamplingParams
from vllm.v1.worker import gpu_model_runner

from services.executor.plugin.resumed_rows import Draws, install
from services.executor.request_tag import Begun, to_extra_args, with_begun
from services.pacing.types import NO_SERVICE_LEVEL

IDS = [5, 6, 7]
VOCABULARY = 50


@pytest.fixture(autouse=True)
def _installed(monkeypatch: pytest.MonkeyPatch) -> None:
    states = gpu_model_runner.CachedRequestState
    monkeypatch.setattr(gpu_model_runner, "CachedRequestState", states)  # put back at the end
    model = SimpleNamespace(get_vocab_size=lambda: VOCABULARY, use_fp64_gumbel=False)
    install(SimpleNamespace(model_config=model))


def make_state(params: SamplingParams | None, generator: torch.Generator | None = None) -> Any:
    return gpu_model_runner.CachedRequestState(
        req_id="r",
        prompt_token_ids=[1, 2],
        mm_features=[],
        sampling_params=params,
        generator=generator,
        block_ids=([],),
        num_computed_tokens=0,
        output_token_ids=[],
    )


def begun_params() -> SamplingParams:
    extra_args = with_begun(to_extra_args(NO_SERVICE_LEVEL), Begun(IDS, 0, 0.0, 0.0), reads=True)
    return SamplingParams(seed=3, extra_args=extra_args)


def seeded(seed: int = 3) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def draw(generator: torch.Generator) -> int:
    """As vLLM's sampler does for a token on a CPU."""
    return int(torch.randint(0, 2**31, (1,), generator=generator, dtype=torch.long))


def test_a_row_has_its_tokens_and_draws_the_next_one() -> None:
    state = make_state(begun_params(), seeded())
    undisturbed = seeded()
    for _ in IDS:
        draw(undisturbed)

    assert (state.output_token_ids, state.num_tokens) == (IDS, 5)
    assert draw(state.generator) == draw(undisturbed)


def test_a_row_of_its_own_changes_with_its_tokens_alone() -> None:
    params = begun_params()
    first = make_state(params)
    first.output_token_ids.append(8)

    assert make_state(params).output_token_ids == IDS


@pytest.mark.parametrize("params", [None, SamplingParams(), SamplingParams(extra_args={"a": 1})])
def test_other_rows_begin_as_they_did(params: SamplingParams | None) -> None:
    state = make_state(params, seeded())

    assert state.output_token_ids == []
    assert draw(state.generator) == draw(seeded())


def test_noise_in_doubles_is_drawn_as_vllm_draws_it() -> None:
    generator, undisturbed = seeded(), seeded()
    Draws(VOCABULARY, in_doubles=True).repeat(generator, 3)
    for _ in range(3):
        torch.empty(VOCABULARY, dtype=torch.float64).exponential_(generator=undisturbed)

    assert draw(generator) == draw(undisturbed)


class DeviceGenerator:
    """A device's generator: draws move its offset, by as much as they are large."""

    device = SimpleNamespace(type="cuda")

    def __init__(self) -> None:
        self.offset = 0

    def get_offset(self) -> int:
        return self.offset

    def set_offset(self, offset: int) -> None:
        self.offset = offset


def test_a_device_s_generator_is_moved_by_as_many_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[int] = []

    class Noise:
        def exponential_(self, *, generator: DeviceGenerator) -> None:
            generator.offset += 12  # of three rounds of four
            drawn.append(generator.offset)

    monkeypatch.setattr(torch, "empty", lambda *args, **kwargs: Noise())
    generator: Any = DeviceGenerator()
    Draws(VOCABULARY, in_doubles=False).repeat(generator, 40)

    assert (generator.offset, drawn) == (480, [12])
