"""Follows one executor's events stream on a connection of its own."""

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Sequence
from dataclasses import dataclass
from typing import Any

import structlog
from redis.asyncio import Redis

from services.kit.clock import Clock
from services.tracker.errors import StoreUnavailableError
from services.tracker.metrics import WATCH_RESETS
from services.tracker.redis_client import Scripts, redis_errors
from services.tracker.redis_codec import call_at, decode_keys, decode_lease, decode_record
from services.tracker.redis_keys import keys_of
from services.tracker.types import (
    Change,
    ExecutorId,
    Lifetimes,
    RequestKey,
    RequestRecord,
    Snapshot,
)

log = structlog.get_logger()

MAX_EVENTS_PER_READ = 1_000
FIRST_BACKOFF_S = 0.1
LAST_BACKOFF_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """Where in the stream a reader is. Events after it have the next `seq`s, without a gap."""

    event_id: str
    seq: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Waits:
    """How long a watcher waits for Redis. Seconds."""

    block_s: float  # for events, before it checks that its stream still exists
    answer_s: float  # for an answer, beyond that


async def read_snapshot(
    scripts: Scripts, executor_id: ExecutorId, *, lifetimes: Lifetimes, now_s: float
) -> tuple[Snapshot, Position]:
    """Return the snapshot and the position in the stream that it belongs to, atomically."""
    event_id, seq, lease, flat = await scripts.run(
        "snapshot", executor_id, call_at(now_s, lifetimes)
    )
    keys = decode_keys(executor_id, flat[::2])
    records = _decode_all(keys, flat[1::2], now_s)
    snapshot = Snapshot(requests=records, lease=decode_lease(executor_id, lease, now_s))
    return snapshot, Position(event_id=event_id, seq=int(seq))


class RedisWatch:
    """One watcher. Its client is its own and has one connection, no retries, no answer timeout."""

    def __init__(
        self,
        client: Redis,
        executor_id: ExecutorId,
        *,
        lifetimes: Lifetimes,
        clock: Clock,
        waits: Waits,
    ) -> None:
        self._client = client
        self._scripts = Scripts(client)
        self._executor_id = executor_id
        self._keys = keys_of(executor_id)
        self._lifetimes = lifetimes
        self._clock = clock
        self._waits = waits
        self._position: Position | None = None  # None: the next change is a reset

    async def changes(self) -> AsyncGenerator[Change, None]:
        """Yield changes until closed; waits through losses of Redis after the first one.

        Raises StoreUnavailableError if Redis is away at the start.
        """
        try:
            yield await self._reset()
            backoff_s = FIRST_BACKOFF_S
            while True:
                try:
                    change = await self._next_change()
                except StoreUnavailableError:
                    self._position = None
                    await asyncio.sleep(backoff_s)
                    backoff_s = min(2 * backoff_s, LAST_BACKOFF_S)
                    continue
                backoff_s = FIRST_BACKOFF_S
                if change is not None:
                    yield change
        finally:
            await self._client.aclose()

    async def _next_change(self) -> Change | None:
        """Wait for a change for the blocking time; None if there is none to tell."""
        if self._position is None:
            WATCH_RESETS.inc()
            log.info("watch_reset", executor_id=self._executor_id)
            return await self._reset()
        events = await self._read_events(self._position)
        if not events:
            await self._check_for_loss(self._position)
            return None
        first_seq, last_seq = int(events[0][1]["seq"]), int(events[-1][1]["seq"])
        if first_seq != self._position.seq + 1:  # trimmed away, or written by another incarnation
            self._position = None
            return None
        self._position = Position(event_id=events[-1][0], seq=last_seq)
        changed = {i for _, fields in events for i in json.loads(fields["request_ids"])}
        records = await self._read_records(decode_keys(self._executor_id, sorted(changed)))
        return Change(reset=False, requests=records) if records else None

    async def _reset(self) -> Change:
        snapshot, self._position = await self._answer(
            read_snapshot(
                self._scripts, self._executor_id, lifetimes=self._lifetimes, now_s=self._clock()
            )
        )
        return Change(reset=True, requests=snapshot.requests)

    async def _read_events(self, position: Position) -> list[tuple[str, dict[str, str]]]:
        block_s = self._waits.block_s
        streams = await self._answer(
            self._client.xread(
                {self._keys.events: position.event_id},
                count=MAX_EVENTS_PER_READ,
                block=int(block_s * 1_000),
            ),
            block_s=block_s,
        )
        return list(streams[0][1]) if streams else []

    async def _check_for_loss(self, position: Position) -> None:
        """Start again if the stream is not the one that was read: the store was emptied."""
        last = await self._answer(self._client.xrevrange(self._keys.events, count=1))
        if (int(last[0][1]["seq"]) if last else 0) < position.seq:
            self._position = None

    async def _read_records(self, keys: Sequence[RequestKey]) -> tuple[RequestRecord, ...]:
        if not keys:
            return ()
        ids = [key.request_id for key in keys]
        texts = await self._answer(self._client.hmget(self._keys.records, ids))
        return _decode_all(keys, texts, self._clock())

    async def _answer(self, command: Awaitable[Any], *, block_s: float = 0.0) -> Any:
        """Return the answer to `command`. Raises StoreUnavailableError if it takes too long."""
        with redis_errors():
            async with asyncio.timeout(block_s + self._waits.answer_s):
                return await command


def _decode_all(
    keys: Sequence[RequestKey], texts: Sequence[str | None], now_s: float
) -> tuple[RequestRecord, ...]:
    """Return what has not expired, sorted by id."""
    records = (decode_record(key, text, now_s) for key, text in zip(keys, texts, strict=True))
    return tuple(sorted((r for r in records if r is not None), key=lambda record: record.key))
