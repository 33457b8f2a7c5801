"""How a parked request comes back: by load, by recompute, or with its layers left on the host.

TokenFlow (section 5.3) compares the time of the load with the time of the recompute. Here the three
ways are compared by the delay they cause to all, in seconds summed over requests:

    load            this request waits until its bytes are through the queue, and for the step of
                    others that they end in; no other does
    recompute       the whole batch waits for the prefill
    host-resident   nothing is copied ahead: the batch waits in each step for what is not back yet,
                    less and less; with one staging buffer no layer's copy hides behind another

Layers that have no room in the pool are on the host whichever way it comes back, and in each step
the batch waits for them: what all ways have in common is left out.
"""

import math
from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum


class ResumeWay(Enum):
    LOAD = "load"
    RECOMPUTE = "recompute"
    HOST_RESIDENT = "host_resident"


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptCost:
    """What the tokens of one prompt take; each attends to those before it."""

    token_s: float  # each, >= 0
    pair_s: float = 0.0  # for each token that it attends to, >= 0

    def seconds(self, first: int, last: int) -> float:
        """Return the time of tokens [first, last)."""
        num_pairs = (last * last - first * first) / 2.0
        return self.token_s * (last - first) + self.pair_s * num_pairs


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkAndStep:
    """What the engine has measured of itself; None until there is a sample."""

    h2d_bytes_per_s: float | None
    prompt: PromptCost | None
    step_s: float  # a decode step without copies
    step_bytes: int  # what the running batch loads in each step, >= 0
    queue_bytes: int  # background copies before this one, >= 0
    num_running: int  # requests that a longer step delays, >= 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ParkedRequest:
    """What there is to bring back."""

    num_tokens: int  # all of its known tokens, >= 1
    num_host_tokens: int  # leading ones whose KV is on the host
    load_bytes: int  # of the layers that have room in the pool
    num_left: int  # tokens that it may still generate, >= 1
    first_bytes: int = 0  # of what must be there before it runs, whatever stays on the host
    found_bytes: int = 0  # of those to be loaded, what free blocks of the pool still hold
    num_shared_tokens: int = 0  # leading ones that others have in the pool


MIN_LINK_SHARE = 0.05  # of the link is left to background copies, whatever the steps load


def resume_costs(parked: ParkedRequest, engine: LinkAndStep) -> dict[ResumeWay, float]:
    """Return each way's delay in request-seconds. Rate and cost must be known."""
    assert engine.h2d_bytes_per_s
    assert engine.prompt is not None
    num_delayed = engine.num_running + 1
    tail_s = engine.prompt.seconds(parked.num_host_tokens, parked.num_tokens)
    step_load_s = engine.step_bytes / engine.h2d_bytes_per_s
    step_s = max(engine.step_s, step_load_s, 1e-9)
    background_share = max(MIN_LINK_SHARE, 1.0 - step_load_s / step_s)
    background_bytes_per_s = engine.h2d_bytes_per_s * background_share
    copied_bytes = parked.load_bytes - parked.found_bytes
    first_bytes, rest_bytes = parked.first_bytes, copied_bytes
    if first_bytes:  # they are behind what is queued, and all else is behind them
        first_bytes += engine.queue_bytes
    elif copied_bytes:
        rest_bytes += engine.queue_bytes

    def back_s(num_bytes: int) -> float:
        return num_bytes / background_bytes_per_s

    def waits_s(num_bytes: int) -> float:  # an idle engine looks at once
        whole_s = math.ceil(back_s(num_bytes) / step_s - 1e-9) * step_s
        return whole_s if engine.num_running else back_s(num_bytes)

    # That end before all that has room is back, of a request that runs meanwhile.
    num_steps = math.ceil(back_s(rest_bytes) / step_s - 1e-9)
    num_staged = min(num_steps, parked.num_left)
    mean_left_frac = 1.0 - (num_staged - 1) / (2 * num_steps) if num_steps else 0.0
    stalls_s = num_staged * mean_left_frac * copied_bytes / engine.h2d_bytes_per_s
    return {
        ResumeWay.LOAD: waits_s(first_bytes + rest_bytes) + num_delayed * tail_s,
        ResumeWay.RECOMPUTE: num_delayed
        * engine.prompt.seconds(parked.num_shared_tokens, parked.num_tokens),
        ResumeWay.HOST_RESIDENT: waits_s(first_bytes) + num_delayed * (tail_s + stalls_s),
    }


def cheapest_resume(
    parked: ParkedRequest, engine: LinkAndStep, *, ways: Collection[ResumeWay] = tuple(ResumeWay)
) -> ResumeWay:
    """Return the way of least delay; ties go to the load, then to the recompute.

    While one of the two is unknown, what is on the host is loaded, if that is one of the `ways`.
    """
    if parked.num_host_tokens <= 0:
        return ResumeWay.RECOMPUTE
    if len(ways) == 1:
        return next(iter(ways))
    if not engine.h2d_bytes_per_s or engine.prompt is None:
        return ResumeWay.LOAD
    costs = resume_costs(parked, engine)
    return min((way for way in ResumeWay if way in ways), key=lambda way: costs[way])
