"""What an engine could serve at most, by arithmetic: prompts alone, and decodes in full batches."""

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from math import inf
from statistics import fmean

from services.placement.types import EngineShape
from simulator.device.costs import Costs, StepLoad, prompt_alone_s, resident_step_s
from simulator.report.figures import quantile
from simulator.workload import ArrivingRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """An engine whose requests all have one length."""

    shape: EngineShape
    costs: Costs
    num_prompt_tokens: float  # > 0
    num_output_tokens: float  # > 0

    @property
    def requests_per_s(self) -> float:
        """Return what is load 1: each prompt alone in its steps, each token in a full batch."""
        prompt_s = self.prompt_s(round(self.num_prompt_tokens))
        return 1.0 / (prompt_s + self.num_output_tokens * self.token_s)

    @property
    def num_held(self) -> float:
        """Return how many requests fill the pool, each halfway through its answer."""
        pool_tokens = self.shape.num_blocks // self.shape.num_groups * self.shape.block_size
        return min(pool_tokens / self._num_context_tokens, self.shape.max_num_seqs)

    @property
    def token_s(self) -> float:
        """Return one request's part of a decode step of a full pool."""
        held = self.num_held
        num_context_tokens = int(held * self._num_context_tokens)
        load = StepLoad(num_decodes=max(1, int(held)), num_context_tokens=num_context_tokens)
        step_s = resident_step_s(self.costs, load, num_layers=self.shape.num_layers)
        return step_s / held

    @property
    def _num_context_tokens(self) -> float:
        return self.num_prompt_tokens + self.num_output_tokens / 2

    def prompt_s(self, num_tokens: int) -> float:
        """Return how long a prompt takes, alone in its steps."""
        shape = self.shape
        return prompt_alone_s(
            self.costs,
            num_tokens,
            num_layers=shape.num_layers,
            max_tokens=shape.max_num_batched_tokens,
        )


def first_tokens(
    capacity: Capacity, requests: Sequence[ArrivingRequest], rate_tps: float
) -> dict[str, float]:
    """Return figures of the first tokens of a fluid, in seconds: as `ttft_s` and its quantiles are.

    Prompts are computed first come first served, one at a time; a request that has its first token
    gets `rate_tps` until its answer ends, at a full batch's cost per token. Memory and link are
    free.
    """
    ends: list[float] = []  # a heap: of the requests that are read
    now_s, ttfts_s = 0.0, list[float]()
    for request in requests:
        now_s = max(now_s, request.arrival_s)
        left_s = capacity.prompt_s(request.num_prompt_tokens)
        while left_s > 0.0:
            while ends and ends[0] <= now_s:
                heappop(ends)
            share = max(0.0, 1.0 - len(ends) * rate_tps * capacity.token_s)
            until_s = now_s + left_s / share if share else inf
            if ends and ends[0] < until_s:
                left_s -= share * (ends[0] - now_s)
                now_s = ends[0]
            else:
                left_s, now_s = 0.0, until_s
        ttfts_s.append(now_s - request.arrival_s)
        heappush(ends, now_s + request.num_output_tokens / rate_tps)
    ttfts_s.sort()
    quantiles = {f"ttft_p{part}_s": quantile(ttfts_s, part / 100) for part in (50, 95, 99)}
    return {"ttft_s": fmean(ttfts_s), **quantiles}
