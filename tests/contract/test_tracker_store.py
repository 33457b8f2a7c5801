"""The tracker's store: one contract, kept by the in-memory reference and by real Redis."""

import asyncio
import dataclasses
import random
from collections.abc import AsyncIterator

import pytest
import redis.asyncio

from lab.memory_tracker_store import MemoryTrackerStore
from lab.stack.redis_server import RedisServer
from services.generation.lifecycle import EDGES, RequestStatus
from services.pacing.types import ServiceLevel
from services.reporting.load import ExecutorLoad
from services.tracker.errors import LeaseExpiredError, StaleEpochError
from services.tracker.redis.store import RedisTrackerStore
from services.tracker.store import TrackerStore
from services.tracker.types import (
    DeliveredProgress,
    ExecutorId,
    ExecutorOffer,
    ExecutorWriter,
    GatewayId,
    GatewayWriter,
    GeneratedProgress,
    Lease,
    Lifetimes,
    Registration,
    ReportResult,
    RequestId,
    RequestKey,
    TrackedRequest,
)

LIFETIMES = Lifetimes(lease_ttl_s=5.0, request_ttl_s=60.0, retention_s=600.0)
START_S = 1_800_000_000.123456
# Epochs as they are: microseconds since 1970, 16 digits. One apart, so that no rounding hides.
OLD, EPOCH, NEW = 1_800_000_000_123_455, 1_800_000_000_123_456, 1_800_000_000_123_457
EX = ExecutorId("ex0")
EXECUTOR = ExecutorWriter(executor_id=EX, epoch=EPOCH)
GATEWAY = GatewayWriter(gateway_id=GatewayId("gw0"), epoch=EPOCH)
OTHER_GATEWAY = GatewayWriter(gateway_id=GatewayId("gw1"), epoch=EPOCH)
S = RequestStatus
WAIT_S = 60.0


class FakeClock:
    def __init__(self) -> None:
        self.now_s = START_S

    def __call__(self) -> float:
        return self.now_s


@dataclasses.dataclass(frozen=True)
class World:
    store: TrackerStore
    clock: FakeClock


@pytest.fixture(params=["memory", "redis"])
async def world(request: pytest.FixtureRequest, redis_server: RedisServer) -> AsyncIterator[World]:
    clock = FakeClock()
    if request.param == "memory":
        yield World(store=MemoryTrackerStore(LIFETIMES, clock=clock), clock=clock)
        return
    admin = redis.asyncio.Redis.from_url(redis_server.url)
    await admin.flushall()
    store = RedisTrackerStore(redis_server.url, LIFETIMES, clock=clock, timeout_s=WAIT_S)
    yield World(store=store, clock=clock)
    await store.aclose()
    await admin.aclose()


def key(request_id: str = "r", executor_id: ExecutorId = EX) -> RequestKey:
    return RequestKey(executor_id=executor_id, request_id=RequestId(request_id))


def make_offer(**overrides: object) -> ExecutorOffer:
    offer = ExecutorOffer(
        executor_id=EX, epoch=EPOCH, address="host:50051", model="m", load=ExecutorLoad()
    )
    return dataclasses.replace(offer, **overrides)  # type: ignore[arg-type]


def make_registration(request_id: str = "r", **overrides: object) -> Registration:
    registration = Registration(key=key(request_id), generation=1, num_prompt_tokens=7)
    return dataclasses.replace(registration, **overrides)  # type: ignore[arg-type]


def generated(request_id: str = "r", **overrides: object) -> GeneratedProgress:
    progress = GeneratedProgress(request_id=RequestId(request_id), generation=1)
    return dataclasses.replace(progress, **overrides)  # type: ignore[arg-type]


def delivered(request_id: str = "r", **overrides: object) -> DeliveredProgress:
    progress = DeliveredProgress(key=key(request_id), generation=1)
    return dataclasses.replace(progress, **overrides)  # type: ignore[arg-type]


async def register(store: TrackerStore, *request_ids: str) -> None:
    """Give the executor a lease and register requests of it, "r" if none is named."""
    await store.register_executor(make_offer())
    entries = [make_registration(name) for name in request_ids or ("r",)]
    assert await store.register(GATEWAY, entries) == []


async def record_of(store: TrackerStore, request_id: str = "r") -> TrackedRequest | None:
    snapshot = await store.snapshot(EX)
    return next((r for r in snapshot.requests if r.key == key(request_id)), None)


