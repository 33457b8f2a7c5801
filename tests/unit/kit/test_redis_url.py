"""URLs that name sentinels."""

import pytest
from pydantic import SecretStr, TypeAdapter, ValidationError

from services.kit.redis_url import RedisUrl, SentinelUrl, open_redis, open_redis_blocking


def test_sentinels_service_database_and_credentials_are_read() -> None:
    url = (
        "redis+sentinel://me:p%40ss@a:1,[::1]:2,c/evenflow/3"
        "?sentinel_password=other&health_check_interval=7"
    )

    place = SentinelUrl.parse(url)

    assert place == SentinelUrl(
        addresses=(("a", 1), ("::1", 2), ("c", 26_379)),
        service="evenflow",
        sentinel_options={"password": "other"},
        options={"username": "me", "password": "p@ss", "db": 3, "health_check_interval": 7},
    )


def test_over_tls_sentinels_and_redis_are_checked_alike() -> None:
    place = SentinelUrl.parse("rediss+sentinel://a/evenflow?ssl_ca_certs=/ca.pem")

    expected = {"ssl": True, "ssl_ca_certs": "/ca.pem"}
    assert place.sentinel_options == expected
    assert place.options == expected


@pytest.mark.parametrize(
    "url",
    [
        "http://a",
        "redis://",
        "sentinel://a/evenflow",
        "redis+sentinel://a",
        "redis+sentinel:///evenflow",
        "redis+sentinel://a,/evenflow",
        "redis+sentinel://a:x/evenflow",
    ],
)
def test_a_url_that_names_no_server_is_refused(url: str) -> None:
    with pytest.raises(ValidationError):
        TypeAdapter(RedisUrl).validate_python(SecretStr(url))


@pytest.mark.parametrize(
    "url", ["redis://a", "unix:///run/redis.sock", "rediss+sentinel://a,b/evenflow"]
)
async def test_clients_connect_when_first_used(url: str) -> None:
    open_redis_blocking(url, timeout_s=1.0).close()
    await open_redis(url, timeout_s=1.0, max_connections=2).aclose()
