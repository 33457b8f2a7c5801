"""Where API keys stand, in a file or in Redis, and how they are kept up to date.

Either holds the same TOML document. No call waits for it: it is read in the background,
and what cannot be read leaves the keys that are known.
"""

import asyncio
from pathlib import Path
from typing import Protocol

import structlog
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from services.gateway.access.api_keys import ApiKeys, parse_api_keys
from services.kit.redis_url import open_redis

log = structlog.get_logger()

REDIS_KEY = "evenflow:api_keys"
REDIS_TIMEOUT_S = 2.0  # to connect, and for the answer


class KeysUnreadableError(Exception):
    """The document cannot be had; the message holds no secret."""


class KeySource(Protocol):
    """A place that holds the document."""

    async def read(self) -> str:
        """Return the document as it is now. Raises KeysUnreadableError."""

    async def aclose(self) -> None:
        """Let go of the place."""


class FileKeys:
    """A file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    async def read(self) -> str:
        try:
            return await asyncio.to_thread(self._path.read_text, "utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise KeysUnreadableError(f"the file of API keys: {type(error).__name__}") from None

    async def aclose(self) -> None:
        """Do nothing: the file is open only while it is read."""


class RedisKeys:
    """The string under REDIS_KEY. Connects when first read, and again after a loss."""

    def __init__(self, url: str) -> None:
        self._client = open_redis(
            url,
            timeout_s=REDIS_TIMEOUT_S,
            retry=Retry(NoBackoff(), 0),  # the next round tries again
            decode_responses=True,
        )

    async def read(self) -> str:
        try:
            document = await self._client.get(REDIS_KEY)
        except (OSError, RedisError, UnicodeDecodeError) as error:
            # Its own text may tell the URL, and so a password.
            raise KeysUnreadableError(f"Redis with API keys: {type(error).__name__}") from None
        if document is None:
            raise KeysUnreadableError(f"Redis has nothing under {REDIS_KEY}")
        return str(document)

    async def aclose(self) -> None:
        await self._client.aclose()


async def follow(source: KeySource, keys: ApiKeys, *, interval_s: float) -> None:
    """Read the document at once and then every `interval_s`, until cancelled."""
    failing = ""
    try:
        while True:
            said = await _refresh(source, keys)
            if said != failing:
                log.warning("api_keys_not_read", error=said) if said else log.info("api_keys_read")
            failing = said
            await asyncio.sleep(interval_s)
    finally:
        await source.aclose()


async def _refresh(source: KeySource, keys: ApiKeys) -> str:
    """Take the document's keys; return what was in the way, empty for nothing."""
    try:
        keys.replace(parse_api_keys(await source.read()))
    except (KeysUnreadableError, ValueError) as error:
        return str(error)
    return ""
