"""How long one decode step takes when some layers' KV comes from host memory.

One copy queue, ordered by the layer that needs the data, earliest first. A request's copy for an
offloaded layer may start when a buffer of the request is free: the first m copies at the start of
the step, each later one at the end of the offloaded layer m places before it. Compute of layer l
starts when the layer before it has ended and its data is there. Two forms of the same time:

- event recursion: keep the work W[l] needed by each layer; what is due stalls, what is later
  flows while a layer computes;
- closed form: s_l = max(e_{l-1}, max_{i<l} e_i + D(i, l)), e_l = s_l + comp_l, where D(i, l) is
  the work released at or after e_i and needed by layer l. T = e_L, a longest path.

No order of copies is faster: s_l >= e_i + D(i, l) holds for all of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from services.placement.step_time.patterns import Pattern


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetch:
    """What one request copies in one step."""

    pattern: Pattern
    layer_s: float  # seconds on the link for one offloaded layer (b_r / B), >= 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLatency:
    """One step, without the time outside the layers."""

    stalls_s: tuple[float, ...]  # before each layer
    total_s: float  # compute and stalls


@dataclass(frozen=True, slots=True)
class Job:
    """The copy of one offloaded layer."""

    release: int  # may start at the end of this many layers; 0: at the start of the step
    needed: int  # layer that waits for it, counted from 1
    work_s: float


def jobs_of(fetch: Fetch) -> list[Job]:
    """Return the copies of one request, in order."""
    return [Job(release, needed, fetch.layer_s) for release, needed in _spans(fetch.pattern)]


@lru_cache(maxsize=4096)
def _spans(pattern: Pattern) -> tuple[tuple[int, int], ...]:
    """Return when each offloaded layer may be copied, and which layer waits for it."""
    layers, depth = pattern.offloaded, pattern.num_buffers
    return tuple(
        (0 if j < depth else layers[j - depth] + 1, layer + 1) for j, layer in enumerate(layers)
    )


def step_timing(compute_s: Sequence[float], fetches: Sequence[Fetch]) -> StepLatency:
    """Return the step's timing by the event recursion. `compute_s`: per layer."""
    released: dict[int, list[tuple[int, float]]] = {}
    for fetch in fetches:
        for release, needed in _spans(fetch.pattern):
            released.setdefault(release, []).append((needed, fetch.layer_s))
    work: dict[int, float] = {}  # that is not done, by needed layer, counted from 1
    stalls = []
    for layer, seconds in enumerate(compute_s, start=1):
        for needed, work_s in released.get(layer - 1, ()):
            work[needed] = work.get(needed, 0.0) + work_s
        stalls.append(work.pop(layer, 0.0))
        if work:
            _flow(work, seconds)
    return StepLatency(stalls_s=tuple(stalls), total_s=sum(compute_s) + sum(stalls))


def _flow(work: dict[int, float], seconds: float) -> None:
    """Serve the queue for `seconds`, earliest-needed layer first."""
    for layer in sorted(work):
        waiting = work[layer]
        if waiting > seconds:
            work[layer] = waiting - seconds
            return
        del work[layer]
        seconds -= waiting
