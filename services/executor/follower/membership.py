"""A follower's side of its leader's group."""

import asyncio
from collections.abc import Mapping

import structlog
from grpc import StatusCode, aio

from evenflow.executor.v1 import nodes_pb2 as pb
from evenflow.executor.v1 import nodes_pb2_grpc as pb_grpc
from services.executor.nodes.types import NodesDifferError, NodesMissingError

log = structlog.get_logger()

RETRY_S = 1.0
# Of a leader that is not there yet, ends, or has not noticed that this node was gone.
NOT_YET = (StatusCode.UNAVAILABLE, StatusCode.ABORTED, StatusCode.CANCELLED)


class Membership:
    """Part of a group from `join` until `ended`."""

    def __init__(self, channel: aio.Channel) -> None:
        self._stub = pb_grpc.NodesServiceStub(channel)
        self._call: aio.UnaryStreamCall[pb.JoinRequest, pb.JoinResponse] | None = None

    async def join(
        self, rank: int, host: str, facts: Mapping[str, str], *, timeout_s: float
    ) -> int:
        """Return the rendezvous port, when all nodes have joined.

        Tries again while there is no leader that takes this node. Raises NodesMissingError if
        there is none within `timeout_s`, and NodesDifferError.
        """
        request = pb.JoinRequest(node_rank=rank, host=host, facts=facts)
        reason = ""
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    try:
                        return await self._try(request)
                    except aio.AioRpcError as error:
                        reason = self._reason(error, reason)
                    await asyncio.sleep(RETRY_S)
        except TimeoutError:
            raise NodesMissingError(f"no leader within {timeout_s:g} s: {reason}") from None

    async def _try(self, request: pb.JoinRequest) -> int:
        self._call = self._stub.Join(request)
        async for response in self._call:
            return response.rendezvous_port
        raise aio.AioRpcError(
            StatusCode.UNAVAILABLE, aio.Metadata(), aio.Metadata(), "the leader has ended"
        )

    def _reason(self, error: aio.AioRpcError, before: str) -> str:
        """Return why there is no leader yet, which is logged as often as it changes."""
        reason = error.details() or error.code().name
        if error.code() is StatusCode.INVALID_ARGUMENT:
            raise NodesDifferError(reason)
        if error.code() not in NOT_YET:
            raise NodesMissingError(reason)
        if reason != before:
            log.info("leader_awaited", reason=reason)
        return reason

    async def ended(self) -> str:
        """Return when the leader has ended, or is out of reach, with what gRPC says of it."""
        assert self._call is not None
        return f"{(await self._call.code()).name}: {await self._call.details()}"
