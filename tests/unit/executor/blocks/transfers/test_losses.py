"""Whatever goes wrong with copies: no wrong token leaves, and nothing is lost for good."""

from dataclasses import replace
from typing import Any

import pytest

from services.control.counters import Counters
from services.control.room.resumes import num_host_tokens
from services.executor.blocks.failures import (
    MAX_FAILED_SAVES,
    MAX_LOSSES,
    Fate,
    may_mirror,
    note_failed_saves,
    note_loss,
)
from services.executor.blocks.transfers.losses import STEPS_BEFORE_RETRY
from services.executor.copies.copy_engine import BACKGROUND, Copy, Direction
from services.executor.step_messages import FailureCause, StepFeedback
from services.placement.layer_placement import LayerPlacement
from services.placement.run.resume import ResumeWay
from tests.unit.executor.blocks.test_block_life import run_at_random
from tests.unit.executor.failing_copies import (
    STEPS_UNTIL_LATE,
    FailingSimulation,
    FaultRates,
)
from tests.unit.executor.resumes import resumes_of
from tests.unit.executor.simulated_ranks import BLOCK_SIZE, LateEngine
from tests.unit.records import make_record

pytestmark = pytest.mark.filterwarnings("default")

ALONE = {
    "failing": FaultRates(fails=0.03),
    "hanging": FaultRates(hangs=0.02),
    "changing": FaultRates(changes=0.04),
}
KINDS = {**ALONE, "all-together": FaultRates(fails=0.02, hangs=0.015, changes=0.02)}


def run(sim: FailingSimulation, num_steps: int = 150) -> None:
    run_at_random(sim, num_steps)
    sim.end_all()


def assert_whole(sim: FailingSimulation) -> None:
    assert sim.pool.get_num_free_blocks() == sim.num_blocks - 1
    assert sim.owner.host.num_free == sim.num_slots
    assert sim.owner.quarantine.num_blocks == sim.owner.quarantine.num_slots == 0


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(3))
def test_no_wrong_token_leaves_whatever_copies_do(seed: int, kind: str, depth: int) -> None:
    sim = FailingSimulation(seed=seed, depth=depth, num_slots=500, rates=KINDS[kind])

    run(sim)

    assert_whole(sim)
    assert sum(rank.engine.num_faults for rank in sim.ranks) > 5
    assert sim.num_lost > 0
    assert sim.num_tokens_out > 30


@pytest.mark.parametrize("kind", KINDS)
def test_class_6_rank_divergence_a_failure_on_one_rank_is_acted_on_by_all(kind: str) -> None:
    sim = FailingSimulation(
        seed=11, num_ranks=3, num_slots=500, rates=KINDS[kind], only_first_rank=True
    )

    run(sim)

    assert_whole(sim)
    assert sim.ranks[0].engine.num_faults > 0
    assert sim.ranks[1].engine.num_faults == 0
    assert sim.num_lost > 0
    tables = [rank.runner._tables._requests for rank in sim.ranks]
    assert tables[0] == tables[1] == tables[2]


def one_request(*groups: int, rates: FaultRates | None = None, **options: Any) -> FailingSimulation:
    """Return a simulation of one request of 21 tokens, 5 full blocks in each of 4 groups."""
    sim = FailingSimulation(seed=3, depth=0, rates=FaultRates(), **options)
    request = sim.admit(LayerPlacement(offloaded=frozenset(groups)))
    set_rates(sim, rates or FaultRates())
    sim.step({request.request_id: 21})
    return sim


def set_rates(sim: FailingSimulation, rates: FaultRates) -> None:
    for rank in sim.ranks[: 1 if sim.only_first_rank else None]:
        rank.engine.rates = rates


def idle(sim: FailingSimulation, num_steps: int = 2 * STEPS_UNTIL_LATE) -> None:
    for _ in range(num_steps):
        for rank in sim.ranks:
            LateEngine.progress(rank.engine)  # hung copies stay hung
        sim.settle()
        sim.step({})


