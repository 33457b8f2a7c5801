"""A run policy that does as it likes."""

import random
from itertools import count

from services.placement.presets import Run
from services.placement.run.types import RunDecision, RunSnapshot

PARKS_EVERY = 8  # decisions


def at_random(rng: random.Random) -> Run:
    """Return a policy that parks, admits, orders and cuts prompts as it likes, in every step."""
    decisions = count(1)

    def decide(snapshot: RunSnapshot) -> RunDecision:
        running = [r.request_id for r in snapshot.requests if r.runs]
        parks = bool(running) and next(decisions) % PARKS_EVERY == 0
        park = {rng.choice(running)} if parks else set()
        run = [r.request_id for r in snapshot.requests if r.request_id not in park]
        rng.shuffle(run)
        return RunDecision(
            run=tuple([request_id for request_id in run if rng.random() < 0.9] or run),
            park=frozenset(park),
            chunk_tokens=rng.choice([None, 7, rng.randint(1, 512)]),
            offloads=rng.random() < 0.5,
        )

    return decide
