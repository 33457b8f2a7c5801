"""A logits processor of vLLM's that ends its EngineCore with a request: the seed says when."""

import os
from typing import TYPE_CHECKING

import torch
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor

if TYPE_CHECKING:
    from vllm.config import VllmConfig

AT_PROMPT, AT_40TH_TOKEN = 4_711, 4_712  # seeds
DIES_AT = {AT_PROMPT: 0, AT_40TH_TOKEN: 39}  # tokens that the answer has


class Deadly(LogitsProcessor):
    """Changes no logits."""

    def __init__(
        self, vllm_config: "VllmConfig", device: torch.device, is_pin_memory: bool
    ) -> None:
        self._doomed: list[tuple[int, list[int]]] = []  # tokens at which it ends, and those so far

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        return logits

    def is_argmax_invariant(self) -> bool:
        return True

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        for _, params, _, output in batch_update.added if batch_update else ():
            if params.seed in DIES_AT:
                self._doomed.append((DIES_AT[params.seed], output))
        if any(len(output) >= num_tokens for num_tokens, output in self._doomed):
            os._exit(1)
