"""What is asked of a device whose pool holds ten requests, in its own steps. Pure.

Load 1 is what the device could serve at most, by arithmetic (`bench/who_runs/capacity.py`); so that
all rates follow from the step of a full pool, what the engine takes beside its layers is measured
before.
"""

import random
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import repeat

from bench.e2e.systems import Device
from bench.e2e.trace import TracedRequest
from bench.fidelity.machine import costs_of, shape_of
from bench.who_runs.capacity import Capacity
from bench.who_runs.cases import lognormal
from services.pacing.types import NO_SERVICE_LEVEL, ServiceLevel
from services.placement.types import EngineShape
from simulator.device.costs import LinearCosts
from simulator.workload import drawn_requests, gamma_gaps

MEAN_PROMPT_TOKENS = 600
MEAN_ANSWER_TOKENS = 150
LARGEST_PROMPT = 1_500
LARGEST_ANSWER = 400
ROOM = Device(pool_tokens=6_784, max_num_seqs=32)  # for ten requests, halfway through their answers
NUM_REQUESTS = 60
CV = 1.7  # of the gaps between arrivals
READING_FRAC = 0.2  # of a full pool's steps, that make a reader's tokens
TTFT_SLO_INTERVALS = 12  # as 2 s are to people that read 6 tokens/s
BURST_POOLS = 3
BURST_GAP_S = 1e-3
NUM_WARM_UP_REQUESTS = 8


class Row(StrEnum):
    """How requests arrive, and what they state."""

    STEADY = "steady"  # in bursts, at load 1; all are read
    BURST = "burst"  # three pools at once; all are read
    MIXED = "mixed"  # as steady, at load 0.9; people with a TTFT SLO, or agents without a rate


LOADS = {Row.STEADY: 1.0, Row.MIXED: 0.9}


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """The device, as fast as it is."""

    outside_s: float  # of a step, outside the layers
    room: Device = ROOM
    num_requests: int = NUM_REQUESTS  # but of the burst

    @property
    def capacity(self) -> Capacity:
        return Capacity(
            shape=self._shape,
            costs=self._costs,
            num_prompt_tokens=MEAN_PROMPT_TOKENS,
            num_output_tokens=MEAN_ANSWER_TOKENS,
        )

    @property
    def step_s(self) -> float:
        """Return the length of a decode step of a full pool."""
        return self.capacity.token_s * self.capacity.num_held

    @property
    def rate_tps(self) -> float:
        return READING_FRAC / self.step_s

    def device(self, link_frac: float) -> Device:
        """Return the device with a link that moves so much of the pool in a step: lambda."""
        return replace(self.room, link_bytes_per_s=link_frac * self.room.pool_bytes / self.step_s)

    def trace(self, row: Row, seed: int) -> list[TracedRequest]:
        """Return a row's requests; those of a seed have the same lengths in the other rows."""
        capacity, num_requests = self.capacity, self.num_requests
        if row is Row.BURST:
            num_requests = int(BURST_POOLS * capacity.num_held)
            return self._drawn(row, seed, repeat(BURST_GAP_S, num_requests))
        rng = random.Random(f"arrivals {seed}")
        gaps_s = gamma_gaps(rng, rate_per_s=LOADS[row] * capacity.requests_per_s, cv=CV)
        return self._drawn(row, seed, [next(gaps_s) for _ in range(num_requests)])

    def warm_up(self) -> list[TracedRequest]:
        """Return requests of the mean lengths that come before the counted ones, at once."""
        return [
            TracedRequest(
                request_id=f"warm-{number}",
                arrival_s=0.0,
                num_prompt_tokens=MEAN_PROMPT_TOKENS,
                num_output_tokens=MEAN_ANSWER_TOKENS,
                level=self._reads,
            )
            for number in range(NUM_WARM_UP_REQUESTS)
        ]

    @property
    def _shape(self) -> EngineShape:
        return shape_of(self.room, offloads=True)

    @property
    def _costs(self) -> LinearCosts:
        return costs_of(self.room, self.outside_s)

    @property
    def _reads(self) -> ServiceLevel:
        return ServiceLevel(consumption_rate_tps=self.rate_tps)

    def _drawn(self, row: Row, seed: int, gaps_s: Iterable[float]) -> list[TracedRequest]:
        """Return a request for each gap, which is before the next."""
        gaps_s, rng = list(gaps_s), random.Random(f"people {seed}")
        lengths = (
            lognormal(MEAN_PROMPT_TOKENS, largest=LARGEST_PROMPT),
            lognormal(MEAN_ANSWER_TOKENS, largest=LARGEST_ANSWER),
        )
        people = replace(self._reads, slo_ttft_s=TTFT_SLO_INTERVALS / self.rate_tps)
        levels = (people, NO_SERVICE_LEVEL) if row is Row.MIXED else (self._reads,)
        return [
            TracedRequest(
                request_id=f"{row}-{seed}-{number}",
                arrival_s=one.arrival_s,
                num_prompt_tokens=one.num_prompt_tokens,
                num_output_tokens=one.num_output_tokens,
                level=rng.choice(levels),
            )
            for number, one in enumerate(
                drawn_requests(gaps_s, lengths, num_requests=len(gaps_s), seed=seed)
            )
        ]
