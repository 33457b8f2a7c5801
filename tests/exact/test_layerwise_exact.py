"""Whatever is offloaded, moved or aborted: tokens identical to stock vLLM.

Nine engines cover every pair of options that `tests/exact/product.py` contains: a commit runs two
of them and one that it draws, a night all. Pools hold 40 % of what full residency takes.
Copies take their time before any byte appears, and what is not yet there, or no longer owned, is
NaN.
"""

import itertools
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import pytest

from lab.engine.link import h2d_link
from lab.engine.orders import park
from lab.engine.step_runner import (
    Arrival,
    EngineCase,
    Outcome,
    StepRunner,
    first_difference,
    make_prompt,
    stock,
)
from lab.engine.workloads import (
    LONGEST,
    at_distances,
    churn,
    first_distances,
    fixed,
    holds,
    long_prompt,
    mixed,
    peak_blocks,
    sampled,
    stopping,
    together,
    with_aborts,
)
from services.executor.blocks.host_pool import SlotPromise
from services.executor.blocks.residency import RequestKV
from services.executor.copies.device.cpu_device import LinkModel
from services.placement.run.resume import ResumeWay
from tests.exact import faults, product
from tests.exact.aborts import STATES, AbortsByState
from tests.exact.cached_prefixes import (  # noqa: F401 - their tests run on this module's engines
    expected_turns,
    hits,
    second_stays_on_the_host,
    test_a_hash_without_what_is_before_a_block_is_noticed,
    test_a_reset_lets_nobody_begin_with_what_was_there,
    test_aborts_while_a_hit_is_loaded_leave_the_others_exact,
    test_blocks_that_are_found_although_others_have_had_them_are_noticed,
    test_by_measured_rates_the_tokens_are_exact_and_most_of_the_prompts_are_not_computed,
    test_columns_that_are_evicted_while_somebody_uses_them_are_noticed,
    test_columns_that_are_found_before_they_are_copied_are_noticed,
    test_every_turn_begins_with_the_last_ones_blocks_in_all_ways_while_layers_move,
    test_hints_change_what_is_evicted_and_no_token,
    test_the_guard_looks_at_blocks_that_nobody_copied,
    test_what_ended_requests_leave_in_the_pool_is_taken_as_it_is,
    test_with_little_room_on_the_host_columns_are_evicted_and_their_slots_used_again,
    turns,
)
from tests.exact.cases import (
    EVERY_COMMIT,
    HALVES,
    LAYERS,
    SCARCE_FRAC,
    STANDING,
    num_groups,
    pool_share,
)
from tests.exact.draw import draw
from tests.exact.evidence import MIN_RANDOM_CHANGES, assert_exact, assert_pool_is_whole
from tests.exact.late_copies import (  # noqa: F401 - as above
    ended_without_copies,
    test_a_late_copy_that_was_not_made_is_noticed,
    test_what_had_no_copy_when_its_turn_ended_comes_back_from_the_host,
)
from tests.exact.reference import RECIPES, answers_to, reference
from tests.exact.shared_in_pool import (  # noqa: F401 - as above
    test_a_burst_shares_its_prefix_whatever_room_the_host_has,
    test_what_is_wrong_without_a_host_is_noticed,
    test_without_a_host_one_after_the_other_begins_with_what_the_pool_still_has,
)
from tests.exact.shared_prefixes import (  # noqa: F401 - as above
    expected_agents,
    shared_at_once,
    test_a_broken_trunk_is_noticed,
    test_aborts_of_first_and_last_users_leave_the_others_exact,
    test_agents_share_prefixes_that_move_and_are_larger_than_the_pool,
)
from tests.exact.tool_turns import (  # noqa: F401 - as above
    test_a_turn_that_ended_with_a_tool_call_comes_back_to_its_kv,
    test_what_is_left_before_its_copy_has_come_is_noticed,
    test_what_waits_for_its_tool_is_in_the_pool_again_before_it_is_asked_for,
)

# Engines run in this process: their warnings are not ours to fail on.
pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def mixed_outcome() -> Outcome:
    return reference("float32")["mixed"]


SINGLE_RANK = {name for name, case in STANDING.items() if case.num_ranks == 1}
OF_THIS_COMMIT = {*EVERY_COMMIT, *draw(SINGLE_RANK - EVERY_COMMIT, 1)}


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(case, id=name, marks=() if name in OF_THIS_COMMIT else pytest.mark.nightly)
        for name, case in STANDING.items()
    ],
)
def runner(request: pytest.FixtureRequest) -> Iterator[StepRunner]:
    runner = StepRunner(request.param)
    yield runner
    runner.close()


