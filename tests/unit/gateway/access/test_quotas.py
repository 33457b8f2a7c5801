"""What a key may have at a time."""

import pytest
from pydantic import SecretStr

from services.gateway.access.api_keys import ApiKey
from services.gateway.access.quotas import Quotas
from services.gateway.errors import KeyLimitError


def make_key(max_live_requests: int | None = None) -> ApiKey:
    return ApiKey(name="a", key=SecretStr("k" * 16), max_live_requests=max_live_requests)


@pytest.mark.parametrize(("own_limit", "most"), [(None, 3), (1, 1), (9, 9)])
def test_a_key_without_a_limit_of_its_own_has_the_default_one(own_limit, most) -> None:
    quotas, key = Quotas(default_max_live=3), make_key(own_limit)
    quotas.enter(key, most)

    with pytest.raises(KeyLimitError, match=f"may have {most} requests"):
        quotas.enter(key)
    quotas.leave(key, 0)
    quotas.enter(key)


def test_who_needs_no_key_has_no_limit() -> None:
    Quotas(default_max_live=1).enter(None, 1_000)
