"""Real executors that die, hang, leave and are cut off, one after the other, under mixed requests.

Every answer is what an undisturbed run gave. The seed of the faults' order is printed;
`EVENFLOW_CHAOS_SEED` sets it, `EVENFLOW_CHAOS_ROUNDS` how many loads there are.
"""

import asyncio
import os
import random
from pathlib import Path

import pytest

from bench.failover.asked import Got, ask_all, load
from bench.failover.deaths import CASES, mend
from bench.failover.site import Site

pytestmark = pytest.mark.timeout(3_600)

NUM_ROUNDS = int(os.environ.get("EVENFLOW_CHAOS_ROUNDS", "5"))
SEED = int(os.environ.get("EVENFLOW_CHAOS_SEED", "0"))
NUM_TOKENS = 120  # of an answer
MIN_MOVES = 10  # over all rounds: a load may have been answered before its fault


def test_answers_are_what_they_would_have_been(tmp_path: Path) -> None:
    rng = random.Random(SEED)
    faults = [name for _ in range(NUM_ROUNDS) for name in rng.sample(list(CASES), len(CASES))]
    site = Site(tmp_path, DRAIN_TIMEOUT_S=600)
    with site.running():
        requests = load(site.edge.model, num_tokens=NUM_TOKENS)
        asyncio.run(ask_all(site.edge, requests))  # forms are compiled
        expected = asyncio.run(ask_all(site.edge, requests))
        assert_answered(expected)
        for name in faults[:NUM_ROUNDS]:
            number = rng.randrange(len(site.executors))
            print(f"seed {SEED}: {name}, executor {number}")

            async def disturbed(name: str = name, number: int = number) -> dict[str, Got]:
                answering = asyncio.ensure_future(ask_all(site.edge, requests))
                await asyncio.sleep(rng.uniform(0.5, 4.0))
                await asyncio.to_thread(CASES[name], site, number)
                return await answering

            answers = asyncio.run(disturbed())
            assert_answered(answers)
            assert {one: got.said for one, got in answers.items()} == {
                one: got.said for one, got in expected.items()
            }
            mend(site, name, number)
        assert len(site.told("request_moved")) >= MIN_MOVES
        assert site.told("request_not_moved") == []


def assert_answered(answers: dict[str, Got]) -> None:
    assert [(name, got.error) for name, got in answers.items() if got.error] == []