async def bring_to(store: TrackerStore, state: RequestStatus) -> None:
    if state is not S.QUEUED:
        await store.report_generated(EXECUTOR, [generated(state=state)])


# Leases


async def test_a_lease_is_listed_with_what_the_executor_said(world: World) -> None:
    load = ExecutorLoad(num_running_reqs=3, num_newcomers=2, kv_unavailable_frac=0.1)

    await world.store.register_executor(make_offer(load=load))

    lease = Lease(offer=make_offer(load=load), expires_at_s=START_S + 5.0)
    assert await world.store.list_executors() == [lease]
    assert (await world.store.snapshot(EX)).lease == lease


async def test_executors_are_listed_by_id(world: World) -> None:
    for name in ("b", "c", "a"):
        await world.store.register_executor(make_offer(executor_id=name))

    leases = await world.store.list_executors()

    assert [lease.offer.executor_id for lease in leases] == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("age_s", "held"),
    [pytest.param(4.999, True, id="just-before"), pytest.param(5.0, False, id="at-its-end")],
)
async def test_a_lease_ends_when_its_time_is_over(world: World, age_s: float, held: bool) -> None:
    await register(world.store)
    world.clock.now_s += age_s

    assert bool(await world.store.list_executors()) == held
    assert ((await world.store.snapshot(EX)).lease is not None) == held
    if held:
        await world.store.renew_lease(EXECUTOR, ExecutorLoad())
        await world.store.report_generated(EXECUTOR, [])
        return
    with pytest.raises(LeaseExpiredError):
        await world.store.renew_lease(EXECUTOR, ExecutorLoad())
    with pytest.raises(LeaseExpiredError):
        await world.store.report_generated(EXECUTOR, [])


async def test_a_renewal_extends_the_lease_and_stores_the_load(world: World) -> None:
    await world.store.register_executor(make_offer())
    world.clock.now_s += 4.0
    load = ExecutorLoad(num_running_reqs=9)

    await world.store.renew_lease(EXECUTOR, load)

    [lease] = await world.store.list_executors()
    assert lease == Lease(offer=make_offer(load=load), expires_at_s=world.clock.now_s + 5.0)


async def test_a_renewal_brings_an_executor_back_to_the_list(world: World) -> None:
    await world.store.register_executor(make_offer())
    if isinstance(world.store, RedisTrackerStore):  # the list is only a hint there
        await world.store._client.delete("evenflow:executors")

    await world.store.renew_lease(EXECUTOR, ExecutorLoad())

    assert len(await world.store.list_executors()) == 1


async def test_without_a_lease_an_executor_may_write_nothing(world: World) -> None:
    await world.store.register(GATEWAY, [make_registration()])

    with pytest.raises(LeaseExpiredError):
        await world.store.renew_lease(EXECUTOR, ExecutorLoad())
    with pytest.raises(LeaseExpiredError):
        await world.store.report_generated(EXECUTOR, [generated(num_generated_tokens=3)])
    record = await record_of(world.store)
    assert record is not None
    assert (record.num_generated, record.state) == (0, S.QUEUED)


async def test_an_older_process_is_fenced_off(world: World) -> None:
    await register(world.store)
    old = dataclasses.replace(EXECUTOR, epoch=OLD)

    with pytest.raises(StaleEpochError):
        await world.store.register_executor(make_offer(epoch=OLD))
    with pytest.raises(StaleEpochError):
        await world.store.renew_lease(old, ExecutorLoad())
    with pytest.raises(StaleEpochError):
        await world.store.release_lease(old)
    with pytest.raises(StaleEpochError):
        await world.store.report_generated(old, [generated(num_generated_tokens=3)])
    record = await record_of(world.store)
    assert record is not None
    assert (record.num_generated, record.state) == (0, S.QUEUED)


async def test_the_fence_outlives_the_lease(world: World) -> None:
    await world.store.register_executor(make_offer())
    world.clock.now_s += 6.0

    with pytest.raises(StaleEpochError):
        await world.store.register_executor(make_offer(epoch=OLD))
    with pytest.raises(StaleEpochError):
        await world.store.renew_lease(dataclasses.replace(EXECUTOR, epoch=OLD), ExecutorLoad())


