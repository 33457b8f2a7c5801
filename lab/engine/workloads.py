"""Workloads and placement changes of the exactness runs."""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from lab.engine.orders import Order, held, park, pause, place, resume
from lab.engine.step_runner import Arrival, Hook, make_prompt
from services.placement.layer_placement import LayerPlacement
from services.placement.run.resume import LinkAndStep, ParkedRequest, ResumeWay

Lengths = Sequence[tuple[int, int, int]]  # (arrival step, prompt tokens, output tokens)

# Lengths around block boundaries, staggered: a first wave that moves enough where a request has
# many layer groups, a second one, and a few at the end that leave room.
MIXED_LENGTHS: Lengths = (
    (0, 5, 70),
    (0, 100, 60),
    (1, 333, 90),
    (4, 64, 40),
    (9, 31, 100),
    (15, 500, 50),
    (20, 32, 33),
    (40, 257, 64),
    (62, 420, 60),
    (66, 96, 80),
    (70, 7, 90),
    (84, 290, 70),
    (92, 63, 60),
    (104, 512, 48),
    (112, 33, 50),
    (126, 180, 64),
    (185, 33, 120),
    (190, 130, 110),
    (195, 60, 100),
)

# Others run when a long prompt comes and when it has gone. It alone takes more than the pool.
LONG_LENGTHS: Lengths = (
    (0, 150, 60),
    (0, 95, 90),
    (2, 210, 70),
    (6, 870, 130),
    (10, 40, 140),
    (100, 300, 60),
    (110, 160, 70),
    (130, 120, 90),
    (140, 840, 100),
    (150, 33, 110),
    (200, 250, 60),
    (210, 100, 60),
    (280, 60, 90),
    (285, 130, 80),
)
LONGEST = "l3"
MANY_GROUPS = 8  # whose first waves alone move enough
FIRST_MIXED, FIRST_LONG = 8, 7  # requests of the first waves


def mixed(num_groups: int = 1) -> list[Arrival]:
    """Return the workload of requests that fit; of a model with so many layer groups."""
    arrivals = _arrivals("r", MIXED_LENGTHS)
    return arrivals[:FIRST_MIXED] if num_groups >= MANY_GROUPS else arrivals


def long_prompt(num_groups: int = 1) -> list[Arrival]:
    arrivals = _arrivals("l", LONG_LENGTHS)
    return arrivals[:FIRST_LONG] if num_groups >= MANY_GROUPS else arrivals


def sampled() -> list[Arrival]:
    """Return `mixed`, every other one of it sampled with a seed, with log-probabilities."""
    sampling = {"temperature": 1.0, "top_p": 0.9, "seed": 7, "logprobs": 2}
    return [replace(a, sampling=sampling) if n % 2 else a for n, a in enumerate(mixed())]


def stopping(texts: Mapping[str, str]) -> list[Arrival]:
    """Return `mixed`, some of it ending at a string of its own answer, taken from `texts`."""
    return [
        replace(a, sampling={"stop": [texts[a.request_id][30:36]]}) if n % 4 == 1 else a
        for n, a in enumerate(mixed())
    ]


def with_aborts(workload: Sequence[Arrival], *, seed: int, share: float = 0.3) -> list[Arrival]:
    """Abort some requests at random, from the step of their arrival to about their last one."""
    rng = random.Random(seed)
    return [
        replace(arrival, abort_at=arrival.step + rng.randrange(arrival.num_output_tokens))
        if rng.random() < share
        else arrival
        for arrival in workload
    ]


def _arrivals(prefix: str, lengths: Lengths) -> list[Arrival]:
    return [
        Arrival(
            request_id=f"{prefix}{number}",
            prompt=make_prompt(num_prompt, seed=number),
            num_output_tokens=num_output,
            step=step,
        )
        for number, (step, num_prompt, num_output) in enumerate(lengths)
    ]