def options_of(case: EngineCase) -> dict[str, object]:
    assert case.kv is not None
    return {
        "layers": case.kv.layers_per_group,
        "buffers": case.kv.max_staging_buffers,
        "asynchronous": case.asynchronous,
        "chunk": case.max_num_batched_tokens,
        "parallel": (case.tensor_parallel_size, case.pipeline_parallel_size),
    }


def pairs_of(cases: Iterable[EngineCase]) -> set[tuple[object, ...]]:
    return {pair for case in cases for pair in itertools.combinations(options_of(case).items(), 2)}


def test_every_pair_of_options_has_an_engine() -> None:
    assert pairs_of(product.CASES.values()) <= pairs_of(STANDING.values())


@pytest.mark.parametrize("case", STANDING.values(), ids=STANDING.keys())
def test_every_pool_is_scarce(case: EngineCase) -> None:
    for workload in (mixed(num_groups(case)), long_prompt(num_groups(case))):
        assert pool_share(case, workload) <= SCARCE_FRAC
    (longest,) = (a for a in long_prompt() if a.request_id == LONGEST)
    num_full_blocks = len(longest.prompt) // case.block_size
    assert num_full_blocks * num_groups(case) > case.num_blocks, "the prompt fits the pool"


@pytest.mark.parametrize("name", RECIPES)
def test_what_stock_vllm_answers_is_kept_for_other_processes(name: str) -> None:
    case, _ = RECIPES[name]

    assert " at 0x" not in repr(stock(case)), "the fingerprint is another one in every process"


def test_full_residency_is_counted_as_the_engine_counts_it() -> None:
    expected = reference("float32")

    assert peak_blocks(mixed(), block_size=LAYERS.block_size) == expected["mixed"].peak_blocks
    assert peak_blocks(long_prompt(), block_size=LAYERS.block_size) == expected["long"].peak_blocks


def test_fixed_placements_at_every_distance(runner: StepRunner, mixed_outcome: Outcome) -> None:
    groups = num_groups(runner.case)
    workload = mixed(groups)
    for first in first_distances(groups):
        outcome = runner.run(workload, hook=at_distances(workload, groups, first=first))

        assert_exact(runner, mixed_outcome, outcome, workload)


def test_placements_that_change_at_any_step_in_both_directions(
    runner: StepRunner, mixed_outcome: Outcome
) -> None:
    workload = mixed(num_groups(runner.case))

    outcome = runner.run(workload, hook=churn(1))

    assert_exact(runner, mixed_outcome, outcome, workload, min_changes=MIN_RANDOM_CHANGES)
    # After every step of a run the block formula is compared with the pool: so it was here with
    # one and two buffers, while copies were under way and when none was.
    formula = outcome.formula
    assert formula.num_compared > outcome.num_steps
    assert min(formula.num_settled, formula.num_in_transit) > 0
    assert max(formula.num_staging_seen) == runner.scheduler.kv_options.max_staging_buffers


def test_a_prompt_larger_than_the_pool_is_answered(runner: StepRunner) -> None:
    workload = long_prompt(num_groups(runner.case))

    outcome = runner.run(workload)  # nobody chose a placement: the capacity guard does

    assert_exact(runner, reference("float32")["long"], outcome, workload)


TWO_ENGINES = pytest.mark.parametrize(
    "runner", [LAYERS, HALVES], ids=["layers", "halves-asynchronous"], indirect=True
)


@TWO_ENGINES
def test_seeded_sampling_and_logprobs(runner: StepRunner) -> None:
    workload, expected = sampled()[: len(mixed(num_groups(runner.case)))], reference("float32")

    outcome = runner.run(workload, hook=churn(4))

    assert_exact(runner, expected["sampled"], outcome, workload)
    assert len(outcome.logprobs) == len(workload) // 2
    for request_id, logprobs in outcome.logprobs.items():
        # Another batch composition rounds differently in the last digits.
        assert logprobs == pytest.approx(expected["sampled"].logprobs[request_id], abs=1e-3)