async def test_a_newer_process_must_register_before_it_writes(world: World) -> None:
    await register(world.store)
    new = dataclasses.replace(EXECUTOR, epoch=NEW)

    with pytest.raises(LeaseExpiredError):
        await world.store.renew_lease(new, ExecutorLoad())
    with pytest.raises(LeaseExpiredError):
        await world.store.report_generated(new, [])


async def test_a_released_lease_is_gone_and_may_be_taken_again(world: World) -> None:
    await world.store.register_executor(make_offer())

    await world.store.release_lease(EXECUTOR)
    await world.store.release_lease(EXECUTOR)

    assert await world.store.list_executors() == []
    await world.store.register_executor(make_offer())
    assert len(await world.store.list_executors()) == 1


async def test_releasing_what_was_never_held_does_nothing(world: World) -> None:
    await world.store.release_lease(EXECUTOR)
    await world.store.register_executor(make_offer())

    await world.store.release_lease(dataclasses.replace(EXECUTOR, epoch=NEW))

    assert len(await world.store.list_executors()) == 1


async def test_what_an_older_process_had_is_not_its_successors(world: World) -> None:
    await register(world.store, "old")

    await world.store.register_executor(make_offer(epoch=NEW))
    assert await world.store.register(GATEWAY, [make_registration("new")]) == []

    assert await record_of(world.store, "old") is None
    assert await record_of(world.store, "new") is not None


async def test_registering_the_same_process_again_changes_no_request(world: World) -> None:
    await register(world.store)
    before = await record_of(world.store)

    await world.store.register_executor(make_offer())

    assert await record_of(world.store) == before is not None


async def test_an_ended_lease_hides_no_request(world: World) -> None:
    await register(world.store)
    world.clock.now_s += 6.0
    without = await record_of(world.store)

    await world.store.register_executor(make_offer())

    assert await record_of(world.store) == without is not None


async def test_a_request_registered_before_any_lease_is_adopted(world: World) -> None:
    await world.store.register(GATEWAY, [make_registration()])

    await world.store.register_executor(make_offer())
    await world.store.report_generated(EXECUTOR, [generated(num_generated_tokens=4)])

    record = await record_of(world.store)
    assert record is not None
    assert (record.state, record.executor_epoch) == (S.QUEUED, EPOCH)
    await world.store.register_executor(make_offer(epoch=NEW))  # now it belongs to the older one
    assert await record_of(world.store) is None


@pytest.mark.parametrize(("age_s", "owner"), [(4.999, EPOCH), (5.0, 0)])
async def test_a_request_belongs_to_the_process_that_holds_the_lease_when_it_is_routed(
    world: World, age_s: float, owner: int
) -> None:
    await world.store.register_executor(make_offer())
    world.clock.now_s += age_s

    await world.store.register(GATEWAY, [make_registration()])

    record = await record_of(world.store)
    assert record is not None
    assert record.executor_epoch == owner


# Registration


async def test_a_registered_request_is_recorded_as_it_was_routed(world: World) -> None:
    level = ServiceLevel(slo_ttft_s=0.5, slo_tbt_s=0.1, consumption_rate_tps=12.5, pace_tail=True)
    await world.store.register_executor(make_offer())

    stale = await world.store.register(
        GATEWAY, [make_registration(generation=3, num_prompt_tokens=99, service_level=level)]
    )

    assert stale == []
    assert await record_of(world.store) == TrackedRequest(
        key=key(),
        generation=3,
        gateway_id=GATEWAY.gateway_id,
        gateway_epoch=EPOCH,
        executor_epoch=EPOCH,
        state=S.QUEUED,
        num_prompt_tokens=99,
        service_level=level,
        registered_at_s=START_S,
        expires_at_s=START_S + 60.0,
    )


async def test_registering_the_same_generation_keeps_counts_and_state(world: World) -> None:
    await register(world.store)
    await world.store.report_generated(
        EXECUTOR, [generated(num_generated_tokens=5, state=S.DECODING)]
    )
    await world.store.report_delivered(GATEWAY, [delivered(num_delivered_tokens=2)])
    before = await record_of(world.store)
    assert before is not None
    world.clock.now_s += 10.0

    assert await world.store.register(GATEWAY, [make_registration()]) == []

    assert await record_of(world.store) == dataclasses.replace(
        before, expires_at_s=world.clock.now_s + 60.0
    )


