"""Asks the planner, from a thread of its own, so that the engine never waits.

The engine posts snapshots and takes answers; neither call blocks. Only the newest snapshot waits
to be sent, and few answers wait to be taken. The thread and everything of gRPC come
into being with the first snapshot: in EngineCore, long after its process was spawned.
"""

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import structlog

from services.control.options import ControllerOptions
from services.control.plans.planner import PlanAnswer
from services.control.plans.shadow import compare
from services.kit.transport import PLAIN, Transport
from services.placement.types import Plan, Snapshot

if TYPE_CHECKING:
    import grpc


log = structlog.get_logger()

ROUND_ROBIN = '{"loadBalancingConfig": [{"round_robin": {}}]}'  # over a name's addresses
MAX_ANSWERS = 8  # not yet taken; older ones are lost, and would be ignored


class PlannerClient:
    """`Planner` by gRPC."""

    def __init__(
        self,
        address: str,
        *,
        timeout_s: float,
        transport: Transport = PLAIN,
        shadow_policy: str = "",
    ) -> None:
        self._address = address
        self._transport = transport
        self._timeout_s = timeout_s
        self._shadow_policy = shadow_policy
        self._wake = threading.Condition()
        self._waiting: Snapshot | None = None
        self._answers: deque[PlanAnswer] = deque(maxlen=MAX_ANSWERS)
        self._closed = False
        self._thread: threading.Thread | None = None
        self._channel: grpc.Channel | None = None
        self._failing = False

    def post(self, snapshot: Snapshot) -> bool:
        with self._wake:
            dropped = self._waiting is not None
            self._waiting = snapshot
            if self._thread is None and not self._closed:
                self._thread = threading.Thread(target=self._run, name="planner", daemon=True)
                self._thread.start()
            self._wake.notify()
        return dropped

    def take(self) -> PlanAnswer | None:
        return self._answers.popleft() if self._answers else None

    def close(self) -> None:
        with self._wake:
            self._closed = True
            channel = self._channel
            self._wake.notify()
        if channel is not None:
            channel.close()
        if self._thread is not None:
            self._thread.join(self._timeout_s)

    def _run(self) -> None:
        ask = self._open()
        while True:
            with self._wake:
                while self._waiting is None and not self._closed:
                    self._wake.wait()
                if self._closed or self._waiting is None:
                    return
                snapshot, self._waiting = self._waiting, None
            answer = self._plan_for(snapshot, ask)
            self._answers.append(answer)
            if self._shadow_policy and answer.plan is not None:
                self._shadow(snapshot, answer.plan, ask)

    def _open(self) -> Callable[[Snapshot], Plan]:
        from evenflow.planner.v1 import planner_pb2 as pb
        from evenflow.planner.v1 import planner_pb2_grpc as pb_grpc
        from services.kit.rpc import make_blocking_channel
        from services.kit.wire import read, write

        channel = make_blocking_channel(
            self._address,
            transport=self._transport,
            options=[
                ("grpc.min_reconnect_backoff_ms", 1_000),  # for a connection to be made in
                ("grpc.service_config", ROUND_ROBIN),
            ],
        )
        with self._wake:
            self._channel = channel
        stub: pb_grpc.PlannerServiceStub = pb_grpc.PlannerServiceStub(channel)

        def ask(snapshot: Snapshot) -> Plan:
            request = pb.PlanRequest(snapshot=write(snapshot, pb.Snapshot))
            return read(Plan, stub.Plan(request, timeout=self._timeout_s).plan, "plan")

        return ask

    def _plan_for(self, snapshot: Snapshot, ask: Callable[[Snapshot], Plan]) -> PlanAnswer:
        try:
            plan = ask(snapshot)
        except Exception as error:  # noqa: BLE001  # whatever the planner does, the engine lives
            return PlanAnswer(epoch=snapshot.epoch, failure=self._note_failure(error))
        if self._failing:
            self._failing = False
            log.info("planner_answered_again")
        return PlanAnswer(epoch=snapshot.epoch, plan=plan)

    def _shadow(self, snapshot: Snapshot, acting: Plan, ask: Callable[[Snapshot], Plan]) -> None:
        try:
            other = ask(replace(snapshot, policy=self._shadow_policy))
            report = compare(snapshot, acting, other)
        except Exception as error:  # noqa: BLE001
            self._note_failure(error)
            return
        if report is None:
            return
        self._answers.append(PlanAnswer(epoch=snapshot.epoch, shadow=report))
        log.info(
            "shadow_plan",
            epoch=snapshot.epoch,
            policy=report.policy,
            acting_step_s=report.acting_step_s,
            shadow_step_s=report.shadow_step_s,
            gain_frac=report.gain_frac,
        )

    def _note_failure(self, error: Exception) -> str:
        """Log the first failure after a success; return its kind."""
        code = getattr(error, "code", None)
        kind = str(code().name) if callable(code) else "GARBAGE"
        if not self._failing and not self._closed:
            self._failing = True
            log.warning("planner_failed", kind=kind, error=str(error)[:500])
        return kind


def planner_of(options: ControllerOptions) -> PlannerClient | None:
    """Return which planner is asked; None if there is none: the capacity guard acts alone."""
    if not options.planner_address:
        return None
    return PlannerClient(
        options.planner_address,
        transport=options.transport,
        timeout_s=options.plan_timeout_s,
        shadow_policy=options.shadow_policy,
    )
