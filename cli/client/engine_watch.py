"""What an executor's scheduler sees, as it sees it, and what readers still have when it is done."""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from threading import Thread
from typing import TYPE_CHECKING

import grpc

from evenflow.executor.v1 import executor_pb2 as pb
from evenflow.executor.v1 import executor_pb2_grpc as pb_grpc
from services.generation.convert import CAUSE_FROM_PROTO

if TYPE_CHECKING:
    from evenflow.executor.v1.executor_pb2_grpc import ExecutorServiceStub

NUM_STEPS_KEPT = 60


class WatchError(Exception):
    """The executor cannot be watched; the message is for the user."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One request as it is shown."""

    request: pb.ObservedRequest  # as the scheduler saw it last
    num_deposited: int  # tokens that the reader does not have yet
    is_ended: bool = False  # the engine is done with it, the gateway is not

    @property
    def num_delivered(self) -> int:
        return self.request.num_generated_tokens - self.num_deposited

    @property
    def attainment(self) -> float | None:
        """Return the share of tokens that came in time, in [0, 1]; None without a pace or gap."""
        num_gaps = self.request.num_generated_tokens - 1
        if not self.request.release_interval_s or num_gaps < 1:
            return None
        return 1 - self.request.num_late_tokens / num_gaps

    @property
    def late_cause(self) -> str:
        """Name what made most of its late tokens late; empty if none was, or it is not known."""
        cause = CAUSE_FROM_PROTO.get(self.request.late_cause)
        return "" if cause is None else cause.value


@dataclass(slots=True)
class EngineState:
    """The newest update, and what is remembered of those before it."""

    update: pb.WatchRequestsResponse = field(default_factory=pb.WatchRequestsResponse)
    observed_s: deque[float] = field(default_factory=lambda: deque(maxlen=NUM_STEPS_KEPT))
    _ended: dict[str, tuple[pb.ObservedRequest, float]] = field(default_factory=dict)
    _now_s: float = 0.0

    def take(self, update: pb.WatchRequestsResponse, now_s: float) -> None:
        """Replace the newest update by one that came at `now_s`."""
        here = {request.request_id for request in update.requests}
        for request in self.update.requests:
            if request.request_id not in here and request.pace_tail:
                self._ended[request.request_id] = (request, now_s)
        for request_id in [i for i in self._ended if i in here or not self._left(i, now_s)]:
            del self._ended[request_id]
        if update.num_steps != self.update.num_steps:
            self.observed_s.append(update.observed_step_s)
        self.update, self._now_s = update, now_s

    @property
    def rows(self) -> Sequence[Row]:
        """Return the scheduler's requests, then those whose readers are still at it."""
        return [
            *(Row(request=r, num_deposited=r.num_deposited_tokens) for r in self.update.requests),
            *(
                Row(request=request, num_deposited=self._left(name, self._now_s), is_ended=True)
                for name, (request, _) in self._ended.items()
            ),
        ]

    @property
    def attainment(self) -> float | None:
        """Return the share of tokens that came in time, over all rows with a pace."""
        shares = [
            (row.attainment, row.request.num_generated_tokens - 1)
            for row in self.rows
            if row.attainment is not None
        ]
        if not shares:
            return None
        return sum(share * weight for share, weight in shares) / sum(w for _, w in shares)

    def _left(self, request_id: str, now_s: float) -> int:
        """Return the deposit of a request that ended, if its reader has kept its pace since."""
        request, ended_s = self._ended[request_id]
        if not request.release_interval_s:
            return 0
        num_read = int((now_s - ended_s) / request.release_interval_s)
        return max(0, request.num_deposited_tokens - num_read)


class EngineWatch:
    """One watch of an executor. `stop` may be called from any thread."""

    def __init__(
        self, address: str, *, updates_per_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock = clock
        self._channel = grpc.insecure_channel(address)
        stub: ExecutorServiceStub = pb_grpc.ExecutorServiceStub(self._channel)
        self._call = stub.WatchRequests(pb.WatchRequestsRequest(max_updates_per_s=updates_per_s))

    def states(self) -> Iterator[EngineState]:
        """Yield one object, changed with each update, until stopped or the executor ends.

        Raises WatchError if it cannot be reached.
        """
        state = EngineState()
        try:
            for update in self._call:
                state.take(update, self._clock())
                yield state
        except grpc.RpcError as error:
            if error.code() != grpc.StatusCode.CANCELLED:
                raise WatchError(f"the executor cannot be watched: {error.details()}") from error
        finally:
            self._channel.close()

    def stop(self) -> None:
        self._call.cancel()


@contextmanager
def followed(
    address: str, *, updates_per_s: float, see: Callable[[EngineState], None]
) -> Iterator[None]:
    """While the block runs, call `see` with each state, from another thread.

    It is never called if the executor cannot be watched.
    """
    watch = EngineWatch(address, updates_per_s=updates_per_s)

    def follow() -> None:
        with suppress(WatchError):
            for state in watch.states():
                see(state)

    thread = Thread(target=follow, daemon=True)
    thread.start()
    try:
        yield
    finally:
        watch.stop()
        thread.join()
