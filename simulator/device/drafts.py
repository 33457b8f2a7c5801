"""Speculative decoding: a step verifies drafts of what comes next, and keeps the right ones."""

import random
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafts:
    """How many tokens are drafted, how well, and at which price."""

    num_drafts: int  # of each request that decodes and step, >= 1
    acceptance: float  # share of an answer's tokens that are drafted right, [0, 1]
    cost_frac: float = 0.0  # of the time of a step's layers, to draft for the next one, >= 0

    @property
    def tokens_per_step(self) -> float:
        """Return how many tokens a step brings a request on average: right ones, and its own."""
        return sum(self.acceptance**number for number in range(self.num_drafts + 1))

    @property
    def max_ahead_tokens(self) -> int:
        """Return what a request has room for: drafts of two steps, and what the drafter writes."""
        return 3 * self.num_drafts

    def right_ones(self, num_tokens: int, *, seed: str) -> list[bool]:
        """Return which tokens of an answer are drafted right: each by itself, whatever the step."""
        rng = random.Random(f"drafts-{seed}")
        return [rng.random() < self.acceptance for _ in range(num_tokens)]