async def test_a_greater_generation_starts_anew(world: World) -> None:
    await register(world.store)
    await world.store.report_generated(
        EXECUTOR, [generated(num_generated_tokens=5, state=S.FINISHED)]
    )
    await world.store.report_delivered(GATEWAY, [delivered(num_delivered_tokens=2)])
    world.clock.now_s += 1.0

    assert await world.store.register(OTHER_GATEWAY, [make_registration(generation=2)]) == []

    record = await record_of(world.store)
    assert record is not None
    assert (record.generation, record.gateway_id, record.state) == (2, "gw1", S.QUEUED)
    assert (record.num_generated, record.generated_at_s) == (0, None)
    assert (record.num_delivered, record.delivered_at_s) == (0, None)
    assert record.registered_at_s == START_S + 1.0


async def test_a_smaller_generation_is_named_and_ignored(world: World) -> None:
    await world.store.register(GATEWAY, [make_registration(generation=2)])

    stale = await world.store.register(
        GATEWAY, [make_registration(generation=1), make_registration("new")]
    )

    assert stale == [key()]
    record = await record_of(world.store)
    assert record is not None
    assert record.generation == 2
    assert await record_of(world.store, "new") is not None


@pytest.mark.parametrize(
    ("gateway", "refused"),
    [
        pytest.param(OTHER_GATEWAY, True, id="another-gateway"),
        pytest.param(dataclasses.replace(GATEWAY, epoch=OLD), True, id="older-process"),
        pytest.param(dataclasses.replace(GATEWAY, epoch=NEW), False, id="newer-process"),
    ],
)
async def test_only_its_gateway_may_register_a_generation_again(
    world: World, gateway: GatewayWriter, refused: bool
) -> None:
    await register(world.store)

    stale = await world.store.register(gateway, [make_registration()])

    assert stale == ([key()] if refused else [])


async def test_requests_of_several_executors_are_registered_at_once(world: World) -> None:
    other = RequestKey(executor_id=ExecutorId("ex1"), request_id=RequestId("r"))
    await world.store.register(GATEWAY, [make_registration(key=other, generation=2)])

    stale = await world.store.register(
        GATEWAY, [make_registration(), make_registration(key=other), make_registration("x")]
    )

    assert stale == [other]
    assert [r.key.request_id for r in (await world.store.snapshot(EX)).requests] == ["r", "x"]


# Reports


async def test_counts_merge_by_maximum_and_the_deposit_is_their_difference(world: World) -> None:
    await register(world.store)
    for count in (3, 8, 5):
        await world.store.report_generated(EXECUTOR, [generated(num_generated_tokens=count)])
    for count in (6, 2):
        await world.store.report_delivered(GATEWAY, [delivered(num_delivered_tokens=count)])

    record = await record_of(world.store)

    assert record is not None
    assert (record.num_generated, record.num_delivered, record.num_deposited) == (8, 6, 2)


async def test_the_deposit_is_never_negative(world: World) -> None:
    await register(world.store)
    await world.store.report_generated(EXECUTOR, [generated(num_generated_tokens=3)])

    await world.store.report_delivered(GATEWAY, [delivered(num_delivered_tokens=5)])

    record = await record_of(world.store)
    assert record is not None
    assert record.num_deposited == 0


async def test_an_age_counts_from_the_last_growth(world: World) -> None:
    await register(world.store)
    world.clock.now_s = START_S + 1.0
    await world.store.report_generated(EXECUTOR, [generated(num_generated_tokens=0)])
    await world.store.report_delivered(GATEWAY, [delivered(num_delivered_tokens=0)])
    record = await record_of(world.store)
    assert record is not None
    assert (record.generated_at_s, record.delivered_at_s) == (START_S + 1.0, START_S + 1.0)

    world.clock.now_s = START_S + 2.0
    await world.store.report_generated(EXECUTOR, [generated(num_generated_tokens=4)])
    await world.store.report_delivered(GATEWAY, [delivered(num_delivered_tokens=4)])
    world.clock.now_s = START_S + 3.0
    await world.store.report_generated(EXECUTOR, [generated(num_generated_tokens=4)])
    await world.store.report_delivered(GATEWAY, [delivered(num_delivered_tokens=4)])

    record = await record_of(world.store)
    assert record is not None
    assert (record.generated_at_s, record.delivered_at_s) == (START_S + 2.0, START_S + 2.0)


