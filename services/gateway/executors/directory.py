"""What the tracker knows of executors and of their requests."""

import asyncio
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from evenflow.tracker.v1 import tracker_pb2 as pb
from services.gateway.executors.discovery import Place
from services.generation.lifecycle import RequestStatus
from services.kit.rpc import name_of_request, service_errors
from services.kit.wire import numbers

if TYPE_CHECKING:
    from evenflow.tracker.v1.tracker_pb2_grpc import TrackerServiceAsyncStub

RPC_TIMEOUT_S = 2.0

_STATES = {number: state.value for state, number in numbers(RequestStatus, pb.RequestState).items()}
_ENDED = {state.value for state in RequestStatus if state.is_final}


class TrackerDirectory:
    """A source of executors: those that hold a lease. Every call raises UnavailableError, or
    another ServiceError, if the tracker or its store does not answer.
    """

    def __init__(self, stub: "TrackerServiceAsyncStub") -> None:
        self._stub = stub

    @property
    def name(self) -> str:
        return "tracker:"

    async def places(self) -> Collection[Place]:
        """Return where executors are. A lease that has ended may be news that the tracker lost: a
        link outlasts it as long as it is connected.
        """
        return [Place(one.address, outlasts=True) for one in await self._executors()]

    async def fleet(self) -> list[dict[str, Any]]:
        """Return each executor with its load and the requests that it has, in JSON's types."""
        return await asyncio.gather(*map(self._described, await self._executors()))

    async def _executors(self) -> Collection[pb.Executor]:
        with service_errors():
            answer = await self._stub.ListExecutors(
                pb.ListExecutorsRequest(), timeout=RPC_TIMEOUT_S
            )
        return answer.executors

    async def _described(self, executor: pb.Executor) -> dict[str, Any]:
        request, load = pb.SnapshotRequest(executor_id=executor.executor_id), executor.load
        with service_errors():
            snapshot = await self._stub.Snapshot(request, timeout=RPC_TIMEOUT_S)
        return {
            "executor_id": executor.executor_id,
            "address": executor.address,
            "model": executor.model,
            "lease_ttl_s": executor.lease_ttl.ToTimedelta().total_seconds(),
            "load": {field.name: getattr(load, field.name) for field in load.DESCRIPTOR.fields},
            "requests": [
                _request(one) for one in snapshot.requests if _STATES.get(one.state) not in _ENDED
            ],
        }


def _request(record: pb.RequestRecord) -> dict[str, Any]:
    return {
        "request_id": name_of_request(record.request_id),
        "gateway_id": record.gateway_id,
        "state": _STATES.get(record.state, "unknown"),
        "num_prompt_tokens": record.num_prompt_tokens,
        "num_generated_tokens": record.num_generated_tokens,
        "num_delivered_tokens": record.num_delivered_tokens,
        "num_deposited_tokens": record.num_deposited_tokens,
    }
