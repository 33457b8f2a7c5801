"""The planner client against a real gRPC server that answers well, badly, late, or never."""

from collections.abc import Iterator

import grpc
import pytest

from evenflow.planner.v1 import planner_pb2 as pb
from lab.planning.snapshots import make_request, make_snapshot
from lab.stack.ports import free_port
from lab.stack.processes import wait_until
from services.control.plans.planner import PlanAnswer
from services.executor.scheduler.planner_client import PlannerClient
from services.kit.transport import Transport
from services.placement.types import Snapshot
from tests.certificates import Authority
from tests.scripted_planner import ScriptedPlanner, keep_everything, scripted_planner


@pytest.fixture
def planner() -> Iterator[ScriptedPlanner]:
    with scripted_planner() as served:
        yield served


def snapshot(epoch: int = 1) -> Snapshot:
    return make_snapshot(make_request("a"), epoch=epoch)


def next_answer(client: PlannerClient) -> PlanAnswer:
    found: list[PlanAnswer] = []

    def came() -> bool:
        answer = client.take()
        if answer is not None:
            found.append(answer)
        return bool(found)

    wait_until(came, "an answer")
    return found[0]


def test_a_snapshot_arrives_complete_and_a_plan_comes_back(planner: ScriptedPlanner) -> None:
    client = PlannerClient(planner.address, timeout_s=60.0)

    client.post(snapshot(7))
    answer = next_answer(client)
    client.close()

    assert answer.plan is not None
    assert (answer.epoch, answer.plan.epoch, answer.failure) == (7, 7, "")
    assert [request.request_id for request in planner.snapshots[0].requests] == ["a"]
    assert planner.snapshots[0].profile.mean_tpot_s == pytest.approx(0.012)


def test_nothing_of_grpc_exists_before_the_first_snapshot() -> None:
    client = PlannerClient("127.0.0.1:1", timeout_s=1.0)

    assert client._thread is None
    assert client._channel is None
    assert client.take() is None
    client.close()


def test_of_snapshots_that_wait_only_the_newest_is_sent(planner: ScriptedPlanner) -> None:
    def slow(request: pb.Snapshot, context: grpc.ServicerContext) -> pb.Plan:
        planner.release.wait(600)
        return keep_everything(request, context)

    planner.answer = slow
    client = PlannerClient(planner.address, timeout_s=600.0)
    client.post(snapshot(1))
    wait_until(lambda: bool(planner.snapshots), "the first question")

    dropped = [client.post(snapshot(epoch)) for epoch in (2, 3, 4)]
    planner.release.set()
    epochs = [next_answer(client).epoch, next_answer(client).epoch]
    client.close()

    assert dropped == [False, True, True]
    assert epochs == [1, 4]


def test_posting_never_waits_for_a_planner_that_hangs(planner: ScriptedPlanner) -> None:
    def hang(request: pb.Snapshot, context: grpc.ServicerContext) -> pb.Plan:
        planner.release.wait(600)
        return pb.Plan()

    planner.answer = hang
    patient = PlannerClient(planner.address, timeout_s=600.0)
    for epoch in range(1, 1_001):
        patient.post(snapshot(epoch))
        assert patient.take() is None  # the first question has no answer yet
    impatient = PlannerClient(planner.address, timeout_s=0.5)
    impatient.post(snapshot())
    answer = next_answer(impatient)
    planner.release.set()
    patient.close()
    impatient.close()

    assert answer.failure == "DEADLINE_EXCEEDED"


def test_a_planner_that_is_away_and_comes_back() -> None:
    client = PlannerClient(f"127.0.0.1:{free_port()}", timeout_s=60.0)
    client.post(snapshot())

    assert next_answer(client).failure == "UNAVAILABLE"
    client.close()