def test_class_1_and_2_what_a_copy_reads_too_early_or_too_late_never_reaches_a_reader() -> None:
    """A save that hangs reads its blocks when somebody else has them: it is never loaded."""
    sim = one_request(rates=FaultRates(hangs=1.0))  # resident: blocks saved by write-through
    idle(sim)
    request = sim.kv("r1")
    assert request.num_host_blocks == 0

    set_rates(sim, FaultRates())
    sim.owner.offload(request, [0, 1])
    sim.transfers.write_through.note(request)
    for _ in range(30):
        sim.settle()
        sim.step({"r1": 1})

    assert sim.num_lost == 0
    assert request.num_host_blocks >= 5
    assert_whole_after_end(sim)


def test_class_3_a_step_whose_hooks_are_skipped_loses_the_requests_that_load_in_it() -> None:
    sim = one_request(1, 3)
    sim.settle()
    part = sim._schedule("r1", 1)
    assert part is not None
    transfers = sim.transfers.plan_step({"r1": 22})
    runner = sim.ranks[0].runner

    runner.take_in(transfers)
    runner.begin_step(transfers)
    runner.before_group(0)
    runner.after_group(0)
    runner.end_step()  # groups 1 to 3 ran as a replayed graph would run them

    assert runner.feedback().lost_requests == {"r1": FailureCause.FAILED}
    runner.watch.sweep()
    assert runner.watch.is_idle  # nothing writes staging that may be somebody else's next


def test_class_5_a_failed_save_is_not_counted_and_is_made_anew() -> None:
    sim = one_request(rates=FaultRates(fails=1.0))
    while not sim.owner.counters.num_failed_saves:
        idle(sim, 1)
    request = sim.kv("r1")
    assert request.num_host_blocks == 0

    set_rates(sim, FaultRates())
    idle(sim)

    assert request.num_host_blocks == 5
    assert sim.num_lost == 0
    assert_whole_after_end(sim)


def test_saves_of_several_requests_share_a_copy_until_one_goes_wrong() -> None:
    sim = FailingSimulation(seed=3, depth=0, num_ranks=1)
    names = [sim.admit(LayerPlacement(), num_slots=100).request_id for _ in range(3)]
    engine = sim.ranks[0].engine
    submit, saves = engine.submit, []

    def listen(copy: Copy) -> Any:
        saves.append(sorted(whose.request_id for whose in copy.identities))
        return submit(copy)

    engine.submit = listen  # type: ignore[method-assign]
    sim.step(dict.fromkeys(names, BLOCK_SIZE))
    assert saves == [names] * sim.num_groups

    set_rates(sim, FaultRates(fails=1.0))
    sim.step(dict.fromkeys(names, BLOCK_SIZE))
    set_rates(sim, FaultRates())
    while not sim.owner.counters.num_failed_saves:
        idle(sim, 1)
    saves.clear()
    idle(sim)

    assert saves
    assert all(len(whose) == 1 for whose in saves)
    assert all(sim.kv(name).num_host_blocks == 2 for name in names)
    assert_whole_after_end(sim)


def test_loads_of_several_requests_share_a_copy_per_group_until_one_goes_wrong() -> None:
    sim = FailingSimulation(seed=3, depth=0, num_ranks=1, num_blocks=100)
    everything = LayerPlacement(offloaded=frozenset(range(sim.num_groups)), num_staging=2)
    names = [sim.admit(everything, num_slots=100).request_id for _ in range(3)]
    sim.step(dict.fromkeys(names, 2 * BLOCK_SIZE))
    idle(sim)
    engine, loads = sim.ranks[0].engine, []
    submit = engine.submit

    def listen(copy: Copy) -> Any:
        if copy.direction is Direction.H2D and copy.urgency < BACKGROUND:
            whose = [(identity.request_id, *identity.uids) for identity in copy.identities]
            loads.append((copy.group, copy.urgency, whose))
            assert len(set(copy.slots)) == sum(len(one.uids) for one in copy.identities)
        return submit(copy)

    engine.submit = listen  # type: ignore[method-assign]
    sim.step(dict.fromkeys(names, 1))
    everybody = [(kv.request_id, kv.uid(0), kv.uid(1)) for kv in sim.owner.kvs]
    assert loads == [(group, float(group), everybody) for group in range(sim.num_groups)]

    set_rates(sim, FaultRates(fails=1.0))
    sim.step(dict.fromkeys(names, 1))
    assert sim.num_lost == 3  # nobody knows whose blocks they were
    set_rates(sim, FaultRates())
    sim.step(dict.fromkeys(names, 2 * BLOCK_SIZE))
    idle(sim)
    loads.clear()
    sim.step(dict.fromkeys(names, 1))

    assert loads
    assert all(len(whose) == 1 for _, _, whose in loads)
    assert_whole_after_end(sim)


