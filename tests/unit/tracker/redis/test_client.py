"""Failures of Redis as the tracker's own."""

import pytest
from redis import exceptions

from services.tracker.errors import StoreUnavailableError
from services.tracker.redis.client import redis_errors


@pytest.mark.parametrize(
    "error",
    [
        exceptions.MovedError("3999 127.0.0.1:6381"),
        exceptions.AskError("3999 127.0.0.1:6381"),
        exceptions.MasterDownError(""),
        exceptions.ConnectionError(""),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_server_that_cannot_answer_here_or_now_is_unavailable_by_name(error: Exception) -> None:
    with pytest.raises(StoreUnavailableError, match=type(error).__name__), redis_errors():
        raise error


def test_a_fault_of_ours_is_none_of_the_server() -> None:
    with pytest.raises(exceptions.ResponseError), redis_errors():
        raise exceptions.ResponseError("wrong number of arguments")