@TWO_ENGINES
def test_stop_strings(runner: StepRunner, mixed_outcome: Outcome) -> None:
    workload = stopping(mixed_outcome.texts)[: len(mixed(num_groups(runner.case)))]
    expected = reference("float32")["stopping"]

    outcome = runner.run(workload, hook=churn(5))

    assert outcome.texts.items() <= expected.texts.items()
    assert_exact(runner, expected, outcome, workload)


def test_pauses_and_parks_mixed_with_changes_and_aborts(
    runner: StepRunner, mixed_outcome: Outcome
) -> None:
    workload = with_aborts(mixed(), seed=3)
    counters = runner.scheduler.block_owner.counters
    before = counters.copy()

    outcome = runner.run(workload, hook=together(churn(6), holds(6)))

    assert_exact(runner, mixed_outcome, outcome, workload)
    assert counters.num_pauses - before.num_pauses >= 10
    assert counters.num_parks - before.num_parks >= 10


LAYERS_ONLY = pytest.mark.parametrize("runner", [LAYERS], ids=["layers"], indirect=True)


@LAYERS_ONLY
def test_aborts_leave_the_others_exact_and_the_pool_whole(
    runner: StepRunner, mixed_outcome: Outcome
) -> None:
    workload = with_aborts(mixed(num_groups(runner.case)), seed=3)
    assert any(arrival.abort_at is not None for arrival in workload)

    outcome = runner.run(workload, hook=churn(3))

    assert_exact(runner, mixed_outcome, outcome, workload)


def assert_same_tokens(runner: StepRunner, expected: Outcome, outcome: Outcome) -> None:
    assert first_difference(expected, outcome) == {}
    assert_pool_is_whole(runner)


@LAYERS_ONLY
@pytest.mark.parametrize("way", ResumeWay)
def test_thirty_resumes_of_each_way(
    runner: StepRunner, mixed_outcome: Outcome, monkeypatch: pytest.MonkeyPatch, way: ResumeWay
) -> None:
    control, counters = runner.scheduler.control, runner.scheduler.block_owner.counters
    monkeypatch.setattr(control.resumes, "choose_way", lambda parked, engine: way)
    before = counters.num_resumes(way)

    # A load that waits too long for blocks becomes another way: how many stay is the machine's.
    for seed in range(1, 6):
        hook = together(churn(seed + 6, share=0.1), holds(seed, (park,), 0.15))
        outcome = runner.run(mixed(), hook=hook)

        assert_same_tokens(runner, mixed_outcome, outcome)
        if counters.num_resumes(way) - before >= 30:
            return
    raise AssertionError(f"too few: {counters.num_resumes(way) - before}")


@LAYERS_ONLY
def test_aborts_of_paused_parked_and_loading_requests_leave_the_others_exact(
    runner: StepRunner, mixed_outcome: Outcome, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner.scheduler.control.resumes, "choose_way", lambda *_: ResumeWay.LOAD)
    counts: Counter[str] = Counter()
    for seed in range(10, 20):
        aborts = AbortsByState(runner, seed=seed)

        with h2d_link(LinkModel(bytes_per_s=2e7)):  # a load takes several steps
            outcome = runner.run(
                mixed(), hook=together(churn(seed, share=0.1), holds(seed), aborts)
            )

        counts += aborts.counts
        for request_id in aborts.aborted:
            got = outcome.tokens.pop(request_id, [])
            assert got == mixed_outcome.tokens[request_id][: len(got)]
        others = mixed_outcome.tokens.keys() - aborts.aborted
        assert outcome.tokens == {name: mixed_outcome.tokens[name] for name in others}
        assert_pool_is_whole(runner)
        if all(counts[state] >= 3 for state in STATES):
            return
    raise AssertionError(f"too few aborts: {counts}")


