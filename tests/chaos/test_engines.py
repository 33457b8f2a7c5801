"""Real executors that die, hang, leave and are cut off, one after the other, under mixed requests;
and at the same time the planner, the tracker or Redis.

Every answer is what an undisturbed run gave. The seed of the faults' order is printed;
`EVENFLOW_CHAOS_SEED` sets it, `EVENFLOW_CHAOS_ROUNDS` how many loads there are.
"""

import asyncio
import itertools
import os
import random
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from bench.failover.asked import Got, ask_all, load
from bench.failover.deaths import CASES, mend
from bench.failover.site import Site, settings_of_load
from lab.stack.processes import Stack

pytestmark = pytest.mark.timeout(3_600)

NUM_ROUNDS = int(os.environ.get("EVENFLOW_CHAOS_ROUNDS", "5"))
SEED = int(os.environ.get("EVENFLOW_CHAOS_SEED", "0"))
NUM_TOKENS = 120  # of an answer
NUM_FEW_TOKENS = 24  # of one that is not compared
MIN_MOVES = 10  # over all rounds: a load may have been answered before its fault
BESIDE = tuple(itertools.product(("planner", "tracker", "redis"), ("kill", "end", "stop")))
AWAY_S = 2.0
# Longer than a busy machine lets a process stand (25 s were too few for an engine): two executors
# that are lost to a request at once make it a suspect.
STALLS_S = (15.0, 60.0)


@contextmanager
def nobody_needed(folder: Path) -> Iterator[Stack]:
    """Run a planner, a tracker and Redis."""
    stack = Stack(folder)
    try:
        stack.start("redis", "planner", "tracker")
        yield stack
    finally:
        stack.stop()


def strike(stack: Stack, name: str, how: str) -> None:
    """Have one of them die, end, or hang for a while."""
    if how == "stop":
        with stack.frozen(name):
            time.sleep(AWAY_S)
    else:
        stack.kill(name, signal.SIGKILL if how == "kill" else signal.SIGTERM)
        time.sleep(AWAY_S)
        stack.start(name)


def test_answers_are_what_they_would_have_been(tmp_path: Path) -> None:
    rng = random.Random(SEED)
    faults = [name for _ in range(NUM_ROUNDS) for name in rng.sample(list(CASES), len(CASES))]
    beside = [one for _ in range(NUM_ROUNDS) for one in rng.sample(BESIDE, len(BESIDE))]
    with nobody_needed(tmp_path) as stack:
        site = Site(
            tmp_path,
            tracker=stack.address("tracker"),
            stalls_s=STALLS_S,
            PLANNER_ADDRESS=stack.address("planner"),
            LAYERWISE_KV="true",  # so that the planner is asked
            KV_HOST_MEMORY_BYTES=64 << 20,
            DRAIN_TIMEOUT_S=600,
            **settings_of_load(tmp_path),
        )
        with site.running():
            requests = load(site.edge.model, num_tokens=NUM_TOKENS)
            few = load(site.edge.model, num_tokens=NUM_FEW_TOKENS)
            assert_answered(asyncio.run(ask_all(site.edge, few)))  # forms are compiled
            expected = asyncio.run(ask_all(site.edge, requests))
            assert_answered(expected)
            for name, other in zip(faults[:NUM_ROUNDS], beside, strict=False):
                number = rng.randrange(len(site.executors))
                print(f"seed {SEED}: {name}, executor {number}; {' '.join(other)}")

                async def disturbed(
                    name: str = name, number: int = number, other: tuple[str, str] = other
                ) -> dict[str, Got]:
                    answering = asyncio.ensure_future(ask_all(site.edge, requests))
                    await asyncio.sleep(rng.uniform(0.5, 4.0))
                    await asyncio.gather(
                        asyncio.to_thread(CASES[name], site, number),
                        asyncio.to_thread(strike, stack, *other),
                    )
                    return await answering

                answers = asyncio.run(disturbed())
                assert_answered(answers)
                assert {one: got.said for one, got in answers.items()} == {
                    one: got.said for one, got in expected.items()
                }
                mend(site, name, number, settle_s=0.0)
            assert len(site.told("request_moved")) >= MIN_MOVES
            assert site.told("request_not_moved") == []


def assert_answered(answers: dict[str, Got]) -> None:
    assert [(name, got.error) for name, got in answers.items() if got.error] == []
