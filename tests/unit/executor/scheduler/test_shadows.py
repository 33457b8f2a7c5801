"""What a step computes anew: whose prefix, beside how many other tokens, and what it is told of."""

from types import SimpleNamespace

import pytest
from vllm.multimodal.inputs import PlaceholderRange
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import RequestStatus

from lab.engine.orders import Order, park, pause, resume
from lab.slow_device.emulated_device import num_tokens_of
from services.control.options import ControllerOptions
from services.control.types import ScheduledStep
from services.executor.scheduler.ellm import EllmScheduler
from services.executor.scheduler.shadows import SUFFIX, Shadows
from services.executor.scheduler.vllm_scheduler import NEVER
from services.placement.run.types import RunDecision, RunSnapshot
from services.placement.types import RequestId
from tests.unit.executor.model_free_engine import ModelFreeEngine

pytestmark = pytest.mark.filterwarnings("default")

NUM_TOKENS = 21  # of prompts: 5 full blocks of 4, and an open one


class Wanted(dict[str, int]):
    """A policy under which all requests run but one: prefixes in blocks, by request."""

    away = ""  # who is sent to the queue

    def __call__(self, snapshot: RunSnapshot) -> RunDecision:
        names = [request.request_id for request in snapshot.requests]
        return RunDecision(
            run=tuple(name for name in names if name != self.away),
            park=frozenset(name for name in names if name == self.away),
            offloads=True,
            uncached_blocks={RequestId(name): number for name, number in self.items()},
        )


def make_engine(*names: str) -> tuple[ModelFreeEngine, Wanted]:
    """Return an engine whose requests decode, with complete host copies, and what it obeys."""
    engine = ModelFreeEngine(num_blocks=401, scheduler_cls=EllmScheduler)
    wanted = Wanted()
    engine.scheduler.set_up(ControllerOptions(), None, wanted)
    for name in names:
        engine.add(name, NUM_TOKENS)
    for _ in range(3):
        engine.step()
    assert all(engine.kv(name).num_host_blocks == 5 for name in names)
    return engine, wanted


def schedule(engine: ModelFreeEngine) -> SchedulerOutput:
    """Return the next step, by a new decision. It does not run."""
    engine.scheduler.loop.changed()
    return engine.scheduler.schedule()


def step(engine: ModelFreeEngine) -> set[str]:
    engine.scheduler.loop.changed()
    return engine.step()


def counted(engine: ModelFreeEngine) -> ScheduledStep:
    """Return the newest step, as it is measured."""
    return engine.scheduler.loop.meter._in_flight[-1][0]


def test_a_prefix_is_a_row_of_its_own_over_the_scratch_that_samples_nothing() -> None:
    engine, wanted = make_engine("a", "b")
    wanted["a"] = 3

    output = schedule(engine)

    assert output.num_scheduled_tokens == {"a": 1, "b": 1, "a" + SUFFIX: 12}
    assert output.total_num_scheduled_tokens == 14
    (row,) = output.scheduled_new_reqs
    assert (row.req_id, row.num_computed_tokens) == ("a" + SUFFIX, 0)
    # The first 12 of a prompt that is longer: nothing comes after them.
    assert row.prompt_token_ids == [*engine.scheduler.requests["a"].all_token_ids[:12], 0]
    scratch = [block.block_id for block in engine.kv("a").uncached]
    assert row.block_ids == (scratch,) * 4
    for group in engine.kv("a").groups:
        assert [block.block_id for block in group.row[:3]] == scratch


def test_a_row_lives_for_one_step() -> None:
    engine, wanted = make_engine("a")
    wanted["a"] = 3
    first = schedule(engine)
    engine.take_in(first)
    wanted.clear()
    second = schedule(engine)
    engine.take_in(second)
    third = schedule(engine)

    assert first.finished_req_ids == set()
    assert second.finished_req_ids == third.finished_req_ids == {"a" + SUFFIX}
    assert second.num_scheduled_tokens["a" + SUFFIX] == 12
    assert third.num_scheduled_tokens == {"a": 1}


def test_a_step_is_measured_with_what_it_computes_anew() -> None:
    engine, wanted = make_engine("a", "b")
    without = counted_step(engine)
    wanted |= {"a": 3, "b": 2}
    beside = counted_step(engine)

    # A step later both have a token more. 12 tokens attend to 78 pairs, 8 to 36.
    assert (without.num_tokens, without.num_prefill_tokens) == (2, 0)
    assert beside.num_tokens == 2 + 20
    assert beside.num_context_tokens == without.num_context_tokens + 2 + 20
    assert (beside.num_prefill_tokens, beside.num_prefill_pairs) == (20, 78 + 36)


def counted_step(engine: ModelFreeEngine) -> ScheduledStep:
    output = schedule(engine)
    step = counted(engine)
    engine.take_in(output)
    return step