@LAYERS_ONLY
def test_a_full_host_pool_costs_recomputes_and_no_token(
    runner: StepRunner, mixed_outcome: Outcome, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner = runner.scheduler.block_owner
    somebody_elses, check = SlotPromise(), owner.host.check_integrity
    assert owner.host.reserve(somebody_elses, owner.host.num_free - 200)
    monkeypatch.setattr(
        owner.host,
        "check_integrity",
        lambda owned, promises, *used: check(owned, [*promises, somebody_elses], *used),
    )
    num_dropped = owner.counters.num_dropped_copies
    try:
        outcome = runner.run(mixed(), hook=together(churn(8, share=0.1), holds(8)))
    finally:
        owner.host.withdraw(somebody_elses)

    assert_same_tokens(runner, mixed_outcome, outcome)
    assert owner.counters.num_dropped_copies > num_dropped


@LAYERS_ONLY
def test_without_a_budget_nothing_is_mirrored_and_offloaded_groups_still_are_copied(
    runner: StepRunner, mixed_outcome: Outcome, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_through = runner.scheduler.transfers.write_through
    monkeypatch.setattr(write_through, "_budget", lambda num_under_way: 0)
    counters = runner.scheduler.block_owner.counters
    num_mirrored = counters.num_mirrored_blocks

    outcome = runner.run(mixed(), hook=together(churn(9, share=0.1), holds(9)))

    assert_same_tokens(runner, mixed_outcome, outcome)
    assert counters.num_mirrored_blocks == num_mirrored
    assert outcome.num_offloads > 0


@LAYERS_ONLY
def test_a_parked_request_whose_copies_are_mixed_up_is_noticed(
    runner: StepRunner, mixed_outcome: Outcome, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, control = runner.scheduler.block_owner, runner.scheduler.control
    park_rightly = owner.park

    def park_wrongly(kv: RequestKV) -> Any:
        blocks = park_rightly(kv)
        request = kv.record.kv
        if request is not None:  # the order of one layer's blocks would not matter to attention
            one, other = request.groups[2], request.groups[3]
            one.host_slots, other.host_slots = other.host_slots, one.host_slots
        return blocks

    monkeypatch.setattr(owner, "park", park_wrongly)
    monkeypatch.setattr(control.resumes, "choose_way", lambda parked, engine: ResumeWay.LOAD)

    outcome = runner.run(mixed(), hook=holds(1, (park,)), check=False)

    assert first_difference(mixed_outcome, outcome) != {}


@LAYERS_ONLY
@pytest.mark.nightly
def test_half_the_link_speed_raises_the_stall_by_the_time_that_the_bytes_take(
    runner: StepRunner,
) -> None:
    # With one buffer a load starts when the layer before it has ended, and the next one waits. What
    # a layer computes meanwhile hides the same part of its load at either speed, and what a busy
    # machine adds is added to both: the difference is the bytes' alone.
    bytes_per_s = 1e7  # a load takes 33 ms, what it hides behind about 1
    workload = [
        Arrival(request_id="s", prompt=make_prompt(645, seed=1), num_output_tokens=8),
    ]
    everything = fixed({"s": frozenset(range(8))}, num_staging=1)

    def sums_at(speed: float) -> dict[str, float]:
        with h2d_link(LinkModel(bytes_per_s=speed)):
            return runner.run(workload, hook=everything).sums

    pairs = [(sums_at(bytes_per_s), sums_at(bytes_per_s / 2)) for _ in range(3)]
    raises_s = [half["stall_s"] - full["stall_s"] for full, half in pairs]

    # 7 steps that decode, 8 layers, 20 full blocks of 32 tokens, 2 heads of 32 floats, K and V.
    num_bytes = 7 * 8 * 20 * 32 * 2 * 32 * 4 * 2
    assert {sums["h2d_bytes"] for pair in pairs for sums in pair} == {num_bytes}
    predicted_s = num_bytes / (bytes_per_s / 2) - num_bytes / bytes_per_s
    assert statistics.median(raises_s) == pytest.approx(predicted_s, rel=0.15)


EVERYTHING = {f"r{n}": frozenset(range(8)) for n in range(8)}


@LAYERS_ONLY
def test_with_every_layer_of_everybody_offloaded_the_tokens_are_exact(
    runner: StepRunner, mixed_outcome: Outcome
) -> None:
    outcome = runner.run(mixed(8), hook=fixed(EVERYTHING, num_staging=1))

    assert first_difference(answers_to(mixed(8), mixed_outcome), outcome) == {}
    assert_pool_is_whole(runner)


@LAYERS_ONLY
@pytest.mark.parametrize(
    "fault",
    [faults.DropsCopies, faults.MistakesBlocks, faults.SkipsWaits, faults.SkipsSaveWaits],
)
def test_a_single_kind_of_mistake_is_noticed(
    runner: StepRunner, mixed_outcome: Outcome, fault: type[faults.FaultyEngine]
) -> None:
    with faults.spoiling(fault) as faulty:
        outcome = runner.run(mixed(8), hook=fixed(EVERYTHING, num_staging=1))

    assert faulty.num_faults > 0
    assert first_difference(mixed_outcome, outcome).keys() & EVERYTHING.keys()