@pytest.mark.parametrize(
    "garbage",
    [
        pytest.param(pb.Plan(), id="nothing"),
        pytest.param(pb.Plan(status=99), id="no-such-status"),  # type: ignore[arg-type]
        pytest.param(
            pb.Plan(
                status=pb.PLAN_STATUS_OPTIMAL,
                quality=pb.Quality(latency_s=float("nan"), window=1),
            ),
            id="not-a-number",
        ),
        pytest.param(
            pb.Plan(status=pb.PLAN_STATUS_OPTIMAL, quality=pb.Quality(window=0)), id="no-window"
        ),
        pytest.param(
            pb.Plan(status=pb.PLAN_STATUS_OPTIMAL, quality=pb.Quality(window=1, expires_after=-1)),
            id="expired-before-it-began",
        ),
    ],
)
def test_garbage_is_a_failure(planner: ScriptedPlanner, garbage: pb.Plan) -> None:
    planner.answer = lambda request, context: garbage
    client = PlannerClient(planner.address, timeout_s=60.0)

    client.post(snapshot())
    answer = next_answer(client)
    client.close()

    assert (answer.plan, answer.failure) == (None, "GARBAGE")


def test_a_refusal_is_a_failure_with_its_status(planner: ScriptedPlanner) -> None:
    def refuse(request: pb.Snapshot, context: grpc.ServicerContext) -> pb.Plan:
        context.abort(grpc.StatusCode.INVALID_ARGUMENT, "snapshot.h2d: is required")
        raise AssertionError

    planner.answer = refuse
    client = PlannerClient(planner.address, timeout_s=60.0)

    client.post(snapshot())
    answer = next_answer(client)
    client.close()

    assert answer.failure == "INVALID_ARGUMENT"


def offload_all_but_for(acting: str) -> object:
    """Answer the acting policy with the placement in force, others with everything offloaded."""

    def answer(request: pb.Snapshot, context: grpc.ServicerContext) -> pb.Plan:
        plan = keep_everything(request, context)
        if request.policy != acting:
            for placement in plan.placements:
                placement.offloaded_layers[:] = range(8)
                placement.num_prefetch_buffers = 1
        return plan

    return answer


def test_a_shadow_is_compared_and_does_not_act(planner: ScriptedPlanner) -> None:
    planner.answer = offload_all_but_for("orbitflow")  # type: ignore[assignment]
    client = PlannerClient(planner.address, timeout_s=60.0, shadow_policy="deepspeed")

    client.post(snapshot())
    acting, shadow = next_answer(client), next_answer(client)
    client.close()

    assert acting.plan is not None
    assert acting.plan.placements[0].offloaded_layers == ()
    assert shadow.plan is None
    assert shadow.shadow is not None
    assert shadow.shadow.policy == "deepspeed"
    assert shadow.shadow.gain_frac < 0.0  # copying everything takes longer than copying nothing


def resident(request: pb.Snapshot) -> pb.Plan:
    return pb.Plan(
        epoch=request.epoch,
        policy=request.policy,
        status=pb.PLAN_STATUS_OPTIMAL,
        placements=[pb.Placement(request_id=entry.request_id) for entry in request.requests],
    )


def test_several_planners_under_one_name_are_asked_in_turn() -> None:
    with scripted_planner() as first, scripted_planner() as second:
        client = PlannerClient(f"ipv4:{first.address},{second.address}", timeout_s=60.0)
        num_asked = 0
        while not (first.snapshots and second.snapshots) and num_asked < 100:
            client.post(snapshot(num_asked))
            assert next_answer(client).failure == ""
            num_asked += 1
        before = len(first.snapshots), len(second.snapshots)
        for epoch in range(4):
            client.post(snapshot(epoch))
            next_answer(client)
        client.close()

        assert (len(first.snapshots), len(second.snapshots)) == (before[0] + 2, before[1] + 2)


def test_a_planner_with_certificates_answers_whoever_has_one_too(tmp_path) -> None:
    authority = Authority(tmp_path)
    with scripted_planner(authority.issue("planner")) as planner:
        transport = Transport(certificates=authority.issue("executor"))
        known = PlannerClient(planner.address, timeout_s=60.0, transport=transport)
        stranger = PlannerClient(planner.address, timeout_s=60.0)
        known.post(snapshot(1))
        stranger.post(snapshot(2))
        answers = next_answer(known), next_answer(stranger)
        known.close()
        stranger.close()

    assert (answers[0].epoch, answers[0].failure) == (1, "")
    assert (answers[1].epoch, answers[1].failure) == (2, "UNAVAILABLE")
    assert [received.epoch for received in planner.snapshots] == [1]
