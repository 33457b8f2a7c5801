"""A network that loses every packet between a gateway and one of its executors, and heals."""

import asyncio
from pathlib import Path

import pytest

from bench.failover.asked import ask_all, load
from bench.failover.deaths import FAULT_AFTER_S, mend, silence
from bench.failover.site import Site, settings_of_load
from tests.nodes.network import FOLLOWER_HOST, WITHIN, Link, network, why_not

WHY_NOT = why_not()
pytestmark = [
    pytest.mark.nightly,
    pytest.mark.timeout(3_600),
    pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT),
]
APART = 0  # of the executors


def test_answers_leave_an_executor_that_no_packet_reaches_and_it_serves_again(
    tmp_path: Path,
) -> None:
    site = Site(tmp_path, **settings_of_load(tmp_path))
    executor = site.executors[APART]
    executor.within, executor.settings["HOST"] = WITHIN, FOLLOWER_HOST
    executor.address = f"{FOLLOWER_HOST}:{executor.settings['GRPC_PORT']}"
    site.links[APART] = Link(executor.address)  # type: ignore[call-overload]
    with network(), site.running():
        requests = load(site.edge.model)
        asyncio.run(ask_all(site.edge, requests))  # forms are compiled
        expected = asyncio.run(ask_all(site.edge, requests))

        async def partitioned() -> None:
            answering = asyncio.ensure_future(ask_all(site.edge, requests))
            await asyncio.sleep(FAULT_AFTER_S)
            await asyncio.to_thread(silence, site, APART)
            answers = await answering
            assert {name: got.error for name, got in answers.items() if got.error} == {}
            assert {name: got.said for name, got in answers.items()} == {
                name: got.said for name, got in expected.items()
            }

        asyncio.run(partitioned())
        moved = site.told("request_moved")
        mend(site, "link silent", APART)  # raises where it is not connected again
        after = asyncio.run(ask_all(site.edge, requests))

    assert {line["from_address"] for line in moved} == {executor.address}
    assert {name: got.said for name, got in after.items()} == {
        name: got.said for name, got in expected.items()
    }
