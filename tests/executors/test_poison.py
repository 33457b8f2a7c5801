"""A request that real engines die of fails; those beside it are answered as if it had not been."""

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event, Thread

import pytest

from bench.failover.asked import CHAT, Asked, Got, ask, ask_all, load
from bench.failover.site import Site, settings_of_load
from lab.stack.processes import wait_until
from tests.executors.deadly import AT_40TH_TOKEN, AT_PROMPT

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(3_600)]

NUM_TOKENS = 500
PROVED_WELL = 40  # events of each: an executor that is lost then is lost to another


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    processors = json.dumps(["--logits-processors", "tests.executors.deadly:Deadly"])
    folder = tmp_path_factory.mktemp("site")
    site = Site(folder, num_executors=3, ENGINE_ARGS=processors, **settings_of_load(folder))
    with site.running():
        yield site


@contextmanager
def started_again(site: Site) -> Iterator[list[int]]:
    """Start executors again that end, as their supervisor would; give the numbers of those."""
    lost: list[int] = []
    over = Event()

    def watch() -> None:
        while not over.wait(0.2):
            for number, executor in enumerate(site.executors):
                if executor.process.poll() is not None:
                    lost.append(number)
                    site.restart(number)

    thread = Thread(target=watch)
    thread.start()
    try:
        yield lost
    finally:
        over.set()
        thread.join()


@pytest.mark.parametrize(("seed", "num_lost"), [(AT_PROMPT, 2), (AT_40TH_TOKEN, 3)])
def test_a_request_that_engines_die_of_fails_and_no_other(
    site: Site, seed: int, num_lost: int
) -> None:
    requests = load(site.edge.model, num_tokens=NUM_TOKENS)[:21]
    poison = Asked(
        name=f"poison-{seed}",
        path=CHAT,
        body={**requests[0].body, "temperature": 1.0, "seed": seed},
    )
    asyncio.run(ask_all(site.edge, requests))  # forms are compiled
    expected = asyncio.run(ask_all(site.edge, requests))
    answers = {asked.name: Got() for asked in requests}

    async def beside_poison() -> Got:
        answering = [
            asyncio.ensure_future(ask(site.edge, asked, answers[asked.name])) for asked in requests
        ]
        while any(  # noqa: ASYNC110
            len(got.arrived_s) < PROVED_WELL and not task.done()
            for got, task in zip(answers.values(), answering, strict=True)
        ):
            await asyncio.sleep(0.1)
        failed = await ask(site.edge, poison)
        await asyncio.gather(*answering)
        return failed

    with started_again(site) as lost:
        failed = asyncio.run(beside_poison())
        wait_until(lambda: len(lost) >= num_lost, "the last one's end", timeout_s=1_200)

    assert "generation_failed" in failed.error
    assert len(lost) == num_lost
    assert {name: got.error for name, got in answers.items() if got.error} == {}
    assert {name: got.said for name, got in answers.items()} == {
        name: got.said for name, got in expected.items()
    }
