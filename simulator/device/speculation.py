"""Steps that verify drafted tokens, spread over the tokens that they bring."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from simulator.device.costs import Costs, StepLoad


@dataclass(frozen=True, slots=True, kw_only=True)
class Speculation:
    """How well drafting goes."""

    tokens_per_step: float  # of one request, its own next one included, >= 1
    num_drafted: int  # tokens of one request that each step verifies, >= tokens_per_step - 1
    draft_frac: float = 0.0  # of a step's compute, to draft them

    @classmethod
    def of(cls, tokens_per_step: float, *, draft_frac: float) -> "Speculation":
        """Return what accepts so many tokens of as few drafted ones as one would set."""
        return cls(
            tokens_per_step=tokens_per_step,
            num_drafted=math.ceil(tokens_per_step),
            draft_frac=draft_frac,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeCosts:
    """What one token of each request takes: its share of a step that brings several.

    Chunks of prompts take what they take. KV that is copied in for a step is so for each token.
    """

    costs: Costs
    speculation: Speculation

    def layer_s(self, load: StepLoad) -> float:
        return self._share(load, self.costs.layer_s)

    def outside_s(self, load: StepLoad) -> float:
        return self._share(load, self.costs.outside_s)

    def reduce_bytes(self, load: StepLoad) -> int:
        return int(self._share(load, self.costs.reduce_bytes))

    def _share(self, load: StepLoad, cost: Callable[[StepLoad], float]) -> float:
        if not load.num_decodes:
            return cost(load)
        given = self.speculation
        each = (load.num_context_tokens // load.num_decodes,) * load.num_decodes
        num_decodes = load.num_decodes * (1 + given.num_drafted)
        verifying = replace(load, num_decodes=num_decodes, contexts=load.contexts or each)
        alone = cost(replace(verifying, chunks=(), recomputed=()))
        beside = cost(verifying) - alone
        return alone * (1.0 + given.draft_frac) / given.tokens_per_step + beside
