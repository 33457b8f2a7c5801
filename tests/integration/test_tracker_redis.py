"""The Redis store where Redis itself matters: absence, loss, expiry, cluster mode."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator

import pytest
import redis
import redis.asyncio

from lab.stack.ports import free_port
from lab.stack.redis_server import RedisServer
from services.generation.lifecycle import RequestStatus
from services.kit.clock import wall_s
from services.reporting.load import ExecutorLoad
from services.tracker.errors import StoreUnavailableError
from services.tracker.redis.codec import GRACE_S
from services.tracker.redis.keys import keys_of
from services.tracker.redis.store import RedisTrackerStore
from services.tracker.types import (
    DeliveredProgress,
    ExecutorId,
    ExecutorOffer,
    ExecutorWriter,
    GatewayId,
    GatewayWriter,
    GeneratedProgress,
    Lifetimes,
    Registration,
    RequestId,
    RequestKey,
)

LIFETIMES = Lifetimes(lease_ttl_s=60.0, request_ttl_s=120.0, retention_s=600.0)
EPOCH = 1_800_000_000_123_456
EX = ExecutorId("ex0")
EXECUTOR = ExecutorWriter(executor_id=EX, epoch=EPOCH)
GATEWAY = GatewayWriter(gateway_id=GatewayId("gw0"), epoch=EPOCH)
OFFER = ExecutorOffer(executor_id=EX, epoch=EPOCH, address="h:1", model="m", load=ExecutorLoad())
WAIT_S = 60.0


@pytest.fixture
def server() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


@pytest.fixture
async def store(server: RedisServer) -> AsyncIterator[RedisTrackerStore]:
    store = RedisTrackerStore(server.url, LIFETIMES, clock=wall_s, timeout_s=WAIT_S)
    yield store
    await store.aclose()


def key(request_id: str = "r") -> RequestKey:
    return RequestKey(executor_id=EX, request_id=RequestId(request_id))


async def register(store: RedisTrackerStore, *request_ids: str) -> None:
    await store.register_executor(OFFER)
    entries = [
        Registration(key=key(name), generation=1, num_prompt_tokens=7) for name in request_ids
    ]
    await store.register(GATEWAY, entries)


async def generate(
    store: RedisTrackerStore,
    count: int,
    request_id: str = "r",
    *,
    state: RequestStatus = RequestStatus.DECODING,
) -> None:
    progress = GeneratedProgress(
        request_id=RequestId(request_id), generation=1, num_generated_tokens=count, state=state
    )
    result = await store.report_generated(EXECUTOR, [progress])
    assert not result.unknown


async def test_calls_are_refused_while_redis_is_away_and_served_when_it_is_back(
    server: RedisServer, store: RedisTrackerStore
) -> None:
    await register(store, "r")
    server.kill()
    with pytest.raises(StoreUnavailableError):
        await store.snapshot(EX)
    with pytest.raises(StoreUnavailableError):
        await store.register_executor(OFFER)
    with pytest.raises(StoreUnavailableError):
        await store.list_executors()

    server.start()

    assert (await store.snapshot(EX)).requests == ()
    await register(store, "r")  # the scripts were lost too
    await generate(store, 3)
    assert (await store.snapshot(EX)).requests[0].num_generated == 3


async def test_a_redis_that_does_not_answer_is_given_up(
    server: RedisServer, store: RedisTrackerStore
) -> None:
    impatient = RedisTrackerStore(server.url, LIFETIMES, clock=wall_s, timeout_s=0.2)
    await register(store, "r")
    server.freeze()
    with pytest.raises(StoreUnavailableError):
        await impatient.snapshot(EX)  # it is frozen until after that
    await impatient.aclose()

    server.thaw()

    assert len((await store.snapshot(EX)).requests) == 1


async def test_redis_drops_every_key_of_a_forgotten_executor_by_itself(
    server: RedisServer, store: RedisTrackerStore
) -> None:
    await register(store, "live", "ended")
    await generate(store, 3, "ended", state=RequestStatus.FINISHED)
    keys = keys_of(EX)

    with redis.Redis.from_url(server.url, decode_responses=True) as admin:
        life_s = {name: float(admin.pttl(name)) / 1_000 for name in admin.keys("evenflow:{*")}

    assert life_s.keys() == set(keys)
    longest_s = LIFETIMES.retention_s + GRACE_S
    assert list(life_s.values()) == pytest.approx([longest_s] * len(keys), abs=60)


async def test_expired_requests_are_cleared_away_by_later_registrations(
    server: RedisServer,
) -> None:
    now_s = [1_800_000_000.0]
    store = RedisTrackerStore(server.url, LIFETIMES, clock=lambda: now_s[0], timeout_s=WAIT_S)
    await register(store, *(f"old{i}" for i in range(5)))
    now_s[0] += LIFETIMES.request_ttl_s

    await register(store, "new")

    with redis.Redis.from_url(server.url, decode_responses=True) as admin:
        assert admin.hkeys(keys_of(EX).records) == ["new"]
        assert admin.zrange(keys_of(EX).by_expiry, 0, -1) == ["new"]
    await store.aclose()


async def test_executors_without_a_lease_key_leave_the_list(
    server: RedisServer, store: RedisTrackerStore
) -> None:
    await store.register_executor(OFFER)
    with redis.Redis.from_url(server.url, decode_responses=True) as admin:
        admin.delete(keys_of(EX).lease)

        assert await store.list_executors() == []

        assert admin.smembers("evenflow:executors") == set()


def cluster_port() -> int:
    """Return a port which is, like the one of its bus 10,000 above it, below those of `PORTS`."""
    return 7_100 + free_port() % 900


def take_all_slots(url: str) -> None:
    """Make a node a cluster of its own; return when it serves."""
    with redis.Redis.from_url(url) as admin:
        admin.execute_command("CLUSTER", "ADDSLOTS", *range(16_384))
        deadline_s = time.monotonic() + WAIT_S
        while b"cluster_state:ok" not in admin.execute_command("CLUSTER", "INFO"):
            assert time.monotonic() < deadline_s
            time.sleep(0.05)


async def test_every_step_runs_in_cluster_mode() -> None:
    """A cluster node refuses a script whose keys are in more than one slot."""
    with RedisServer(cluster_port(), options={"cluster-enabled": "yes"}) as server:
        await asyncio.to_thread(take_all_slots, server.url)
        store = RedisTrackerStore(server.url, LIFETIMES, clock=wall_s, timeout_s=WAIT_S)
        await every_step(store)
        await store.aclose()


async def every_step(store: RedisTrackerStore) -> None:
    """Run each script."""
    await register(store, "a", "b")
    await store.renew_lease(EXECUTOR, ExecutorLoad())
    await generate(store, 3, "a")
    await store.report_delivered(GATEWAY, [DeliveredProgress(key=key("a"), generation=1)])
    assert len((await store.snapshot(EX)).requests) == 2
    assert len(await store.list_executors()) == 1
    await store.release_lease(EXECUTOR)


async def test_scripts_touch_no_key_that_they_do_not_declare(
    server: RedisServer, store: RedisTrackerStore
) -> None:
    """A proxy in front of a cluster sends a script to where its declared keys are."""
    with redis.Redis.from_url(server.url, decode_responses=True) as admin, admin.monitor() as seen:
        await every_step(store)
        with redis.Redis.from_url(server.url) as other:
            other.echo("the end")
        touched: set[str] = set()
        while "the end" not in (line := seen.next_command())["command"]:
            if line["client_type"] == "lua":
                touched.add(line["command"].split()[1])

    assert touched == set(keys_of(EX))