def test_a_step_that_moves_nothing_needs_no_hooks_between_its_layers() -> None:
    sim = one_request()
    runner = sim.ranks[0].runner
    idle(sim)

    sim.step({"r1": 1})  # 22 tokens: no block is full
    assert not runner.has_work_between_layers
    transfers = sim.transfers.plan_step({"r1": 24})
    runner.take_in(transfers)
    runner.begin_step(transfers)  # the sixth block is
    assert runner.has_work_between_layers


def test_a_failed_save_out_of_staging_was_the_only_copy_and_the_request_begins_anew() -> None:
    sim = one_request(0, 1, 2, 3, rates=FaultRates(fails=1.0))

    assert sim.num_lost == 1
    assert sim.lengths == {"r1": 0}


def test_a_request_whose_saves_keep_failing_runs_on_without_host_copies() -> None:
    sim = one_request(rates=FaultRates(fails=1.0))
    for _ in range(40):
        sim.settle()
        sim.step({"r1": 1})

    assert not sim.kv("r1").mirrored
    assert sim.num_lost == 0
    assert sim.owner.host.num_free == sim.num_slots
    assert sim.owner.counters.num_unmirrored_requests == 1


def test_a_restore_that_fails_leaves_the_group_where_it_is_and_is_tried_again_later() -> None:
    sim = one_request(1, 3)
    idle(sim)
    request = sim.kv("r1")
    set_rates(sim, FaultRates(fails=1.0))
    assert sim.owner.restores.begin(request, 3)
    idle(sim, 4)
    assert request.groups[3].restore is None
    assert request.groups[3].offloaded
    assert not sim.owner.restores.orphans
    assert sim.owner.counters.num_failed_restores == 1

    set_rates(sim, FaultRates())
    assert not sim.owner.restores.begin(request, 3)
    idle(sim, STEPS_BEFORE_RETRY)
    assert sim.owner.restores.begin(request, 3)
    idle(sim)

    assert not request.groups[3].offloaded
    assert sim.num_lost == 0


def test_a_parked_request_whose_loads_fail_runs_from_its_staging_buffers() -> None:
    """They are not tried again in every step: it would never come back."""
    sim = one_request()
    idle(sim)
    sim.park("r1")
    set_rates(sim, FaultRates(fails=1.0))
    resumes = resumes_of(sim)

    for _ in range(6):
        resumes.prepare(
            sim.records["r1"],
            lambda _: (ResumeWay.LOAD, LayerPlacement()),
            num_slots=24,
            num_kept_free=0,
        )
        idle(sim, 2)

    assert num_host_tokens(sim.records["r1"]) == 20
    assert len(sim.kv("r1").offloaded) == 4
    assert sim.owner.counters.num_failed_restores == 4  # once for each group


def test_a_restore_that_brings_back_other_bytes_costs_the_request_its_kv() -> None:
    sim = one_request(1, 3)
    idle(sim)
    set_rates(sim, FaultRates(changes=1.0))
    assert sim.owner.restores.begin(sim.kv("r1"), 3)

    idle(sim)

    assert sim.num_lost == 1


