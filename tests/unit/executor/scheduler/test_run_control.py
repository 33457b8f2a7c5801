"""Who runs, and that somebody does: parked requests, held ones, and those in their way."""

import pytest
from vllm.v1.request import RequestStatus

from lab.engine.orders import pause, resume
from services.control.admission import Admission
from services.control.prefixes.shared_prefixes import Stretch
from services.executor.scheduler import run_control
from services.executor.scheduler.recovery import share_nothing
from services.executor.scheduler.scheduler import AsyncLayerwiseScheduler
from services.placement.layer_placement import LayerPlacement
from services.placement.run.resume import ResumeWay
from services.placement.run.types import IDLE, RunPhase
from tests.unit.executor.model_free_engine import (
    ModelFreeEngine,
    make_request,
    make_scheduler,
    names_of,
)
from tests.unit.executor.simulated_ranks import BLOCK_SIZE

pytestmark = pytest.mark.filterwarnings("default")


def with_parked(num_tokens: dict[str, int]) -> ModelFreeEngine:
    """Return an engine whose requests have all been parked, and wait in this order."""
    engine = ModelFreeEngine()
    for name, length in num_tokens.items():
        engine.add(name, length)
        for _ in range(4):
            engine.step()
        engine.park(name)
    scheduler = engine.scheduler
    for name in reversed(num_tokens):
        request = scheduler.requests[name]
        scheduler.waiting.remove_request(request)
        scheduler.waiting.prepend_request(request)
    return engine


def test_the_first_of_two_that_come_back_gets_what_it_needs_before_the_second() -> None:
    engine = with_parked({"a": 14, "b": 22})
    resume(engine.scheduler, "b")
    resume(engine.scheduler, "a")

    ran = [engine.step() for _ in range(40)]

    assert all("a" in names for names in ran[-10:])


def test_one_that_came_back_too_early_is_put_back_when_nobody_can_run() -> None:
    engine = with_parked({"a": 14, "b": 22})
    load_without_regard_to_others(engine, "b")
    load_without_regard_to_others(engine, "a")
    assert engine.scheduler.block_owner.blocks.num_free == 0

    ran = [engine.step() for _ in range(12)]

    assert all("a" in names for names in ran[-6:])


@pytest.mark.parametrize("num_tokens", range(72, 81))
def test_a_prompt_larger_than_the_pool_runs_whatever_its_last_block_lacks(num_tokens: int) -> None:
    """One token short of a full block a request owns more than with it: an open one per group."""
    engine = ModelFreeEngine(num_blocks=41)  # a quarter of them holds 40 tokens
    engine.add("a", num_tokens)

    assert "a" in engine.step()


def test_room_is_made_for_one_in_line_only_while_one_more_may_run() -> None:
    engine = ModelFreeEngine()
    scheduler = engine.scheduler
    scheduler.max_num_active_reqs = 2
    for name in ("a", "b"):
        engine.add(name, 14)
        engine.step()
    engine.add("c", 14)

    in_line_when_full = scheduler.line.next_in_line()
    scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)

    assert in_line_when_full == []
    assert names_of(scheduler.line.next_in_line()) == ["c"]


@pytest.mark.parametrize("needs_whole_prompt", [False, True])
def test_a_held_request_does_not_come_in_before_its_reader_reads(needs_whole_prompt: bool) -> None:
    engine = ModelFreeEngine()
    request = engine.add("a", 14)
    request.skip_reading_prefix_cache = needs_whole_prompt  # for log-probabilities of the prompt
    pause(engine.scheduler, "a")

    ran = [engine.step() for _ in range(3)]
    resume(engine.scheduler, "a")

    assert ran == [set()] * 3
    assert engine.step() == {"a"}


def load_without_regard_to_others(engine: ModelFreeEngine, request_id: str) -> None:
    """Fill all blocks of a parked request, and do not admit it."""
    resume(engine.scheduler, request_id)
    record = engine.scheduler.records[request_id]
    while engine.kv(request_id).asleep:
        engine.scheduler.control.resumes.prepare(
            record,
            lambda kv: (ResumeWay.LOAD, LayerPlacement()),
            num_slots=0,
            num_kept_free=0,
        )
        engine.step_of_copies()


