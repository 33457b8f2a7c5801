"""The tracker's Redis behind a sentinel, which makes another server the master."""

import asyncio
import time
from collections.abc import Callable, Iterator

import pytest
import redis

from lab.stack.redis_server import RedisServer
from services.kit.clock import wall_s
from services.kit.redis_url import open_redis_blocking
from services.reporting.load import ExecutorLoad
from services.tracker.errors import StoreUnavailableError
from services.tracker.redis.keys import keys_of
from services.tracker.redis.store import RedisTrackerStore
from services.tracker.types import ExecutorId, ExecutorOffer, Lifetimes

LIFETIMES = Lifetimes(lease_ttl_s=60.0, request_ttl_s=120.0, retention_s=600.0)
WAIT_S = 120.0
SERVICE = "evenflow"
LONG_MS = 600_000  # nothing is down for so long: the sentinel acts when it is told to


def offer(name: str) -> ExecutorOffer:
    return ExecutorOffer(
        executor_id=ExecutorId(name), epoch=1, address="h:1", model="m", load=ExecutorLoad()
    )


def lease(name: str) -> str:
    return keys_of(ExecutorId(name)).lease


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not is_so():
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


def replicates(replica: RedisServer) -> bool:
    with redis.Redis.from_url(replica.url) as admin:
        return bool(admin.info("replication").get("master_link_status") == "up")


@pytest.fixture
def servers() -> Iterator[tuple[RedisServer, RedisServer, RedisServer]]:
    """A master, its replica, and the sentinel that watches both."""
    sentinel = RedisServer(is_sentinel=True)
    with RedisServer() as master, RedisServer() as replica, sentinel:
        with redis.Redis.from_url(replica.url) as admin:
            admin.replicaof("127.0.0.1", master.port)
        wait_until(lambda: replicates(replica))
        with redis.Redis(port=sentinel.port) as admin:
            admin.sentinel_monitor(SERVICE, "127.0.0.1", master.port, 1)
            admin.sentinel_set(SERVICE, "down-after-milliseconds", LONG_MS)
        yield master, replica, sentinel


def fail_over(sentinel: RedisServer, to: RedisServer) -> None:
    """Let the sentinel make another server the master; return when it says so."""
    with redis.Redis(port=sentinel.port, decode_responses=True) as admin:

        def is_begun() -> bool:
            try:
                return bool(admin.execute_command("SENTINEL", "FAILOVER", SERVICE))
            except redis.ResponseError:  # it does not know the replica yet
                return False

        wait_until(is_begun)
        wait_until(
            lambda: int(admin.sentinel_get_master_addr_by_name(SERVICE)[1]) == to.port  # type: ignore[index]
        )


async def register_when_there_is_a_master(store: RedisTrackerStore, name: str) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while time.monotonic() < deadline_s:
        try:
            return await store.register_executor(offer(name))
        except StoreUnavailableError:
            await asyncio.sleep(0.05)
    pytest.fail("the store found no master")


async def test_a_tracker_goes_on_with_the_master_that_a_sentinel_names(
    servers: tuple[RedisServer, RedisServer, RedisServer],
) -> None:
    master, replica, sentinel = servers
    url = f"redis+sentinel://127.0.0.1:1,127.0.0.1:{sentinel.port}/{SERVICE}/0"  # one is not there
    store = RedisTrackerStore(url, LIFETIMES, clock=wall_s, timeout_s=WAIT_S)
    await store.register_executor(offer("before"))

    await asyncio.to_thread(fail_over, sentinel, replica)
    master.kill()
    await register_when_there_is_a_master(store, "after")

    with open_redis_blocking(replica.url, timeout_s=WAIT_S) as client:
        assert client.exists(lease("after"))
    with open_redis_blocking(url, timeout_s=WAIT_S) as client:
        assert client.exists(lease("after"))
    await store.aclose()


async def test_without_a_master_the_store_is_away(
    servers: tuple[RedisServer, RedisServer, RedisServer],
) -> None:
    _, _, sentinel = servers
    url = f"redis+sentinel://127.0.0.1:{sentinel.port}/other"
    store = RedisTrackerStore(url, LIFETIMES, clock=wall_s, timeout_s=WAIT_S)

    with pytest.raises(StoreUnavailableError, match="MasterNotFoundError"):
        await store.register_executor(offer("x"))
    await store.aclose()