def test_targets_of_a_hung_load_are_nobodys_until_it_has_ended() -> None:
    sim = one_request(0, 1, 2, 3)
    idle(sim)
    set_rates(sim, FaultRates(hangs=1.0))
    sim.settle()
    sim.step({"r1": 1})
    assert sim.num_lost == 1
    held = sim.owner.quarantine.num_blocks
    assert held > 0
    sim.end("r1")
    idle(sim)

    assert sim.owner.quarantine.num_blocks == held
    assert sim.pool.get_num_free_blocks() == sim.num_blocks - 1 - held
    for rank in sim.ranks:
        for ticket in list(rank.engine.hung):
            rank.engine.end_hung(ticket)
    idle(sim, 2)
    assert_whole(sim)


def test_who_got_a_block_before_its_hang_was_known_begins_anew_too() -> None:
    sim = one_request(0, 1, 2, 3)
    idle(sim)
    hung = {block.block_id for buffer in sim.kv("r1").staging for block in buffer}
    sim.end("r1")
    other = sim.admit(LayerPlacement())
    sim.step({other.request_id: 40})
    assert hung & {block.block_id for block in other.owned_blocks()}

    feedback = StepFeedback(
        step=sim.owner.orders.next_step, saved_step=0, hung_blocks=frozenset(hung)
    )

    assert sim.losses.absorb(feedback) == {other.request_id: FailureCause.HUNG}


def test_a_loss_in_a_step_before_a_request_began_anew_is_old_news() -> None:
    sim = one_request(0, 1)
    old_step = sim.owner.orders.next_step - 1
    sim.begin_anew("r1", Fate.RECOMPUTE)
    sim.step({"r1": 5})

    stale = StepFeedback(step=old_step, saved_step=0, lost_requests={"r1": FailureCause.FAILED})

    assert sim.losses.absorb(stale) == {}
    assert sim.losses.absorb(replace(stale, step=old_step + 1)) == {"r1": FailureCause.FAILED}


def test_if_losses_were_not_acted_on_a_wrong_token_would_leave(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sim = FailingSimulation(seed=0, num_slots=500, rates=ALONE["failing"])
    monkeypatch.setattr(sim, "begin_anew", lambda request_id, verdict: None)

    with pytest.raises(AssertionError, match="leaves, and is wrong"):
        run(sim)


def test_if_hung_targets_were_reused_a_wrong_token_would_leave(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def run_without_quarantine() -> None:
        for seed in range(20):
            sim = FailingSimulation(seed=seed, num_slots=500, rates=FaultRates(hangs=0.05))
            monkeypatch.setattr(
                sim.owner.quarantine, "update", lambda *targets: (frozenset(), frozenset())
            )
            run(sim)

    with pytest.raises(AssertionError, match="leaves, and is wrong"):
        run_without_quarantine()


def test_the_last_of_three_losses_ends_a_request() -> None:
    record, counters = make_record("r"), Counters()
    verdicts = [
        note_loss(record, counters, FailureCause.HUNG, may_run_again=True)
        for _ in range(MAX_LOSSES)
    ]

    assert verdicts == [Fate.RECOMPUTE, Fate.RECOMPUTE, Fate.GIVE_UP]
    assert counters == Counters(
        num_losses_hung=3, num_recomputed_requests=2, num_given_up_requests=1
    )


def test_a_request_that_cannot_run_without_copies_and_may_have_none_ends_at_once() -> None:
    verdict = note_loss(make_record("r"), Counters(), FailureCause.FAILED, may_run_again=False)

    assert verdict is Fate.GIVE_UP


def test_a_request_has_no_copies_after_the_last_failed_save_and_that_is_said_once() -> None:
    record, counters = make_record("r"), Counters()
    has_enough = [note_failed_saves(record, counters, 2) for _ in range(MAX_FAILED_SAVES + 1)]

    assert has_enough == [False] * (MAX_FAILED_SAVES - 1) + [True, False]
    assert not may_mirror(record)
    assert counters == Counters(
        num_failed_saves=2 * (MAX_FAILED_SAVES + 1), num_unmirrored_requests=1
    )


def assert_whole_after_end(sim: FailingSimulation) -> None:
    sim.end_all()
    assert_whole(sim)