async def test_what_is_not_reported_stays_as_it_is(world: World) -> None:
    await register(world.store)
    await world.store.report_generated(
        EXECUTOR, [generated(num_generated_tokens=4, state=S.DECODING)]
    )
    before = await record_of(world.store)

    await world.store.report_generated(EXECUTOR, [generated()])
    await world.store.report_delivered(GATEWAY, [delivered()])

    assert await record_of(world.store) == before


async def test_unknown_requests_are_named_and_the_others_applied(world: World) -> None:
    await register(world.store, "a", "b")

    by_executor = await world.store.report_generated(
        EXECUTOR, [generated("x"), generated("a", num_generated_tokens=1), generated("y")]
    )
    by_gateway = await world.store.report_delivered(
        GATEWAY, [delivered("y"), delivered("b", num_delivered_tokens=1), delivered("x")]
    )

    assert by_executor == ReportResult(unknown=(key("x"), key("y")))
    assert by_gateway == ReportResult(unknown=(key("y"), key("x")))
    a, b = await record_of(world.store, "a"), await record_of(world.store, "b")
    assert a is not None
    assert b is not None
    assert (a.num_generated, b.num_delivered) == (1, 1)


@pytest.mark.parametrize("generation", [1, 3])
async def test_reports_count_for_their_own_generation_only(world: World, generation: int) -> None:
    await world.store.register_executor(make_offer())
    await world.store.register(GATEWAY, [make_registration(generation=2)])

    by_executor = await world.store.report_generated(
        EXECUTOR, [generated(generation=generation, num_generated_tokens=9, state=S.DECODING)]
    )
    by_gateway = await world.store.report_delivered(
        GATEWAY, [delivered(generation=generation, num_delivered_tokens=9)]
    )

    expected = ReportResult(stale=(key(),)) if generation < 2 else ReportResult(unknown=(key(),))
    assert (by_executor, by_gateway) == (expected, expected)
    record = await record_of(world.store)
    assert record is not None
    assert (record.num_generated, record.num_delivered, record.state) == (0, 0, S.QUEUED)


@pytest.mark.parametrize(
    ("gateway", "count"),
    [
        pytest.param(OTHER_GATEWAY, 0, id="another-gateway"),
        pytest.param(dataclasses.replace(GATEWAY, epoch=OLD), 0, id="older-process"),
        pytest.param(dataclasses.replace(GATEWAY, epoch=NEW), 9, id="newer-process"),
    ],
)
async def test_only_its_gateway_writes_delivered_counts(
    world: World, gateway: GatewayWriter, count: int
) -> None:
    await register(world.store)

    result = await world.store.report_delivered(gateway, [delivered(num_delivered_tokens=9)])

    assert result == (ReportResult() if count else ReportResult(stale=(key(),)))
    record = await record_of(world.store)
    assert record is not None
    assert record.num_delivered == count


async def test_a_newer_gateway_process_fences_the_older_one(world: World) -> None:
    await register(world.store)
    await world.store.report_delivered(dataclasses.replace(GATEWAY, epoch=NEW), [delivered()])

    result = await world.store.report_delivered(GATEWAY, [delivered(num_delivered_tokens=9)])

    assert result == ReportResult(stale=(key(),))


async def test_one_gateway_reports_on_several_executors(world: World) -> None:
    other = RequestKey(executor_id=ExecutorId("ex1"), request_id=RequestId("r"))
    await world.store.register(GATEWAY, [make_registration(), make_registration(key=other)])

    result = await world.store.report_delivered(
        GATEWAY,
        [
            delivered(key=other, num_delivered_tokens=2),
            delivered("x"),
            delivered(num_delivered_tokens=1),
            delivered(key=dataclasses.replace(other, request_id=RequestId("x"))),
        ],
    )

    lost = dataclasses.replace(other, request_id=RequestId("x"))
    assert result == ReportResult(unknown=(key("x"), lost))
    counts = [
        record.num_delivered
        for executor_id in (EX, other.executor_id)
        for record in (await world.store.snapshot(executor_id)).requests
    ]
    assert counts == [1, 2]


# States


