"""Requests that come with output, in vLLM's first model runner.

That runner takes a request that it does not know for one without output: penalties, forbidden words
and the least number of tokens would begin anew, and so would the draws of a seed. vLLM's second
runner is told all tokens that are to be computed, and draws by position: it needs nothing of this.
"""

from typing import Any

import torch
from vllm.sampling_params import SamplingParams
from vllm.v1.worker import gpu_model_runner
from vllm.v1.worker.gpu_input_batch import CachedRequestState

from services.executor.request_tag import begun_of


def install(config: Any) -> None:
    """Let this process's first model runner know what requests were begun with elsewhere."""
    model = config.model_config
    draw = Draws(model.get_vocab_size(), in_doubles=model.use_fp64_gumbel)

    class ResumedState(CachedRequestState):  # type: ignore[misc]
        """A request that has its output from the start, and a generator that has drawn for it."""

        def __post_init__(self) -> None:
            super().__post_init__()
            begun = begun_of(_extra_args(self.sampling_params))
            if begun is None:
                return
            self.output_token_ids = list(begun.output_ids)
            if self.generator is not None:
                draw.repeat(self.generator, len(begun.output_ids))

    gpu_model_runner.CachedRequestState = ResumedState


def _extra_args(params: SamplingParams | None) -> dict[str, Any] | None:
    return params.extra_args if params is not None else None


class Draws:
    """What vLLM draws of a seeded request's generator for each of its tokens."""

    def __init__(self, vocabulary_size: int, *, in_doubles: bool) -> None:
        """`in_doubles`: noise is drawn in double precision."""
        self._size = vocabulary_size
        self._dtype = torch.float64 if in_doubles else torch.float32

    def repeat(self, generator: torch.Generator, num_tokens: int) -> None:
        """Bring a new generator to where it is after so many tokens."""
        if generator.device.type != "cpu":
            self._skip(generator, num_tokens)
        elif self._dtype is torch.float64:
            for _ in range(num_tokens):
                self._noise(generator)
        else:
            for _ in range(num_tokens):
                torch.randint(0, 2**31, (1,), generator=generator, dtype=torch.long)

    def _skip(self, generator: torch.Generator, num_tokens: int) -> None:
        """Move the offset of a device's generator, which every draw of one size moves as far."""
        start = generator.get_offset()
        self._noise(generator)
        step = generator.get_offset() - start
        generator.set_offset(start + step * num_tokens)

    def _noise(self, generator: torch.Generator) -> None:
        """Draw once as vLLM does for a token."""
        noise = torch.empty(self._size, dtype=self._dtype, device=generator.device)
        noise.exponential_(generator=generator)
