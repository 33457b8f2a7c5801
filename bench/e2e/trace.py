"""What arrives: seeded synthetic requests, or a recorded trace scaled down."""

import json
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice
from pathlib import Path
from types import MappingProxyType
from typing import Any

from services.pacing.types import NO_SERVICE_LEVEL, ServiceLevel
from simulator.workload import leaving_points

VOCABULARY = range(10, 2_000)  # of the exactness model, without its special tokens
MIN_TOKENS = 8
NUM_WARM_UP_REQUESTS = 8

# Readers: what each reader states as its SLO and interval between tokens, x the run's SLO, one
# request after the other; 0: nothing.
READERS: Mapping[str, tuple[float, ...]] = MappingProxyType(
    {"paced": (1.0,), "half": (1.0, 0.0), "mixed": (0.75, 1.0, 2.0, 4.0), "unpaced": (0.0,)}
)

# (share of requests, shortest and longest prompt, shortest and longest answer), in tokens
LENGTH_CLASSES = (
    (0.25, (96, 300), (60, 140)),
    (0.40, (400, 900), (80, 160)),
    (0.35, (1_000, 1_500), (60, 140)),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedRequest:
    """One request of a trace."""

    request_id: str
    arrival_s: float  # after the start
    num_prompt_tokens: int
    num_output_tokens: int  # exactly so many are generated, unless its reader leaves
    leaves_after: int | None = None  # tokens of which its reader goes; None: it stays
    level: ServiceLevel = NO_SERVICE_LEVEL  # what it states

    @property
    def at_once(self) -> "TracedRequest":
        """Return the same without its arrival and its reader."""
        return replace(self, arrival_s=0.0, leaves_after=None, level=NO_SERVICE_LEVEL)

    def prompt(self) -> list[int]:
        """Return token ids that depend on nothing but the request's id."""
        rng = random.Random(self.request_id)
        return [rng.choice(VOCABULARY) for _ in range(self.num_prompt_tokens)]


def stated_slos_s(readers: str, num_requests: int, slo_s: float) -> list[float]:
    """Return what each request of a trace states, in its order; 0: nothing."""
    return [slo_s * share for share in islice(cycle(READERS[readers]), num_requests)]


def with_slos(trace: Sequence[TracedRequest], slos_s: Sequence[float]) -> list[TracedRequest]:
    """Return a trace whose requests state these SLOs, their pace too; 0: neither."""
    bounds_s = [slo_s or None for slo_s in slos_s]
    levels = [ServiceLevel(slo_tbt_s=slo_s, slo_tpot_s=slo_s) for slo_s in bounds_s]
    return [replace(one, level=level) for one, level in zip(trace, levels, strict=True)]


def with_leavers(trace: Sequence[TracedRequest], frac: float, seed: int) -> list[TracedRequest]:
    """Return a trace of whose readers so large a share leaves, wherever in the answer."""
    points = leaving_points([request.num_output_tokens for request in trace], frac, seed)
    pairs = zip(trace, points, strict=True)
    return [replace(request, leaves_after=point) for request, point in pairs]


def poisson_trace(*, seed: int, num_requests: int, mean_gap_s: float) -> list[TracedRequest]:
    """Return requests of mixed lengths that arrive independently of each other."""
    rng = random.Random(seed)
    weights = [share for share, _, _ in LENGTH_CLASSES]
    arrival_s, trace = 0.0, list[TracedRequest]()
    for number in range(num_requests):
        _, prompts, outputs = rng.choices(LENGTH_CLASSES, weights)[0]
        trace.append(
            TracedRequest(
                request_id=f"s{seed}-{number}",
                arrival_s=arrival_s,
                num_prompt_tokens=rng.randint(*prompts),
                num_output_tokens=rng.randint(*outputs),
            )
        )
        arrival_s += rng.expovariate(1 / mean_gap_s)
    return trace


def recorded_trace(path: Path, *, token_scale: float, step_s: float) -> list[TracedRequest]:
    """Return a trace in OrbitFlow's format, lengths times `token_scale`.

    Its arrival times count engine steps; they shrink like the lengths, so that the load stays.
    """
    requests: dict[str, dict[str, Any]] = json.loads(path.read_text())["requests"]
    return [
        TracedRequest(
            request_id=f"{path.stem}-{number}",
            arrival_s=request["arrival_time"] * token_scale * step_s,
            num_prompt_tokens=max(MIN_TOKENS, math.ceil(request["input_length"] * token_scale)),
            num_output_tokens=max(MIN_TOKENS, math.ceil(request["output_length"] * token_scale)),
        )
        for number, request in enumerate(requests.values())
    ]


def warm_up(num_requests: int) -> list[TracedRequest]:
    """Return requests of every length class that come before the counted ones, at once."""
    return [
        TracedRequest(
            request_id=f"warm-{number}",
            arrival_s=0.0,
            num_prompt_tokens=LENGTH_CLASSES[number % len(LENGTH_CLASSES)][1][1],
            num_output_tokens=40,
        )
        for number in range(num_requests)
    ]
