"""Decode steps of a run, read off the instants at which its tokens came. Pure."""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from bench.e2e.records import RunRecord

SAME_FRAME_S = 2e-3  # tokens of one step come at most so far apart


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeStep:
    """A step in which the same requests got a token as in the one before."""

    seconds: float
    num_requests: int
    num_context_tokens: int  # KV tokens that they read, over all of them


def decode_steps(run: RunRecord) -> Iterator[DecodeStep]:
    """Yield the steps between two frames of the same requests, while no first token is awaited.

    What a prompt computes meanwhile would otherwise count as decoding.
    """
    tokens = sorted(
        (instant_s, place, number)
        for place, request in enumerate(run.requests)
        for number, instant_s in enumerate(request.generated_s)
    )
    frames: list[tuple[float, dict[int, int]]] = []
    for instant_s, place, number in tokens:
        if not frames or instant_s - frames[-1][0] > SAME_FRAME_S or place in frames[-1][1]:
            frames.append((instant_s, {}))
        frames[-1][1][place] = number
    prompts = _waiting(run)
    for (before_s, before), (now_s, now) in pairwise(frames):
        if before.keys() == now.keys() and not any(
            a < now_s and before_s + SAME_FRAME_S < b for a, b in prompts
        ):
            context = [
                run.requests[place].num_prompt_tokens + number for place, number in now.items()
            ]
            yield DecodeStep(
                seconds=now_s - before_s, num_requests=len(now), num_context_tokens=sum(context)
            )


def _waiting(run: RunRecord) -> list[tuple[float, float]]:
    """Return when requests waited for their first token, as disjoint spans."""
    spans = sorted((r.submitted_s, r.generated_s[0]) for r in run.requests if r.generated_s)
    merged: list[tuple[float, float]] = []
    for low, high in spans:
        if merged and low <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], high))
        else:
            merged.append((low, high))
    return merged


def by_size(steps: list[DecodeStep]) -> dict[int, list[DecodeStep]]:
    """Return the steps by the number of requests in them."""
    groups: dict[int, list[DecodeStep]] = defaultdict(list)
    for step in steps:
        groups[step.num_requests].append(step)
    return dict(groups)
