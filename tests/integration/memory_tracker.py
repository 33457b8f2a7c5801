"""A tracker on the in-memory store, in the test's own event loop."""

import asyncio

from evenflow.tracker.v1 import tracker_pb2 as pb
from evenflow.tracker.v1 import tracker_pb2_grpc as pb_grpc
from lab.memory_tracker_store import MemoryTrackerStore
from lab.stack.ports import free_port
from services.kit.clock import wall_s
from services.kit.rpc import name_of_request
from services.kit.server import ServiceServer
from services.tracker.servicer import TrackerServicer
from services.tracker.types import Lifetimes
from tests.fake_executor import EVENT_TIMEOUT_S


class Tracker:
    """A tracker on the in-memory store; a restart forgets everything."""

    def __init__(self) -> None:
        self.port = free_port()
        self._servicer: TrackerServicer
        self._server: ServiceServer

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def start(self) -> None:
        store = MemoryTrackerStore(Lifetimes(), clock=wall_s)
        self._servicer = TrackerServicer(store, lease_ttl_s=60.0, clock=wall_s)
        self._server = ServiceServer(self.address, [])
        pb_grpc.add_TrackerServiceServicer_to_server(self._servicer, self._server.grpc)
        await self._server.start()

    async def kill(self) -> None:
        await self._server.grpc.stop(grace=None)

    async def records(self) -> list[tuple[str, pb.RequestRecord]]:
        """Return the records, each with what its client calls the request."""
        request = pb.SnapshotRequest(executor_id="executor-0")
        answer = await self._servicer.Snapshot(request, None)
        return [(name_of_request(record.request_id), record) for record in answer.requests]

    async def has_only(self, state: "pb.RequestState.ValueType") -> bool:
        """Say whether one request is recorded, in that state."""
        return [record.state for _, record in await self.records()] == [state]

    async def until_delivered(self, request_id: str, num_tokens: int) -> pb.RequestRecord:
        async with asyncio.timeout(EVENT_TIMEOUT_S):
            while True:
                for name, record in await self.records():
                    if name == request_id and record.num_delivered_tokens == num_tokens:
                        return record
                await asyncio.sleep(0.02)
