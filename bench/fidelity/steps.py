"""Decode steps of a run, read off the instants at which its tokens came. Pure."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from bench.e2e.records import RunRecord

SAME_FRAME_S = 2e-3  # tokens of one step come at most so far apart


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeStep:
    """A step in which requests got a token that had got one in the frame before."""

    seconds: float
    num_requests: int  # that got a token then, too
    num_context_tokens: int  # KV tokens that they read, over all of them


def decode_steps(run: RunRecord) -> Iterator[DecodeStep]:
    """Yield the steps between two frames of the same requests, while no first token is awaited.

    What a prompt computes meanwhile would otherwise count as decoding.
    """
    prompts = _waiting(run)
    for (before_s, before), (now_s, now) in pairwise(_frames(run)):
        awaited = any(a < now_s and before_s + SAME_FRAME_S < b for a, b in prompts)
        if before.keys() == now.keys() and not awaited:
            yield _step(run, now_s - before_s, now)


def mixed_steps(run: RunRecord) -> Iterator[DecodeStep]:
    """Yield the steps between frames while a first token is awaited: those with prompts are here.

    Some of them have no prompt: the awaited one is still in the queue.
    """
    prompts = _waiting(run)
    for (before_s, before), (now_s, now) in pairwise(_frames(run)):
        awaited = any(a < now_s and before_s + SAME_FRAME_S < b for a, b in prompts)
        both = {place: number for place, number in now.items() if place in before}
        if both and awaited:
            yield _step(run, now_s - before_s, both)


def _frames(run: RunRecord) -> list[tuple[float, dict[int, int]]]:
    """Return when frames came, and whose token of which number they brought."""
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
    return frames


def _step(run: RunRecord, seconds: float, numbers: dict[int, int]) -> DecodeStep:
    context = [run.requests[place].num_prompt_tokens + n for place, n in numbers.items()]
    return DecodeStep(seconds=seconds, num_requests=len(numbers), num_context_tokens=sum(context))


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
