"""gRPC edge of the leader for its followers."""

from collections.abc import AsyncIterator

from evenflow.executor.v1 import nodes_pb2 as pb
from evenflow.executor.v1 import nodes_pb2_grpc as pb_grpc
from services.executor.nodes.node_group import Node, NodeGroup
from services.kit.rpc import Context


class NodesServicer(pb_grpc.NodesServiceServicer):
    def __init__(self, group: NodeGroup) -> None:
        self._group = group

    async def Join(
        self, request: pb.JoinRequest, context: Context
    ) -> AsyncIterator[pb.JoinResponse]:
        node = Node(rank=request.node_rank, host=request.host, facts=dict(request.facts))
        # The one hook that runs at once, however the call ends.
        context.add_done_callback(lambda _: self._group.leave(node))  # type: ignore[arg-type]
        await self._group.join(node)
        yield pb.JoinResponse(rendezvous_port=await self._group.begun())
        await self._group.over()
