"""Every metric of the engine moves when the thing that it names happens; none lacks its scene.

One engine in this process. Its reports come with every step, and copies end when a scene lets them.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from lab.engine.link import h2d_link
from lab.engine.orders import forget_free_blocks, park, pause, place, resume
from lab.engine.step_runner import Arrival, EngineCase, Hook, StepRunner, make_prompt
from lab.engine.workloads import every, fixed, together
from services.control.options import ControllerOptions
from services.control.types import Trigger
from services.executor.blocks.transfers import transfers
from services.executor.copies.device.cpu_device import LinkModel
from services.executor.kv_options import GuardMode, KVOptions
from services.executor.request_tag import KeptTokens, ToolTurn, with_kept, with_tool_turn
from services.executor.scheduler import scheduler as scheduler_module
from services.placement.layer_placement import ALL_RESIDENT, LayerPlacement
from services.placement.run.resume import ResumeWay
from tests.exact.anchored_agents import ANCHOR_METRICS
from tests.exact.cached_prefixes import room_for
from tests.exact.controller_scenes import *  # noqa: F403
from tests.exact.failing_engine import FaultRates
from tests.exact.failure_cases import run_with_faults
from tests.exact.scenes import SEEN, at, copies_complete, registered, sees
from tests.exact.watch_scenes import *  # noqa: F403
from tests.link_gate import LinkGate

# Engines run in this process: their warnings are not ours to fail on.
pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.timeout(900)]

NUM_GROUPS = 8
CASE = EngineCase(
    num_blocks=168,
    kv=KVOptions(
        host_bytes=64 << 20,
        restore_when_free_frac=0.02,
        integrity_guard=GuardMode.ALL,
        poison=True,
        max_pause_s=3_600.0,  # no hold ends by itself
    ),
    controller=ControllerOptions(plan_timeout_s=30.0, seed=7),
)
MANY = 1 << 20  # blocks that a step may copy to the host


@pytest.fixture(scope="module")
def runner() -> Iterator[StepRunner]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transfers, "STEPS_PER_STATS", 1)
        patch.setattr(scheduler_module, "STEPS_PER_STATS", 1)
        runner = StepRunner(CASE)
        budget(MANY)(runner.scheduler)
        yield runner
        runner.close()


def budget(num_blocks: int) -> Callable[[Any], None]:
    """Return an act that lets each step copy so many blocks of resident layers to the host."""

    def act(scheduler: Any) -> None:
        scheduler.transfers.write_through._budget = lambda num_under_way: num_blocks

    return act


def one(name: str = "one", *, prompt: int = 200, output: int = 30, step: int = 0) -> Arrival:
    tokens = make_prompt(prompt, seed=sum(name.encode()))
    return Arrival(request_id=name, prompt=tokens, num_output_tokens=output, step=step)


# -- blocks and layers ---------------------------------------------------------------------------


@sees(
    "kv_num_resident_groups",
    "kv_num_free_blocks",
    "kv_num_lagging_blocks",
    "kv_num_mirrored_blocks",
    "kv_num_host_blocks",
    "kv_d2h_bytes",
    "kv_d2h_busy_s",
    "kv_num_published_columns",
    "kv_num_cached_columns",
    "kv_num_left_blocks",
)
def test_full_blocks_go_to_the_host(runner: StepRunner, patch: pytest.MonkeyPatch) -> None:
    budget(0)(runner.scheduler)
    runner.run([one()], hook=together(at(10, budget(MANY)), copies_complete))


@sees(
    "kv_num_offloaded_groups",
    "kv_num_staging_blocks",
    "kv_num_sealed_blocks",
    "kv_num_loads",
    "kv_h2d_bytes",
    "kv_h2d_busy_s",
    "kv_num_checked_blocks",
    "kv_step_stall_s_sum",
    "kv_step_stall_s_count",
    "kv_num_restored_groups",
)
def test_layers_leave_the_pool_and_come_back(runner: StepRunner, patch: pytest.MonkeyPatch) -> None:
    away = LayerPlacement(offloaded=every(2, NUM_GROUPS), num_staging=2)
    leave = at(6, lambda scheduler: place(scheduler, "one", away))
    come_back = at(10, lambda scheduler: place(scheduler, "one", ALL_RESIDENT))
    with h2d_link(LinkModel(latency_s=0.1)):  # so that layers wait, whatever else the machine does
        runner.run([one()], hook=together(leave, come_back, copies_complete))


@sees("kv_num_reclaimed_groups")
def test_a_newcomer_takes_layers_of_a_held_request(
    runner: StepRunner, patch: pytest.MonkeyPatch
) -> None:
    """The pool holds little more than one of them."""
    workload = [one("held", prompt=400), one("other", prompt=400, step=12)]

    def go_on(scheduler: Any, step: int) -> None:
        if step > 12 and "other" not in scheduler.requests:
            resume(scheduler, "held")

    stop = at(10, lambda scheduler: pause(scheduler, "held"))
    runner.run(workload, hook=together(stop, go_on, copies_complete))


# -- who runs ------------------------------------------------------------------------------------


@sees(
    "kv_num_pauses",
    "kv_num_paused_requests",
    "kv_num_resumes_in_place",
    "controller_triggers{held}",
    "controller_triggers{resumed}",
)
def test_a_request_is_paused_and_goes_on(runner: StepRunner, patch: pytest.MonkeyPatch) -> None:
    stop, go_on = at(5, lambda s: pause(s, "one")), at(9, lambda s: resume(s, "one"))
    runner.run([one()], hook=together(stop, go_on))


@sees("kv_num_overdue_holds")
def test_a_hold_that_lasts_too_long_ends(runner: StepRunner, patch: pytest.MonkeyPatch) -> None:
    stop = at(5, lambda scheduler: pause(scheduler, "one"))
    end = at(9, lambda scheduler: patch.setattr(scheduler.control, "_max_hold_s", 0.0))
    runner.run([one()], hook=together(stop, end))


def away_and_back(
    runner: StepRunner, patch: pytest.MonkeyPatch, way: ResumeWay, *hooks: Hook
) -> None:
    """Park a request with complete host copies, and let it come back in a way."""
    patch.setattr(runner.scheduler.control.resumes, "choose_way", lambda *_: way)
    leave, come_back = at(10, lambda s: park(s, "one")), at(15, lambda s: resume(s, "one"))
    runner.run([one()], hook=together(leave, *hooks, at(15, forget_free_blocks), come_back))


@sees(
    "kv_num_parks",
    "kv_num_parked_requests",
    "kv_num_resumes_load",
    "kv_num_loaded_blocks",
    "kv_num_restoring_groups",
    "controller_triggers{preempted}",
)
def test_a_parked_request_is_loaded(runner: StepRunner, patch: pytest.MonkeyPatch) -> None:
    """The link carries nothing until reports have said that layers are on their way."""
    gates: list[LinkGate] = []
    shut = at(14, lambda scheduler: gates.append(LinkGate(patch)))

    def hook(scheduler: Any, step: int) -> None:
        if step < 14:
            copies_complete(scheduler, step)
        if step == 20:
            gates[0].open()

    away_and_back(runner, patch, ResumeWay.LOAD, hook, shut)


@sees("kv_num_resumes_recompute")
def test_a_parked_request_is_computed_anew(runner: StepRunner, patch: pytest.MonkeyPatch) -> None:
    away_and_back(runner, patch, ResumeWay.RECOMPUTE, copies_complete)


@sees("kv_num_resumes_host_resident")
def test_a_parked_request_runs_from_the_host(runner: StepRunner, patch: pytest.MonkeyPatch) -> None:
    away_and_back(runner, patch, ResumeWay.HOST_RESIDENT, copies_complete)


@sees("kv_num_dropped_copies")
def test_a_newcomer_takes_a_parked_ones_host_room(
    runner: StepRunner, patch: pytest.MonkeyPatch
) -> None:
    leave, come_back = at(10, lambda s: park(s, "one")), at(20, lambda s: resume(s, "one"))
    with room_for(runner, 10):
        workload = [one(), one("other", prompt=250, step=14)]
        runner.run(workload, hook=together(leave, come_back, copies_complete))


# -- the prefix cache ----------------------------------------------------------------------------


def begin_alike(
    runner: StepRunner, patch: pytest.MonkeyPatch, way: ResumeWay, *, first_output: int = 30
) -> None:
    """Let a request begin with the prompt of an earlier one, which may still run."""
    patch.setattr(runner.scheduler.control.resumes, "choose_way", lambda *_: way)
    first = one(prompt=256, output=first_output)
    prompt = [*first.prompt, *make_prompt(40, seed=3)]
    second = Arrival(request_id="second", prompt=prompt, num_output_tokens=5, step=40)
    runner.run([first, second], hook=copies_complete)


@sees("kv_num_prefix_hits_load", "kv_num_prefix_hit_tokens", "kv_num_found_blocks")
def test_a_cached_prefix_is_loaded(runner: StepRunner, patch: pytest.MonkeyPatch) -> None:
    begin_alike(runner, patch, ResumeWay.LOAD)


@sees("kv_num_prefix_hits_recompute")
def test_a_cached_prefix_is_computed_anew(runner: StepRunner, patch: pytest.MonkeyPatch) -> None:
    begin_alike(runner, patch, ResumeWay.RECOMPUTE)


@sees("kv_num_prefix_hits_host_resident")
def test_a_cached_prefix_is_read_from_the_host(
    runner: StepRunner, patch: pytest.MonkeyPatch
) -> None:
    begin_alike(runner, patch, ResumeWay.HOST_RESIDENT)


def kept(arrival: Arrival, *, for_s: float) -> Arrival:
    """Return a request all of whose KV is to be kept."""
    hint = with_kept(None, KeptTokens("", "session", [(0, for_s)]))
    return replace(arrival, sampling={"extra_args": hint})


def release(scheduler: Any) -> None:
    assert scheduler.release_session("", "session")


@sees("kv_num_retained_columns", "kv_num_retentions_accepted")
def test_a_session_keeps_its_requests_columns_until_it_is_released(
    runner: StepRunner, patch: pytest.MonkeyPatch
) -> None:
    later = one("later", step=40)
    runner.run([kept(one(), for_s=3_600.0), later], hook=together(at(45, release), copies_complete))


@sees("kv_num_retentions_clipped")
def test_a_hint_for_too_long_is_clipped(runner: StepRunner, patch: pytest.MonkeyPatch) -> None:
    runner.run([kept(one(), for_s=1e9)], hook=copies_complete)


@sees("kv_num_retentions_deferred")
def test_what_is_not_copied_is_kept_later(runner: StepRunner, patch: pytest.MonkeyPatch) -> None:
    budget(0)(runner.scheduler)
    workload = [kept(one(), for_s=3_600.0), one("later", step=40)]
    runner.run(workload, hook=together(at(42, budget(MANY)), at(45, release), copies_complete))


@sees("kv_num_late_blocks")
def test_what_is_kept_and_has_no_copy_is_copied_when_its_request_has_ended(
    runner: StepRunner, patch: pytest.MonkeyPatch
) -> None:
    budget(0)(runner.scheduler)
    workload = [kept(one(), for_s=3_600.0), one("later", step=80)]
    runner.run(workload, hook=together(at(50, budget(MANY)), at(90, release), copies_complete))


@sees("kv_num_retentions_rejected")
def test_without_a_prefix_cache_nothing_is_kept(
    runner: StepRunner, patch: pytest.MonkeyPatch
) -> None:
    none = replace(CASE.kv, prefix_caching=False)
    patch.setattr(runner.scheduler.retaining, "_options", none)
    runner.run([kept(one(), for_s=3_600.0)], hook=copies_complete)


@sees("kv_num_evicted_retained_columns")
def test_what_is_kept_makes_room_when_there_is_no_other(
    runner: StepRunner, patch: pytest.MonkeyPatch
) -> None:
    with room_for(runner, 8):  # of the first one's seven columns some must go
        workload = [kept(one(), for_s=3_600.0), one("other", step=40)]
        runner.run(workload, hook=together(at(60, release), copies_complete))


def calls_a_tool(arrival: Arrival) -> Arrival:
    """Return a request whose KV is kept once the front says that it ends with a tool call."""
    turn = with_tool_turn(None, ToolTurn("", "session", 0))
    return replace(arrival, sampling={"extra_args": turn})


def called(name: str) -> Callable[[Any], None]:
    return lambda scheduler: scheduler.keep_turns({name: 3_600.0})


@sees("kv_num_awaited_columns", "kv_num_kept_tool_turns")
def test_what_a_turn_with_a_tool_call_leaves_is_kept_until_its_session_ends(
    runner: StepRunner, patch: pytest.MonkeyPatch
) -> None:
    workload = [calls_a_tool(one()), one("later", step=40)]
    runner.run(workload, hook=together(at(42, called("one")), at(45, release), copies_complete))


def others_have_had_its_blocks(scheduler: Any) -> None:
    forget_free_blocks(scheduler)
    called("one")(scheduler)


@sees("kv_num_returned_blocks")
def test_what_waits_for_a_tool_is_brought_back_to_the_pool(
    runner: StepRunner, patch: pytest.MonkeyPatch
) -> None:
    workload = [calls_a_tool(one()), one("later", step=80)]
    hook = together(at(42, others_have_had_its_blocks), at(78, release), copies_complete)
    runner.run(workload, hook=hook)


@sees("kv_num_evicted_awaited_columns")
def test_what_waits_for_a_tool_makes_room_when_there_is_no_other(
    runner: StepRunner, patch: pytest.MonkeyPatch
) -> None:
    with room_for(runner, 8):  # of the first one's seven columns some must go
        workload = [calls_a_tool(one()), one("other", step=40)]
        hook = together(at(10, called("one")), at(60, release), copies_complete)
        runner.run(workload, hook=hook)


@sees("kv_num_trunks", "kv_num_shared_blocks", "kv_num_trunk_joins", "kv_num_trunk_splits")
def test_two_requests_share_a_prefix_in_the_pool(
    runner: StepRunner, patch: pytest.MonkeyPatch
) -> None:
    begin_alike(runner, patch, ResumeWay.LOAD, first_output=60)


@sees("kv_num_duplicate_blocks")
def test_two_requests_compute_the_same_at_once(
    runner: StepRunner, patch: pytest.MonkeyPatch
) -> None:
    first = one(prompt=256)
    runner.run([first, replace(first, request_id="twin")], hook=copies_complete)


@sees("kv_num_evicted_columns")
def test_cached_blocks_make_room_for_others(runner: StepRunner, patch: pytest.MonkeyPatch) -> None:
    with room_for(runner, 12):
        runner.run([one(prompt=256), one("other", prompt=255, step=40)], hook=copies_complete)


# -- copies that go wrong ------------------------------------------------------------------------


def go_wrong(runner: StepRunner, *hooks: Hook, **rates: float) -> None:
    """Run a request whose odd layers are on the host, or as the hooks say."""
    hook = together(*hooks) if hooks else fixed({"one": every(2, NUM_GROUPS)})
    run_with_faults(runner, FaultRates(**rates), hook=hook, workload=[one(output=60)])


@pytest.mark.logs("kv_copy_failed", "kv_lost")
@sees(
    "kv_num_failed_copies",
    "kv_num_losses_failed",
    "kv_num_recomputed_requests",
    "kv_num_given_up_requests",
)
def test_loads_fail(runner: StepRunner, patch: pytest.MonkeyPatch) -> None:
    go_wrong(runner, load_fails=1.0)


@sees("kv_num_hung_copies", "kv_num_losses_hung", "kv_num_quarantined_blocks")
def test_loads_hang(runner: StepRunner, patch: pytest.MonkeyPatch) -> None:
    go_wrong(runner, load_hangs=0.05)


@pytest.mark.logs("kv_came_back_wrong")
@sees(
    "kv_num_corrupt_copies",
    "kv_num_losses_corrupt",
)
def test_loads_bring_other_bytes(runner: StepRunner, patch: pytest.MonkeyPatch) -> None:
    go_wrong(runner, load_changes=0.05)


@pytest.mark.logs("kv_request_unmirrored")
@sees("kv_num_failed_saves", "kv_num_unmirrored_requests")
def test_saves_fail(runner: StepRunner, patch: pytest.MonkeyPatch) -> None:
    go_wrong(runner, copies_complete, save_fails=1.0)


@sees("kv_num_quarantined_slots")
def test_saves_hang(runner: StepRunner, patch: pytest.MonkeyPatch) -> None:
    go_wrong(runner, lambda scheduler, step: None, save_hangs=0.2)


@sees("kv_num_failed_restores")
def test_a_restore_fails(runner: StepRunner, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(runner.scheduler.control.resumes, "choose_way", lambda *_: ResumeWay.LOAD)
    leave, come_back = at(10, lambda s: park(s, "one")), at(15, lambda s: resume(s, "one"))
    others = at(15, forget_free_blocks)
    go_wrong(runner, leave, others, come_back, copies_complete, load_fails=0.1)


# -- none is forgotten ---------------------------------------------------------------------------


def test_every_metric_has_a_scene_in_which_it_moves(runner: StepRunner) -> None:
    """One without a scene is never seen to move: write the scene, or delete the metric."""
    seen = SEEN | ANCHOR_METRICS  # in `anchored_agents.py`
    assert {name for name in seen if "{" not in name} == registered()


def test_every_reason_to_plan_has_a_scene_in_which_it_is_counted() -> None:
    uncounted = {Trigger.STEP}  # as often as steps
    assert {f"controller_triggers{{{t.value}}}" for t in set(Trigger) - uncounted} <= SEEN
