"""Connections to Redis, its scripts, and its failures as service errors."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import resources
from typing import Any

from redis import exceptions
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from services.kit.redis_url import open_redis
from services.tracker.errors import StoreUnavailableError
from services.tracker.metrics import REDIS_ERRORS, REDIS_UP
from services.tracker.redis.codec import Call
from services.tracker.redis.keys import keys_of
from services.tracker.types import ExecutorId

# No answer, or none yet: the server is away, starts, fails over, is out of memory, or is a node of
# a cluster that has moved the keys to another one.
ABSENCES = (
    exceptions.ConnectionError,
    exceptions.TimeoutError,
    exceptions.ReadOnlyError,
    exceptions.OutOfMemoryError,
    exceptions.TryAgainError,
    exceptions.AskError,  # MovedError too
    exceptions.ClusterDownError,
    OSError,
)

MAX_CONNECTIONS = 32

SCRIPT_NAMES = (
    "register_executor",
    "renew_lease",
    "release_lease",
    "register",
    "report_generated",
    "report_delivered",
    "snapshot",
)


def connect(url: str, *, timeout_s: float) -> Redis:
    """Return a client. A lost connection is tried again once, at once; a timeout never is."""
    return open_redis(
        url,
        timeout_s=timeout_s,
        max_connections=MAX_CONNECTIONS,
        retry=Retry(NoBackoff(), 1, supported_errors=(exceptions.ConnectionError,)),
        protocol=2,
        decode_responses=True,
    )


@contextmanager
def redis_errors() -> Iterator[None]:
    """Raise StoreUnavailableError where Redis does not answer, and keep its metrics."""
    try:
        yield
    except ABSENCES as error:
        REDIS_UP.set(0)
        kind = type(error).__name__
        REDIS_ERRORS.labels(kind).inc()
        raise StoreUnavailableError(f"the tracker's store does not answer: {kind}") from error
    REDIS_UP.set(1)


class Scripts:
    """The Lua steps, run by hash and loaded again when the server does not know them."""

    def __init__(self, client: Redis) -> None:
        folder = resources.files("services.tracker.redis") / "lua"
        shared = (folder / "_shared.lua").read_text()
        self._scripts = {
            name: client.register_script(shared + (folder / f"{name}.lua").read_text())
            for name in SCRIPT_NAMES
        }

    async def run(self, name: str, executor_id: ExecutorId, call: Call) -> Any:
        """Run one step on the keys of `executor_id`. Raises StoreUnavailableError."""
        with redis_errors():
            return await self._scripts[name](keys=keys_of(executor_id), args=[json.dumps(call)])
