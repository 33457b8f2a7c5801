"""A planner by gRPC that answers as a test says: soundly, late, nonsensically, or never."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import grpc

from evenflow.planner.v1 import planner_pb2 as pb
from evenflow.planner.v1 import planner_pb2_grpc as pb_grpc
from services.kit.tls import server_credentials
from services.kit.transport import Certificates

Answer = Callable[[pb.Snapshot, grpc.ServicerContext], pb.Plan]


def keep_everything(snapshot: pb.Snapshot, context: grpc.ServicerContext) -> pb.Plan:
    """Answer with the placement in force; nobody is paused."""
    return pb.Plan(
        epoch=snapshot.epoch,
        policy=snapshot.policy,
        status=pb.PLAN_STATUS_FEASIBLE,
        placements=[
            pb.Placement(
                request_id=request.request_id,
                offloaded_layers=request.offloaded_layers,
                num_prefetch_buffers=request.num_prefetch_buffers,
            )
            for request in snapshot.requests
        ],
        quality=pb.Quality(window=4, expires_after=64, serve_all=pb.PLAN_STATUS_FEASIBLE),
    )


class ScriptedPlanner(pb_grpc.PlannerServiceServicer):
    """Calls `answer` for each snapshot; `release` ends answers that wait for it."""

    def __init__(self) -> None:
        self.answer: Answer = keep_everything
        self.snapshots: list[pb.Snapshot] = []
        self.release = threading.Event()
        self.address = ""

    def Plan(self, request: pb.PlanRequest, context: grpc.ServicerContext) -> pb.PlanResponse:  # noqa: N802
        self.snapshots.append(request.snapshot)
        return pb.PlanResponse(plan=self.answer(request.snapshot, context))


@contextmanager
def scripted_planner(certificates: Certificates | None = None) -> Iterator[ScriptedPlanner]:
    """Serve on a free port until the block ends."""
    planner = ScriptedPlanner()
    with ThreadPoolExecutor(max_workers=4) as pool:
        server = grpc.server(pool)
        pb_grpc.add_PlannerServiceServicer_to_server(planner, server)
        if certificates is None:
            port = server.add_insecure_port("127.0.0.1:0")
        else:
            port = server.add_secure_port("127.0.0.1:0", server_credentials(certificates))
        planner.address = f"127.0.0.1:{port}"
        server.start()
        try:
            yield planner
        finally:
            planner.release.set()
            server.stop(grace=None).wait()
