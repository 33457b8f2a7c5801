"""What waits to be sent to one executor."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator

from evenflow.executor.v1 import executor_pb2 as pb
from evenflow.gateway.v1 import generation_pb2 as gen
from services.kit.wire import write
from services.pacing.types import ServiceLevel

DELIVERED_INTERVAL_S = 0.25  # at most one report of reader progress in this time


class Outbox:
    """Orders submits and aborts, and merges delivered counts into one message per interval.

    Bounded without a limit of its own: a live request has at most one submit, one abort, one hold,
    one pace and one count in it.
    """

    def __init__(self, gateway_id: str, epoch: int) -> None:
        """`epoch`: of the stream, greater than those of the gateway's before it."""
        hello = pb.Hello(gateway_id=gateway_id, epoch=epoch)
        self._commands: deque[pb.StreamRequest] = deque([pb.StreamRequest(hello=hello)])
        self._holds: dict[str, bool] = {}
        self._paces: dict[str, ServiceLevel] = {}
        self._delivered: dict[str, int] = {}
        self._delivered_timer: asyncio.TimerHandle | None = None
        self._delivered_is_due = False
        self._changed = asyncio.Event()

    def submit(self, submit: pb.Submit) -> None:
        self._commands.append(pb.StreamRequest(submit=submit))
        self._changed.set()

    def abort(self, request_id: str) -> None:
        self._commands.append(pb.StreamRequest(abort=pb.Abort(request_id=request_id)))
        self._changed.set()

    def hold(self, request_id: str, held: bool) -> None:
        """Have a request held or let go; the newest word counts."""
        self._holds[request_id] = held
        self._changed.set()

    def pace(self, request_id: str, level: ServiceLevel) -> None:
        """Have a request promised something else from now on; the newest word counts."""
        self._paces[request_id] = level
        self._changed.set()

    def delivered(self, request_id: str, num_delivered: int) -> None:
        """Note how many tokens of a request were written to its client, in all."""
        self._delivered[request_id] = num_delivered
        if self._delivered_timer is None and not self._delivered_is_due:
            self._delivered_timer = asyncio.get_running_loop().call_later(
                DELIVERED_INTERVAL_S, self._delivered_due
            )

    def _delivered_due(self) -> None:
        self._delivered_timer = None
        self._delivered_is_due = True
        self._changed.set()

    def close(self) -> None:
        if self._delivered_timer is not None:
            self._delivered_timer.cancel()

    async def messages(self) -> AsyncIterator[pb.StreamRequest]:
        """Yield messages in order as they come up; never ends."""
        while True:
            self._changed.clear()
            while self._commands:
                yield self._commands.popleft()
            if self._holds:
                yield self._take_holds()
            if self._paces:
                yield self._take_paces()
            if self._delivered_is_due:
                yield self._take_delivered()
            await self._changed.wait()

    def _take_holds(self) -> pb.StreamRequest:
        holds, self._holds = self._holds, {}
        return pb.StreamRequest(
            hold=pb.Hold(
                requests=[
                    pb.RequestHold(request_id=request_id, held=held)
                    for request_id, held in holds.items()
                ]
            )
        )

    def _take_paces(self) -> pb.StreamRequest:
        paces, self._paces = self._paces, {}
        entries = [
            pb.RequestPace(request_id=request_id, service_level=write(level, gen.ServiceLevel))
            for request_id, level in paces.items()
        ]
        return pb.StreamRequest(change_pace=pb.ChangePace(requests=entries))

    def _take_delivered(self) -> pb.StreamRequest:
        counts, self._delivered = self._delivered, {}
        self._delivered_is_due = False
        message = pb.StreamRequest()
        add = message.delivered.counts.add  # a third of what it costs to copy finished entries
        for request_id, count in counts.items():
            add(request_id=request_id, num_delivered_tokens=count)
        return message