@pytest.mark.parametrize(("num_in_flight", "num_waits"), [(0, 1), (1, 0)])
def test_an_empty_step_slows_the_engine_down_only_when_no_other_is_in_flight(
    num_in_flight: int, num_waits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = ModelFreeEngine()
    request = engine.add("a", 8)
    for _ in range(3):
        engine.step()
    engine.scheduler.transfers.settle()
    pause(engine.scheduler, "a")
    waits_s: list[float] = []
    monkeypatch.setattr(run_control.time, "sleep", waits_s.append)

    request.num_in_flight_tokens = num_in_flight
    engine.scheduler.control.after_step(num_scheduled=0)

    assert len(waits_s) == num_waits


def test_a_token_that_is_sampled_and_not_yet_known_needs_room_too() -> None:
    scheduler = make_scheduler(scheduler_cls=AsyncLayerwiseScheduler)
    request = make_request("a", 8)
    scheduler.add_request(request)
    scheduler.schedule()

    need = scheduler.engine.need_of(request)
    assert (request.num_tokens, need.num_tokens) == (8, 9)


@pytest.mark.parametrize("num_steps", [0, 1])
def test_a_reset_drops_the_kv_of_a_request_that_is_coming_back(num_steps: int) -> None:
    """Without a step its loads are not under way yet; with one they are, or it is awake."""
    engine = with_parked({"a": 14})
    owner = engine.scheduler.block_owner
    resume(engine.scheduler, "a")
    engine.do_copies_end = False
    engine.scheduler.line.prepare()
    assert engine.kv("a").owned_blocks()
    for _ in range(num_steps):
        engine.run(engine.scheduler.transfers.plan_step({}), [])

    engine.scheduler.transfers.drop_all_waiting()

    assert engine.scheduler.records["a"].kv is None
    owner.check_integrity()
    engine.do_copies_end = True
    assert any("a" in engine.step() for _ in range(10))


def with_cached(*prompt: str) -> ModelFreeEngine:
    """Return an engine without requests; one with this prompt has ended."""
    engine = ModelFreeEngine(num_blocks=81)
    engine.add("first", BLOCK_SIZE * len(prompt) + 2, prompt)
    for _ in range(4):
        engine.step()
    engine.scheduler.finish_requests("first", RequestStatus.FINISHED_ABORTED)
    engine.scheduler.control.resumes.choose_way = lambda parked, engine: ResumeWay.LOAD
    return engine


def test_a_newcomer_begins_with_what_another_left_and_computes_the_rest() -> None:
    engine = with_cached("a", "b", "c")
    engine.add("second", 18, ("a", "b", "x", "y"))

    ran = [engine.step() for _ in range(6)]

    counters = engine.scheduler.block_owner.counters
    assert "second" in ran[-1]
    assert counters.num_prefix_hits(ResumeWay.LOAD) == 1
    assert counters.num_prefix_hit_tokens == 2 * BLOCK_SIZE


def test_the_last_token_of_a_prompt_is_computed_though_all_of_it_is_cached() -> None:
    engine = with_cached("a", "b", "c")
    engine.add("second", 3 * BLOCK_SIZE, ("a", "b", "c"))

    ran = [engine.step() for _ in range(6)]

    assert "second" in ran[-1]
    assert engine.scheduler.block_owner.counters.num_prefix_hit_tokens == 2 * BLOCK_SIZE


def test_all_newcomers_in_line_begin_with_what_is_cached() -> None:
    engine = with_cached("a", "b", "c")
    for name in ("new", "second", "third"):
        engine.add(name, 14, ("x",) if name == "new" else ("a", "b", "c"))

    ran = [engine.step() for _ in range(8)]

    assert ran[-1] == {"new", "second", "third"}
    assert engine.scheduler.block_owner.counters.num_prefix_hits(ResumeWay.LOAD) == 2


def test_newcomers_wait_for_what_one_of_them_computes_and_share_it() -> None:
    engine = ModelFreeEngine(num_blocks=81)
    owner = engine.scheduler.block_owner
    owner.trunks.min_tokens = BLOCK_SIZE
    for name in ("first", "second", "third"):
        engine.add(name, 14, ("a", "b", "c"))
    engine.add("other", 14, ("x", "b", "c"))

    ran = [engine.step() for _ in range(4)]

    assert ran[0] == {"first", "other"}
    assert ran[-1] == {"first", "second", "third", "other"}
    assert owner.counters.num_prefix_hit_tokens == 2 * 3 * BLOCK_SIZE
    (trunk,) = owner.trunks.all
    assert [user.request_id for user in trunk.users] == ["first", "second", "third"]


def test_nobody_waits_for_a_prompt_that_does_not_go_on() -> None:
    engine = ModelFreeEngine(num_blocks=81)
    engine.scheduler.block_owner.trunks.min_tokens = BLOCK_SIZE
    engine.scheduler.max_num_scheduled_tokens = 2 * BLOCK_SIZE
    engine.add("first", 14, ("a", "b", "c"))
    assert engine.step() == {"first"}
    second = engine.add("second", 14, ("a", "b", "c"))
    coming = engine.scheduler.engine.coming_prefix(second)
    assert coming == Stretch("first", 3)

    pause(engine.scheduler, "first")
    ran = [engine.step() for _ in range(6)]

    assert engine.scheduler.engine.coming_prefix(second) is None
    assert "second" in ran[-1]
    assert engine.kv("second").num_shared == 2


def test_where_nothing_is_shared_nobody_waits_for_it() -> None:
    engine = ModelFreeEngine(num_blocks=81)
    trunks = engine.scheduler.block_owner.trunks
    trunks.min_tokens, trunks.is_on = BLOCK_SIZE, False
    for name in ("first", "second"):
        engine.add(name, 14, ("a", "b", "c"))

    assert engine.step() == {"first", "second"}


def test_policies_know_what_of_a_newcomer_s_prompt_is_cached() -> None:
    engine = with_cached("a", "b", "c")
    engine.add("known", 14, ("a", "b", "x"))
    engine.add("unknown", 14, ("x", "b", "c"))

    scheduler, loop = engine.scheduler, engine.scheduler.loop
    admission = Admission(lambda snapshot: IDLE, scheduler.line, loop.ledger, loop.meter)
    known, unknown = admission.snapshot(0.0).requests

    assert (known.request_id, unknown.request_id) == ("known", "unknown")
    assert known.phase is unknown.phase is RunPhase.NEW
    assert known.num_host_tokens == 2 * BLOCK_SIZE
    assert unknown.num_host_tokens == 0


def test_a_prompt_that_must_be_computed_whole_finds_nothing() -> None:
    engine = with_cached("a", "b", "c")
    request = engine.add("second", 14, ("a", "b", "c"))
    request.skip_reading_prefix_cache = True

    assert engine.step() == {"second"}
    counters = engine.scheduler.block_owner.counters
    assert not any(map(counters.num_prefix_hits, ResumeWay))


def test_a_request_that_is_to_share_nothing_any_more_finds_nothing_that_it_found_before() -> None:
    engine = with_cached("a", "b", "c")
    request = engine.add("second", 14, ("a", "b", "c"))
    line = engine.scheduler.line
    assert len(line.cached_prefix(request)) == 3

    share_nothing(request)

    assert len(line.cached_prefix(request)) == 0


def test_a_prefix_that_is_cheaper_to_compute_is_sought_once() -> None:
    engine = with_cached("a", "b", "c")
    engine.scheduler.control.resumes.choose_way = lambda parked, engine: ResumeWay.RECOMPUTE
    engine.add("second", 14, ("a", "b", "c"))

    ran = [engine.step() for _ in range(3)]

    assert "second" in ran[-1]
    counters = engine.scheduler.block_owner.counters
    assert counters.num_prefix_hits(ResumeWay.RECOMPUTE) == counters.num_resumes_recompute == 1
    assert counters.num_prefix_hit_tokens == 0


@pytest.mark.parametrize("way", ResumeWay)
def test_hits_are_counted_by_their_way_apart_from_those_who_come_back(way: ResumeWay) -> None:
    engine = with_cached("a", "b", "c")
    engine.scheduler.control.resumes.choose_way = lambda parked, engine: way
    counters = engine.scheduler.block_owner.counters

    engine.add("second", 14, ("a", "b", "c"))
    ran = [engine.step() for _ in range(6)]
    assert "second" in ran[-1]
    assert {one: counters.num_prefix_hits(one) for one in ResumeWay} == {
        one: int(one is way) for one in ResumeWay
    }
    engine.park("second")
    resume(engine.scheduler, "second")
    ran = [engine.step() for _ in range(6)]

    assert "second" in ran[-1]
    assert counters.num_resumes(way) == 2
    assert counters.num_prefix_hits(way) == 1


def test_a_newcomer_whose_prefix_is_on_its_way_leaves_nothing_behind_when_it_is_aborted() -> None:
    engine = with_cached("a", "b", "c")
    engine.scheduler.block_owner.blocks.forget_left()  # the pool has it still
    engine.do_copies_end = False
    engine.add("second", 14, ("a", "b", "c"))
    assert engine.step() == set()
    assert engine.kv("second").owned_blocks()

    engine.scheduler.finish_requests("second", RequestStatus.FINISHED_ABORTED)
    engine.do_copies_end = True
    for _ in range(3):
        engine.step_of_copies()

    assert engine.scheduler.block_owner.blocks.num_free == 80
    assert engine.scheduler.block_owner.host.num_used == 0