@pytest.mark.parametrize("target", list(S))
@pytest.mark.parametrize("state", list(S))
async def test_a_report_takes_a_request_forwards_only(
    world: World, state: RequestStatus, target: RequestStatus
) -> None:
    await register(world.store)
    await bring_to(world.store, state)

    result = await world.store.report_generated(
        EXECUTOR, [generated(state=target, num_generated_tokens=6)]
    )

    legal = target is state or target in EDGES[state]
    assert result == (ReportResult() if legal else ReportResult(illegal=(key(),)))
    record = await record_of(world.store)
    assert record is not None
    assert record.state is (target if legal else state)
    assert record.num_generated == 6  # counts are applied either way


async def test_what_is_delivered_after_the_end_still_counts(world: World) -> None:
    await register(world.store)
    await world.store.report_generated(
        EXECUTOR, [generated(num_generated_tokens=9, state=S.FINISHED)]
    )

    result = await world.store.report_delivered(GATEWAY, [delivered(num_delivered_tokens=9)])

    record = await record_of(world.store)
    assert record is not None
    assert (result, record.num_delivered, record.state) == (ReportResult(), 9, S.FINISHED)


async def test_of_many_concurrent_reports_the_maximum_remains(world: World) -> None:
    names = [f"r{i}" for i in range(5)]
    await register(world.store, *names)
    counts = [(name, count) for name in names for count in range(1, 21)]
    rng = random.Random(7)

    async def send(name: str, count: int) -> None:
        await world.store.report_generated(EXECUTOR, [generated(name, num_generated_tokens=count)])
        await world.store.report_delivered(
            GATEWAY, [delivered(name, num_delivered_tokens=count // 2)]
        )

    rng.shuffle(counts)
    await asyncio.gather(*(send(name, count) for name, count in counts))

    records = (await world.store.snapshot(EX)).requests
    assert [(r.key.request_id, r.num_generated, r.num_delivered) for r in records] == [
        (name, 20, 10) for name in names
    ]


# Lifetimes


@pytest.mark.parametrize(
    ("state", "life_s"),
    [pytest.param(s, 600.0 if not EDGES[s] else 60.0, id=s.value) for s in S],
)
async def test_a_record_is_forgotten_when_its_time_is_over(
    world: World, state: RequestStatus, life_s: float
) -> None:
    await register(world.store)
    await bring_to(world.store, state)

    world.clock.now_s = START_S + life_s - 0.001
    assert await record_of(world.store) is not None
    world.clock.now_s = START_S + life_s
    assert await record_of(world.store) is None
    result = await world.store.report_delivered(GATEWAY, [delivered(num_delivered_tokens=1)])
    assert result == ReportResult(unknown=(key(),))
    await world.store.register_executor(make_offer())
    assert (await world.store.report_generated(EXECUTOR, [generated()])).unknown == (key(),)


@pytest.mark.parametrize("sender", ["executor", "gateway", "registration"])
async def test_every_report_keeps_a_request_alive(world: World, sender: str) -> None:
    await register(world.store)
    world.clock.now_s += 50.0
    await world.store.register_executor(make_offer())
    if sender == "executor":
        await world.store.report_generated(EXECUTOR, [generated()])
    elif sender == "gateway":
        await world.store.report_delivered(GATEWAY, [delivered()])
    else:
        await world.store.register(GATEWAY, [make_registration()])
    world.clock.now_s += 59.0

    assert await record_of(world.store) is not None


async def test_a_forgotten_request_is_registered_anew_with_its_old_generation(
    world: World,
) -> None:
    await register(world.store)
    await world.store.report_generated(EXECUTOR, [generated(num_generated_tokens=3)])
    world.clock.now_s += 60.0

    assert await world.store.register(OTHER_GATEWAY, [make_registration()]) == []

    record = await record_of(world.store)
    assert record is not None
    assert (record.num_generated, record.gateway_id) == (0, "gw1")
    assert record.executor_epoch == 0  # no lease is held by now


async def test_a_snapshot_is_sorted_and_of_one_executor(world: World) -> None:
    other = RequestKey(executor_id=ExecutorId("ex1"), request_id=RequestId("z"))
    names = ["b", "a", "B", "ä", "{x}", "a:b"]
    await world.store.register(
        GATEWAY, [*(make_registration(name) for name in names), make_registration(key=other)]
    )

    snapshot = await world.store.snapshot(EX)

    assert [r.key.request_id for r in snapshot.requests] == sorted(names)
    assert (await world.store.snapshot(ExecutorId("ex2"))).requests == ()
