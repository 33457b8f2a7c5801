"""Real executors and all that is around them, failing at random under mixed requests.

Two executors, two gateways, planner, tracker and Redis. Every answer is what an undisturbed run
gave. The seed is printed; `EVENFLOW_CHAOS_SEED` sets it, `EVENFLOW_CHAOS_ROUNDS` how often the
faults are drawn.
"""

import asyncio
import os
import random
from pathlib import Path

import pytest

from bench.failover.campaign import FAULTS, Fault, Size, Stalls, campaign_in, run

pytestmark = pytest.mark.timeout(3_600)

NUM_ROUNDS = int(os.environ.get("EVENFLOW_CHAOS_ROUNDS", "1"))
SEED = int(os.environ.get("EVENFLOW_CHAOS_SEED", "0"))
NUM_REQUESTS = 100  # of a round, at least
# Longer than a busy machine lets a process stand: two executors that are lost to a request at once
# make it a suspect.
STALLS = Stalls(link_s=15.0, engine_s=60.0)


def drawn(rng: random.Random) -> list[Fault]:
    """Return two faults that are felt for sure, and one of each kind of process and of links."""
    kinds = (
        ("executor", "engine", "worker"),
        ("gateway",),
        ("link",),
        ("planner", "tracker", "redis"),
    )
    faults = [("engine", "killed"), ("gateway", "killed")]
    faults += [rng.choice([fault for fault in FAULTS if fault[0] in kind]) for kind in kinds]
    return rng.sample(faults, len(faults))


def test_answers_are_what_they_would_have_been(tmp_path: Path) -> None:
    rng = random.Random(SEED)
    faults = [fault for _ in range(NUM_ROUNDS) for fault in drawn(rng)]
    size = Size(requests=NUM_ROUNDS * NUM_REQUESTS, faults=len(faults), is_each_struck_once=True)
    print(f"seed {SEED}: {faults}")
    with campaign_in(tmp_path, SEED, STALLS) as campaign:
        asyncio.run(run(campaign, size, iter(faults), rng))
        seen = campaign.content()
    print(seen)
    assert seen["wrong"] == []
    assert seen["errors"] == {}
    assert seen["identical"] == seen["answers"] >= size.requests
    assert sum(seen["faults"].values()) == size.faults
    assert seen["moves"]
    assert seen["sent_again"]
    assert seen["came_back"]
