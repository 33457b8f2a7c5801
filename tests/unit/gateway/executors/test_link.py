"""What a link's writer makes of a stream that has ended."""

import grpc
import pytest
from grpc import aio

from services.gateway.executors.link import _write
from services.gateway.executors.outbox import Outbox


class EndedCall:
    """A call whose executor has ended it; what it sent before may not have been read yet."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    async def write(self, message: object) -> None:
        raise self._error


CORE = aio.AioRpcError(
    grpc.StatusCode.INTERNAL, aio.Metadata(), aio.Metadata(), "Internal error from Core"
)


@pytest.mark.parametrize("error", [CORE, aio.UsageError("it has ended")], ids=type)
async def test_a_write_that_fails_leaves_the_stream_to_its_reader(error: Exception) -> None:
    await _write(EndedCall(error), Outbox("gateway", 1))
