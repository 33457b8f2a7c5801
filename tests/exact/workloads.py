"""Workloads and placement changes of the exactness runs."""

import random
from collections.abc import Sequence
from typing import Any

from services.executor.kv.residency import LayerPlacement
from tests.exact.harness import Arrival, Hook, make_prompt

# (arrival step, prompt tokens, output tokens): lengths around block boundaries, staggered.
MIXED_LENGTHS = (
    (0, 5, 70),
    (0, 100, 60),
    (1, 333, 90),
    (4, 64, 40),
    (9, 31, 100),
    (15, 500, 50),
    (20, 32, 33),
    (40, 257, 64),
)


def mixed(lengths: Sequence[tuple[int, int, int]] = MIXED_LENGTHS) -> list[Arrival]:
    return [
        Arrival(
            request_id=f"r{number}",
            prompt=make_prompt(num_prompt, seed=number),
            num_output_tokens=num_output,
            step=step,
        )
        for number, (step, num_prompt, num_output) in enumerate(lengths)
    ]


def every(distance: int, num_groups: int) -> frozenset[int]:
    """Return every `distance`-th layer group, the last one included."""
    return frozenset(g for g in range(num_groups) if (num_groups - 1 - g) % distance == 0)


def fixed(offloaded: dict[str, frozenset[int]], num_staging: int = 2) -> Hook:
    """Give named requests a placement when they arrive."""

    def hook(scheduler: Any, step: int) -> None:
        for request_id, groups in offloaded.items():
            if request_id in scheduler.requests:
                placement = LayerPlacement(offloaded=groups, num_staging=num_staging)
                scheduler.place(request_id, placement)

    return hook


def churn(seed: int, num_staging: tuple[int, ...] = (1, 2), share: float = 0.4) -> Hook:
    """Before each step, give a share of the running requests a new random placement."""
    rng = random.Random(seed)

    def hook(scheduler: Any, step: int) -> None:
        num_groups = scheduler.block_owner.geometry.num_groups
        for request in list(scheduler.running):
            if rng.random() < share:
                density = rng.random()
                groups = frozenset(g for g in range(num_groups) if rng.random() < density)
                scheduler.place(
                    request.request_id,
                    LayerPlacement(offloaded=groups, num_staging=rng.choice(num_staging)),
                )

    return hook


def holds(
    seed: int, kinds: tuple[str, ...] = ("pause", "park"), begin: float = 0.15, end: float = 0.3
) -> Hook:
    """Before each step, hold requests back at random, and let held ones go."""
    rng = random.Random(seed)

    def hook(scheduler: Any, step: int) -> None:
        held = scheduler.paused | scheduler.parked
        for request_id in list(scheduler.requests):
            if request_id in held:
                if rng.random() < end:
                    scheduler.resume(request_id)
            elif rng.random() < begin:
                getattr(scheduler, rng.choice(kinds))(request_id)

    return hook


def together(*hooks: Hook) -> Hook:
    """Return a hook that calls several, in order."""

    def hook(scheduler: Any, step: int) -> None:
        for each in hooks:
            each(scheduler, step)

    return hook