def test_the_emulated_device_takes_its_time_for_what_a_step_computes_anew() -> None:
    engine, wanted = make_engine("a", "b")
    wanted |= {"a": 3, "b": 2}

    # Both attend to the 23 tokens they have with the new one, beside the prefixes of 12 and 8.
    assert num_tokens_of(schedule(engine)) == (2 + 20, 2 * 24 + 20)


def test_every_layer_finds_its_own_kv_while_prefixes_change() -> None:
    engine, wanted = make_engine("a", "b")
    for lengths in ({"a": 5}, {"a": 5, "b": 3}, {"a": 1, "b": 4}, {"b": 2}, {"a": 3}, {}, {}):
        wanted.clear()
        wanted.update(lengths)
        step(engine)  # the rank asserts what its layers read

    assert not engine.scheduler.block_owner.uncached.kvs
    assert engine.scheduler.shadows.num_rows == 2 + 2 * 4


def test_scratch_is_given_back_only_when_a_step_has_computed_what_is_kept_again() -> None:
    engine, wanted = make_engine("a")
    wanted["a"] = 3
    step(engine)
    kv, request = engine.kv("a"), engine.scheduler.requests["a"]
    wanted.clear()

    request.next_decode_eligible_step = NEVER  # the step that should do so leaves it out
    for _ in range(2):
        assert step(engine) == set()
        assert len(kv.retiring) == 3
    request.next_decode_eligible_step = 0
    assert step(engine) == {"a", "a" + SUFFIX}
    assert step(engine) == {"a"}

    assert not kv.retiring
    assert engine.scheduler.block_owner.uncached.num_kept_blocks == 3 * 4


def test_every_request_that_runs_keeps_room_for_a_token() -> None:
    engine, wanted = make_engine("a", "b")
    scheduler = engine.scheduler
    # 16 tokens are left beside one for each: 4 blocks of the 10 that are wanted.
    scheduler.max_num_scheduled_tokens = scheduler.max_num_active_reqs + 16
    scheduler.shadows = Shadows(scheduler, scheduler.block_owner)
    wanted |= {"a": 5, "b": 5}

    output = schedule(engine)

    assert output.num_scheduled_tokens == {"a": 1, "b": 1, "a" + SUFFIX: 16}
    assert scheduler.max_num_scheduled_tokens == scheduler.max_num_active_reqs


def test_prompts_get_what_prefixes_leave_of_a_step() -> None:
    engine, wanted = make_engine("a")
    scheduler = engine.scheduler
    scheduler.max_num_scheduled_tokens = scheduler.max_num_active_reqs + 16
    scheduler.shadows = Shadows(scheduler, scheduler.block_owner)
    most, wanted["a"] = scheduler.max_num_scheduled_tokens, 2
    engine.add("long", 300)

    output = schedule(engine)

    assert output.num_scheduled_tokens == {"a": 1, "long": most - 1 - 8, "a" + SUFFIX: 8}


def test_only_what_decodes_and_runs_is_dropped() -> None:
    engine, wanted = make_engine("paused", "image")
    image = SimpleNamespace(mm_position=PlaceholderRange(offset=0, length=1))
    engine.scheduler.requests["image"].mm_features = [image]  # its tokens do not say all
    pause(engine.scheduler, "paused")
    engine.add("prompt", NUM_TOKENS)
    wanted |= {"paused": 3, "image": 3, "prompt": 3}

    assert schedule(engine).num_scheduled_tokens == {"image": 1, "prompt": NUM_TOKENS}
    assert not engine.scheduler.block_owner.uncached.kvs


@pytest.mark.parametrize("way", [pause, park, None])
@pytest.mark.parametrize("lengths", [{"a": 3, "b": 2}, {"a": 1, "b": 2}])
def test_a_request_that_is_interrupted_goes_on_with_its_own_kv(
    way: Order | None, lengths: dict[str, int]
) -> None:
    engine, wanted = make_engine("a", "b")
    scheduler, kv = engine.scheduler, engine.kv("a")
    wanted |= {"a": 3, "b": 2}
    step(engine)
    wanted |= lengths  # at its last chance before the interruption

    if way is None:  # a run policy's order
        wanted.away = "a"
    else:
        way(scheduler, "a")
    assert "a" not in step(engine)
    is_paused = way is pause
    assert (len(kv.uncached), engine.kv("a").num_recomputed) == (3, 3 if is_paused else 0)
    assert (kv in scheduler.block_owner.uncached.kvs) == is_paused
    resume(scheduler, "a")
    wanted.away = ""
    for _ in range(6):
        step(engine)  # the rank asserts what its layers read

    assert engine.kv("a").num_recomputed == lengths["a"]
    assert scheduler.requests["a"].num_output_tokens >= 6
    for name in ("a", "b"):
        scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
    step(engine)
    assert not scheduler.block_owner.uncached.kvs
    assert scheduler.block_owner.pool.get_num_free_blocks() == 400
