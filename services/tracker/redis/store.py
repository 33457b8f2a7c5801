"""The tracker's record in Redis: one Lua script per atomic step."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from services.kit.clock import Clock
from services.kit.errors import ServiceError
from services.reporting.load import ExecutorLoad
from services.tracker.errors import LeaseExpiredError, StaleEpochError
from services.tracker.redis.client import Scripts, connect, redis_errors
from services.tracker.redis.codec import (
    EDGES_TABLE,
    call_at,
    decode_keys,
    decode_lease,
    decode_record,
    encode_load,
    encode_registration,
)
from services.tracker.redis.keys import EXECUTORS, keys_of
from services.tracker.types import (
    DeliveredProgress,
    ExecutorId,
    ExecutorOffer,
    ExecutorWriter,
    GatewayWriter,
    GeneratedProgress,
    Lease,
    Lifetimes,
    Registration,
    ReportResult,
    RequestKey,
    TrackerSnapshot,
)

_REFUSALS: dict[str, type[ServiceError]] = {
    error.reason: error for error in (LeaseExpiredError, StaleEpochError)
}


class RedisTrackerStore:
    """Holds every record in Redis, so that any number of trackers may serve it.

    Starts without Redis and reconnects by itself; meanwhile calls raise StoreUnavailableError
    within about `timeout_s`.
    """

    def __init__(
        self, url: str, lifetimes: Lifetimes, *, clock: Clock, timeout_s: float = 1.0
    ) -> None:
        """`clock` returns wall-clock seconds; trackers that share a Redis share the time."""
        self._lifetimes = lifetimes
        self._clock = clock
        self._client = connect(url, timeout_s=timeout_s)
        self._scripts = Scripts(self._client)

    async def aclose(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    async def register_executor(self, offer: ExecutorOffer) -> None:
        status = await self._run(
            "register_executor",
            offer.executor_id,
            epoch=str(offer.epoch),
            address=offer.address,
            model=offer.model,
            load=encode_load(offer.load),
        )
        _raise_unless_ok(status, f"executor {offer.executor_id}")
        await self._add_to_list(offer.executor_id)

    async def renew_lease(self, writer: ExecutorWriter, load: ExecutorLoad) -> None:
        status = await self._run(
            "renew_lease", writer.executor_id, epoch=str(writer.epoch), load=encode_load(load)
        )
        _raise_unless_ok(status, f"executor {writer.executor_id}")
        await self._add_to_list(writer.executor_id)

    async def release_lease(self, writer: ExecutorWriter) -> None:
        status = await self._run("release_lease", writer.executor_id, epoch=str(writer.epoch))
        _raise_unless_ok(status, f"executor {writer.executor_id}")

    async def list_executors(self) -> list[Lease]:
        with redis_errors():
            members: Any = await self._client.smembers(EXECUTORS)
        ids = [ExecutorId(member) for member in sorted(members)]
        found = {executor_id: await self._read_lease(executor_id) for executor_id in ids}
        forgotten = [executor_id for executor_id, flat in found.items() if not flat]
        if forgotten:  # a registration that comes in between is listed again by its next renewal
            with redis_errors():
                await self._client.srem(EXECUTORS, *forgotten)
        now_s = self._clock()
        leases = (decode_lease(executor_id, flat, now_s) for executor_id, flat in found.items())
        return [lease for lease in leases if lease is not None]

    async def register(
        self, gateway: GatewayWriter, registrations: Sequence[Registration]
    ) -> list[RequestKey]:
        by_executor: defaultdict[ExecutorId, list[Registration]] = defaultdict(list)
        for new in registrations:
            by_executor[new.key.executor_id].append(new)
        stale: list[RequestKey] = []
        for executor_id, batch in by_executor.items():
            stale += decode_keys(
                executor_id,
                await self._run(
                    "register",
                    executor_id,
                    gateway_id=gateway.gateway_id,
                    gateway_epoch=str(gateway.epoch),
                    registrations=[encode_registration(new) for new in batch],
                ),
            )
        return list(_in_order((new.key for new in registrations), stale))

    async def report_generated(
        self, executor: ExecutorWriter, progress: Sequence[GeneratedProgress]
    ) -> ReportResult:
        status, unknown, stale, illegal = await self._run(
            "report_generated",
            executor.executor_id,
            epoch=str(executor.epoch),
            edges=EDGES_TABLE,
            progress=[
                _without_none(
                    request_id=entry.request_id,
                    generation=entry.generation,
                    num_generated=entry.num_generated_tokens,
                    state=entry.state.value if entry.state else None,
                )
                for entry in progress
            ],
        )
        _raise_unless_ok(status, f"executor {executor.executor_id}")
        return ReportResult(
            unknown=tuple(decode_keys(executor.executor_id, unknown)),
            stale=tuple(decode_keys(executor.executor_id, stale)),
            illegal=tuple(decode_keys(executor.executor_id, illegal)),
        )

    async def report_delivered(
        self, gateway: GatewayWriter, progress: Sequence[DeliveredProgress]
    ) -> ReportResult:
        by_executor: defaultdict[ExecutorId, list[DeliveredProgress]] = defaultdict(list)
        for entry in progress:
            by_executor[entry.key.executor_id].append(entry)
        unknown: list[RequestKey] = []
        stale: list[RequestKey] = []
        for executor_id, batch in by_executor.items():
            unknown_ids, stale_ids = await self._run(
                "report_delivered",
                executor_id,
                gateway_id=gateway.gateway_id,
                gateway_epoch=str(gateway.epoch),
                progress=[
                    _without_none(
                        request_id=entry.key.request_id,
                        generation=entry.generation,
                        num_delivered=entry.num_delivered_tokens,
                    )
                    for entry in batch
                ],
            )
            unknown += decode_keys(executor_id, unknown_ids)
            stale += decode_keys(executor_id, stale_ids)
        keys = [entry.key for entry in progress]
        return ReportResult(unknown=_in_order(keys, unknown), stale=_in_order(keys, stale))

    async def snapshot(self, executor_id: ExecutorId) -> TrackerSnapshot:
        lease, flat = await self._run("snapshot", executor_id)
        now_s = self._clock()
        keys = decode_keys(executor_id, flat[::2])
        records = (decode_record(k, text, now_s) for k, text in zip(keys, flat[1::2], strict=True))
        return TrackerSnapshot.of(
            [record for record in records if record is not None],
            decode_lease(executor_id, lease, now_s),
        )

    async def _run(self, script: str, executor_id: ExecutorId, **details: Any) -> Any:
        call = call_at(self._clock(), self._lifetimes) | details
        return await self._scripts.run(script, executor_id, call)

    async def _add_to_list(self, executor_id: ExecutorId) -> None:
        with redis_errors():
            await self._client.sadd(EXECUTORS, executor_id)

    async def _read_lease(self, executor_id: ExecutorId) -> list[str]:
        with redis_errors():
            fields: Any = await self._client.hgetall(keys_of(executor_id).lease)
        return [part for pair in fields.items() for part in pair]


def _raise_unless_ok(status: str, what: str) -> None:
    if status != "OK":
        raise _REFUSALS[status](f"{what}: {status.lower().replace('_', ' ')}")


def _without_none(**fields: Any) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def _in_order(keys: Iterable[RequestKey], named: Sequence[RequestKey]) -> tuple[RequestKey, ...]:
    """Return `named` in the order of `keys`: a call for several executors was split."""
    chosen = set(named)
    return tuple(key for key in keys if key in chosen)
