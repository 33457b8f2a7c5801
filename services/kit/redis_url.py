"""Redis by URL: one server, or the master of a service that sentinels watch.

`redis://`, `rediss://` and `unix://` are redis-py's. `redis+sentinel://`, or `rediss+sentinel://`
over TLS, names sentinels, the service, and, as the others do, the database and options:
`redis+sentinel://[user:password@]host[:port],…/service[/database][?option=…]`. User and password
are those of Redis; the options `sentinel_username` and `sentinel_password` those of the sentinels.
"""

import re
from dataclasses import dataclass
from typing import Annotated, Any, Self
from urllib.parse import unquote, urlsplit

import redis
from pydantic import AfterValidator, SecretStr
from redis import asyncio as aioredis
from redis.asyncio.sentinel import Sentinel as AsyncSentinel
from redis.asyncio.sentinel import SentinelConnectionPool
from redis.backoff import NoBackoff
from redis.connection import parse_url
from redis.retry import Retry
from redis.sentinel import Sentinel

SENTINEL_PORT = 26_379


def _checked(url: SecretStr) -> SecretStr:
    text = url.get_secret_value()
    if SentinelUrl.names(text):
        SentinelUrl.parse(text)
    elif not re.match(r"(rediss?|unix)://.", text):
        raise ValueError(
            "must begin with redis://, rediss://, unix:// or redis+sentinel://, and name a server"
        )
    return url


RedisUrl = Annotated[SecretStr, AfterValidator(_checked)]  # it may hold a password


@dataclass(frozen=True)
class SentinelUrl:
    """Which sentinels to ask for which service's master, and how to connect to them and to it."""

    addresses: tuple[tuple[str, int], ...]
    service: str
    sentinel_options: dict[str, Any]
    options: dict[str, Any]

    @staticmethod
    def names(url: str) -> bool:
        """Return whether a URL names sentinels."""
        return url.partition("://")[0] in ("redis+sentinel", "rediss+sentinel")

    @classmethod
    def parse(cls, url: str) -> Self:
        """Read a URL that names sentinels. Raises ValueError."""
        parts = urlsplit(url)
        credentials, at, hosts = parts.netloc.rpartition("@")
        service, _, database = parts.path.strip("/").partition("/")
        servers = [urlsplit(f"//{host}") for host in hosts.split(",")]
        if not service or not all(server.hostname for server in servers):
            raise ValueError("sentinels are named as redis+sentinel://host[:port],…/service")
        scheme = parts.scheme.partition("+")[0]
        options = dict(
            parse_url(f"{scheme}://{credentials}{at}redis/{database}?{parts.query}")  # its options
        )
        del options["host"]
        secure = {"ssl": True} if options.pop("connection_class", None) is not None else {}
        own = {
            name: options.pop(f"sentinel_{name}")
            for name in ("username", "password")
            if f"sentinel_{name}" in options
        }
        shared = {name: value for name, value in options.items() if name.startswith("ssl_")}
        return cls(
            addresses=tuple(
                (str(server.hostname), server.port or SENTINEL_PORT) for server in servers
            ),
            service=unquote(service),
            sentinel_options=shared | secure | own,
            options=options | secure,
        )


class _BlockingSentinelPool(SentinelConnectionPool, aioredis.BlockingConnectionPool):
    """Calls wait for a connection to the master, as they do for one to a single server."""

    async def aclose(self) -> None:
        await super().aclose()
        for sentinel in self.sentinel_manager.sentinels:
            await sentinel.aclose()


def open_redis(url: str, *, timeout_s: float, **options: Any) -> aioredis.Redis:
    """Return a client; it connects when first used, and again after every loss.

    `timeout_s` bounds connecting to one server, waiting for a free connection, and every answer;
    `options` are redis-py's of a connection pool. A sentinel is asked for the master with every new
    connection. Raises ValueError for a URL that names no server.
    """
    bounds = {"socket_timeout": timeout_s, "socket_connect_timeout": timeout_s}
    options |= bounds | {"timeout": timeout_s}
    if not SentinelUrl.names(url):
        return aioredis.Redis.from_pool(aioredis.BlockingConnectionPool.from_url(url, **options))
    place = SentinelUrl.parse(url)
    manager = AsyncSentinel(place.addresses, sentinel_kwargs=place.sentinel_options | bounds)
    pool = _BlockingSentinelPool(place.service, manager, **(place.options | options))
    return aioredis.Redis.from_pool(pool)


def refusal_of_cluster(url: str, *, timeout_s: float) -> str:
    """Return why a Redis will not do: several masters share its keys, and a client of one of them
    is sent elsewhere for the others'. Empty if it will, or does not answer within `timeout_s`.
    """
    client = open_redis_blocking(url, timeout_s=timeout_s)
    client.set_retry(Retry(NoBackoff(), 0))
    try:
        with client:
            told: Any = client.execute_command("CLUSTER", "INFO")
    except (redis.RedisError, OSError):  # it is away, or no cluster
        return ""
    found = re.search(r"cluster_size:(\d+)", str(told))
    if found is None or int(found[1]) < 2:
        return ""
    return (
        f"is a Redis Cluster of {found[1]} masters: Evenflow takes one server, or one that "
        "sentinels watch (redis+sentinel://)"
    )


def open_redis_blocking(url: str, *, timeout_s: float) -> redis.Redis:
    """Return a client for a command's own thread. `timeout_s` and errors as in `open_redis`."""
    bounds = {"socket_timeout": timeout_s, "socket_connect_timeout": timeout_s}
    if not SentinelUrl.names(url):
        return redis.Redis.from_url(url, **bounds)
    place = SentinelUrl.parse(url)
    manager = Sentinel(place.addresses, sentinel_kwargs=place.sentinel_options | bounds)
    client: redis.Redis = manager.master_for(place.service, **(place.options | bounds))
    return client