def peak_blocks(workload: Sequence[Arrival], *, block_size: int) -> int:
    """Return the most blocks of all layers that the workload takes where nothing waits.

    The engine's steps in closed form: a prompt is computed in the step of its arrival, every step
    after it computes one token, and a request that has all its tokens is gone after its last step.
    """
    last_step = max(a.step + a.num_output_tokens for a in workload)
    return max(
        sum(
            -(-(len(a.prompt) + step - a.step) // block_size)
            for a in workload
            if a.step <= step < _end(a)
        )
        for step in range(last_step)
    )


def _end(arrival: Arrival) -> int:
    """Return the step after which a request that never waits holds nothing."""
    end = arrival.step + arrival.num_output_tokens - 1
    return end if arrival.abort_at is None else min(end, arrival.abort_at)


def every(distance: int, num_groups: int) -> frozenset[int]:
    """Return every `distance`-th layer group, the last one included."""
    return frozenset(g for g in range(num_groups) if (num_groups - 1 - g) % distance == 0)


def fixed(offloaded: dict[str, frozenset[int]], num_staging: int = 2) -> Hook:
    """Give named requests a placement when they arrive."""

    def hook(scheduler: Any, step: int) -> None:
        for request_id, groups in offloaded.items():
            if request_id in scheduler.requests:
                placement = LayerPlacement(offloaded=groups, num_staging=num_staging)
                place(scheduler, request_id, placement)

    return hook


def distances_of(workload: Sequence[Arrival], num_groups: int, *, first: int) -> dict[str, int]:
    """Return a distance for every request but each third one, counting up from `first`."""
    return {
        a.request_id: 1 + (first + n - 1) % num_groups for n, a in enumerate(workload) if n % 3 != 2
    }


def first_distances(num_groups: int) -> Sequence[int]:
    """Return where to begin counting, run by run, so that every distance has a request."""
    return (1, 2) if num_groups >= MANY_GROUPS else (1,)


def at_distances(workload: Sequence[Arrival], num_groups: int, *, first: int) -> Hook:
    """Place requests at `distances_of`; the capacity guard moves the others."""
    distances = distances_of(workload, num_groups, first=first)
    return fixed({name: every(distance, num_groups) for name, distance in distances.items()})


def alternating(distances: Sequence[int], num_groups: int, *, period: int = 25) -> Hook:
    """Give all running requests each of the distances for `period` steps, in turns."""

    def hook(scheduler: Any, step: int) -> None:
        if step % period == 0:
            groups = every(distances[step // period % len(distances)], num_groups)
            placement = LayerPlacement(offloaded=groups, num_staging=2)
            for request in scheduler.running:
                place(scheduler, request.request_id, placement)

    return hook


def churn(seed: int, num_staging: tuple[int, ...] = (1, 2), share: float = 0.8) -> Hook:
    """Before each step, give a share of the running requests a new random placement."""
    rng = random.Random(seed)

    def hook(scheduler: Any, step: int) -> None:
        num_groups = scheduler.block_owner.geometry.num_groups
        for request in list(scheduler.running):
            if rng.random() < share:
                density = rng.random()
                groups = frozenset(g for g in range(num_groups) if rng.random() < density)
                place(
                    scheduler,
                    request.request_id,
                    LayerPlacement(offloaded=groups, num_staging=rng.choice(num_staging)),
                )

    return hook


def holds(
    seed: int, kinds: Sequence[Order] = (pause, park), begin: float = 0.15, end: float = 0.3
) -> Hook:
    """Before each step, hold requests back at random, and let held ones go."""
    rng = random.Random(seed)

    def hook(scheduler: Any, step: int) -> None:
        away = held(scheduler)
        for request_id in list(scheduler.requests):
            if request_id in away:
                if rng.random() < end:
                    resume(scheduler, request_id)
            elif rng.random() < begin:
                rng.choice(kinds)(scheduler, request_id)

    return hook


def random_way(
    seed: int, ways: Sequence[ResumeWay] = tuple(ResumeWay)
) -> Callable[[ParkedRequest, LinkAndStep], ResumeWay]:
    """Return a choice of how parked requests come back, at random."""
    rng = random.Random(seed)
    return lambda parked, engine: rng.choice(ways)


def together(*hooks: Hook) -> Hook:
    """Return a hook that calls several, in order."""

    def hook(scheduler: Any, step: int) -> None:
        for each in hooks:
            each(scheduler, step)

    return hook
