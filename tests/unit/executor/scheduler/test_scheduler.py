"""What the scheduler does itself, without an engine."""

import threading
from types import SimpleNamespace

import pytest
from structlog.testing import capture_logs
from vllm.v1.request import RequestStatus

from services.control.measures.step_timing import StepTiming
from services.executor.scheduler import reader_state
from services.executor.scheduler.reader_state import NUM_GRAMMAR_THREADS
from services.executor.scheduler.scheduler import AsyncLayerwiseScheduler
from services.executor.step_messages import HostRoom, StepFeedback
from services.pacing.cause import Cause
from tests.unit.executor.model_free_engine import ModelFreeEngine, make_scheduler

pytestmark = pytest.mark.filterwarnings("default")


def test_steps_of_a_pipeline_are_timed_from_output_to_output(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = ModelFreeEngine(scheduler_cls=AsyncLayerwiseScheduler)
    engine.add("a", 8)
    now_s = iter((1.0, 1.01, 1.02, 1.5, 2.0, 2.5))  # scheduled as fast as the pipeline takes them
    clock = SimpleNamespace(monotonic=lambda: next(now_s))
    monkeypatch.setattr(reader_state, "time", clock)
    outputs = [engine.scheduler.schedule() for _ in range(3)]

    for output in outputs:
        engine.take_in(output)

    assert engine.scheduler.step_clock.last_step_s == pytest.approx(0.5)


@pytest.mark.parametrize(("lacks_plan", "cause"), [(False, Cause.COPIES), (True, Cause.PLANNER)])
def test_a_steps_stall_is_the_copies_unless_there_is_no_plan(
    lacks_plan: bool, cause: Cause
) -> None:
    engine = ModelFreeEngine()
    engine.scheduler.loop.planning.lacks_plan = lacks_plan
    output = engine.scheduler.schedule()

    engine.take_in(output, StepFeedback(step=1, saved_step=1, timing=StepTiming(stall_s=0.25)))

    assert (engine.scheduler.stall_s, engine.scheduler.stalled_by) == (0.25, cause)


@pytest.mark.parametrize(("must_be_whole", "keeps"), [(False, True), (True, False)])
def test_a_request_whose_prompt_must_be_computed_whole_keeps_no_copies_when_preempted(
    must_be_whole: bool, keeps: bool
) -> None:
    engine = ModelFreeEngine()
    request = engine.add("a", 8)
    for _ in range(3):
        engine.step()

    request.skip_reading_prefix_cache = must_be_whole
    engine.scheduler.running.remove(request)
    engine.scheduler._preempt_request(request, 0.0)

    assert (engine.scheduler.records["a"].kv is not None) == keeps


def test_run_policies_see_the_host_slots_that_every_rank_has_and_has_pinned() -> None:
    scheduler = ModelFreeEngine(num_blocks=501, num_slots=600).scheduler
    assert scheduler.engine.shape.num_host_blocks == 600

    with capture_logs() as logs:
        scheduler._limit_host(500)
    assert scheduler.engine.shape.num_host_blocks == 500
    assert [entry["event"] for entry in logs] == ["host_room"]  # as much as the pool has

    with capture_logs() as logs:
        scheduler._limit_host(499)
    assert [entry["event"] for entry in logs] == ["host_smaller_than_pool"]

    host = scheduler.block_owner.host
    host.limit(0)
    host.num_slots = 499  # as where memory is pinned while the engine serves
    assert scheduler.engine.shape.num_host_blocks == 0
    scheduler.transfers.absorb(StepFeedback(step=0, saved_step=0, num_ready_slots=24))
    assert scheduler.engine.shape.num_host_blocks == 24


def test_a_handshake_after_a_wake_up_leaves_requests_their_slots() -> None:
    engine = ModelFreeEngine(num_slots=500)
    told = {(0, 0): HostRoom(450, None)}
    engine.scheduler.connector.set_xfer_handshake_metadata_pp_aware(told)
    engine.add("a", 64)
    for _ in range(6):
        engine.step()
    host = engine.scheduler.block_owner.host
    num_used = host.num_used
    assert num_used > 0

    engine.scheduler.connector.set_xfer_handshake_metadata_pp_aware(told)

    assert (host.num_slots, host.num_used) == (450, num_used)
    engine.step()  # and every block and slot is one thing


def test_the_last_step_before_an_engine_idles_reports_where_kv_is() -> None:
    engine = ModelFreeEngine()
    transfers = engine.scheduler.transfers
    engine.add("a", 40)
    engine.step()
    assert transfers.stats() is None  # in most steps
    engine.scheduler.finish_requests(["a"], RequestStatus.FINISHED_ABORTED)
    engine.step()

    stats = transfers.stats()

    assert stats is not None
    assert stats.data["scheduler"]["num_resident_groups"] == 0
    assert stats.data["scheduler"]["num_free_blocks"] == 41 - 1  # one is vLLM's own


def test_a_loop_s_counts_are_reported_before_its_engine_idles() -> None:
    engine = ModelFreeEngine()
    engine.add("a", 40)
    engine.step()
    assert engine.scheduler.loop_stats() is None
    engine.scheduler.finish_requests(["a"], RequestStatus.FINISHED_ABORTED)
    engine.step()

    stats = engine.scheduler.loop_stats()

    assert stats is not None
    assert stats.data["controller"]["sums"]["num_steps"] > 0


def test_a_form_that_is_slow_to_compile_keeps_no_other_waiting() -> None:
    """vLLM compiles in the manager's `executor`; with two processors it has one thread."""
    scheduler = make_scheduler()
    executor = scheduler.structured_output_manager.executor
    is_last, may_end = threading.Event(), threading.Event()

    slow = [executor.submit(may_end.wait) for _ in range(NUM_GRAMMAR_THREADS - 1)]
    executor.submit(is_last.set)

    assert is_last.wait(timeout=60)
    may_end.set()
    assert all(one.result() for one in slow)
