"""Connections to Redis, its scripts, and its failures as service errors."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import resources
from typing import Any

from redis import exceptions
from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from services.tracker.errors import StoreUnavailableError
from services.tracker.metrics import REDIS_ERRORS, REDIS_UP
from services.tracker.redis_codec import Call
from services.tracker.redis_keys import keys_of
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

SCRIPT_NAMES = (
    "register_executor",
    "renew_lease",
    "release_lease",
    "register",
    "report_generated",
    "report_delivered",
    "transition",
    "snapshot",
)


def connect(
    url: str,
    *,
    connect_timeout_s: float,
    answer_timeout_s: float | None,
    max_connections: int,
    num_retries: int,
) -> Redis:
    """Return a client; it connects when first used, and again after every loss.

    `connect_timeout_s` bounds connecting and waiting for a free connection. A lost connection is
    tried again `num_retries` times at once; a timeout never is. With an `answer_timeout_s` a
    command may miss its cancellation (it sends under `asyncio.wait_for`, which before Python 3.12
    drops one that comes as it ends): callers that block must pass None and bound the wait
    themselves.
    """
    pool = BlockingConnectionPool.from_url(
        url,
        max_connections=max_connections,
        timeout=connect_timeout_s,
        socket_timeout=answer_timeout_s,
        socket_connect_timeout=connect_timeout_s,
        retry=Retry(NoBackoff(), num_retries, supported_errors=(exceptions.ConnectionError,)),
        protocol=2,
        decode_responses=True,
    )
    return Redis.from_pool(pool)


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
        folder = resources.files("services.tracker") / "lua"
        shared = (folder / "_shared.lua").read_text()
        self._scripts = {
            name: client.register_script(shared + (folder / f"{name}.lua").read_text())
            for name in SCRIPT_NAMES
        }

    async def run(self, name: str, executor_id: ExecutorId, call: Call) -> Any:
        """Run one step on the keys of `executor_id`. Raises StoreUnavailableError."""
        with redis_errors():
            return await self._scripts[name](keys=keys_of(executor_id), args=[json.dumps(call)])
