"""Windows and states beside full attention: tokens identical to stock vLLM's.

The layers with full attention leave the pool and come back; the others stay, slide, and go with
requests that are parked. Freed and awaited blocks are NaN.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from lab.engine.orders import park
from lab.engine.step_runner import EngineCase, Outcome, StepRunner, first_difference
from lab.engine.workloads import churn, fixed, holds, random_way, together, with_aborts
from services.control.options import ControllerOptions
from services.executor.blocks.sides.side_groups import SideGroups
from services.executor.copies.transfer_runner import TransferRunner
from services.placement.blocks import RESIDENT, num_request_blocks, side_blocks
from tests.exact.anchored_agents import (  # noqa: F401 - their tests run on this module's engines
    test_a_turn_that_waits_for_its_tool_comes_back_to_its_anchor,
    test_anchors_are_counted,
    test_turns_of_agents_begin_where_the_last_one_ended_if_they_can,
    test_turns_of_agents_begin_where_the_last_prompt_ended_if_its_answer_is_not_theirs,
)
from tests.exact.anchored_turns import (  # noqa: F401 - as above
    begun,
    test_a_reset_lets_no_turn_begin_with_what_was_there,
    test_a_turn_waits_for_the_one_before_it_that_is_on_its_way_to_the_host,
    test_aborted_turns_leave_the_others_exact,
    test_an_anchor_of_another_conversation_is_noticed,
    test_an_anchor_of_another_number_of_tokens_is_noticed,
    test_blocks_of_another_anchor_are_noticed,
    test_tokens_behind_the_last_full_block_that_are_not_compared_are_noticed,
    test_turns_begin_at_the_very_token_at_which_the_last_one_ended,
    test_turns_take_what_the_pool_still_has_of_an_anchor,
    test_with_little_room_on_the_host_anchors_are_evicted_and_turns_stay_exact,
)
from tests.exact.cases import num_groups
from tests.exact.evidence import (
    KEEPING,
    MIN_REUSED_EVICTIONS,
    Returns,
    assert_pool_is_whole,
    assert_tokens,
    num_layer_loads,
)
from tests.exact.kinds import CASES, EVERY_COMMIT, WORKLOADS, kind_reference, start

# Engines run in this process: their warnings are not ours to fail on.
pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.timeout(900)]

MIXED, LONG = WORKLOADS["mixed"], WORKLOADS["long"]
MIN_LOADS_OF_A_LAYER, MIN_CHANGES_OF_A_GROUP = 200, 12


def engine_params(*names: str) -> list[Any]:
    return [
        pytest.param(name, id=name, marks=() if name in EVERY_COMMIT else pytest.mark.nightly)
        for name in names
    ]


@pytest.fixture(scope="module", params=engine_params(*CASES))
def named(request: pytest.FixtureRequest) -> Iterator[tuple[str, StepRunner]]:
    case: EngineCase = CASES[request.param]
    name = request.param.partition("-")[0]
    kind_reference(name)  # made in a process of its own
    runner = start(case)
    yield name, runner
    runner.close()


def of_engines(*names: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("named", engine_params(*names), indirect=True)


def test_the_groups_that_may_leave_come_first(named: tuple[str, StepRunner]) -> None:
    _, runner = named
    geometry = runner.scheduler.block_owner.geometry

    groups = runner.scheduler.kv_cache_manager.kv_cache_config.kv_cache_groups
    assert len(groups) == geometry.num_groups + len(geometry.side_windows)
    assert geometry.num_groups == num_groups(runner.case)
    layers = [name for group in groups for name in group.layer_names]
    assert len(set(layers)) == len(layers)
    assert {len(group.layer_names) for group in groups} == {runner.case.kv.layers_per_group}
    assert not runner.scheduler.block_owner.trunks.is_on


def test_placements_that_change_at_any_step(named: tuple[str, StepRunner]) -> None:
    name, runner = named

    outcome = runner.run(MIXED, hook=churn(1))

    assert_tokens(kind_reference(name)["mixed"], outcome, MIXED)
    num_layers = runner.case.model.num_layers
    assert num_layer_loads(runner, outcome) >= MIN_LOADS_OF_A_LAYER * num_layers
    assert outcome.num_offloads + outcome.num_restores >= MIN_CHANGES_OF_A_GROUP * num_groups(
        runner.case
    )
    assert outcome.num_reused_evictions >= MIN_REUSED_EVICTIONS
    assert_pool_is_whole(runner)
    assert min(outcome.formula.num_settled, outcome.formula.num_in_transit) > 0


def test_a_prompt_beyond_the_pool_is_answered(named: tuple[str, StepRunner]) -> None:
    name, runner = named
    geometry = runner.scheduler.block_owner.geometry
    longest = max(len(arrival.prompt) for arrival in LONG)
    whole = num_request_blocks(geometry, RESIDENT, num_tokens=longest)
    sides = side_blocks(geometry, num_tokens=longest, num_new_tokens=longest)
    assert whole + sides >= runner.case.num_blocks, "the prompt fits the pool"

    outcome = runner.run(LONG)  # nobody chose a placement: the capacity guard does

    assert_tokens(kind_reference(name)["long"], outcome, LONG)
    assert outcome.num_offloads
    assert outcome.num_restores
    assert outcome.sums["num_loads"] >= 100
    assert_pool_is_whole(runner)


def test_pauses_parks_and_aborts(
    named: tuple[str, StepRunner], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever is parked comes back at the very token; a window that has gone on is not there."""
    name, runner = named
    workload, counters = with_aborts(MIXED, seed=3), runner.scheduler.block_owner.counters
    before, returns = counters.copy(), Returns(runner, monkeypatch)
    monkeypatch.setattr(runner.scheduler.line.resumes, "choose_way", random_way(6, KEEPING))

    outcome = runner.run(workload, hook=together(churn(6), holds(6)))

    assert_tokens(kind_reference(name)["mixed"], outcome, workload)
    assert outcome.num_preemptions >= 10
    assert counters.num_pauses - before.num_pauses >= 10
    assert counters.num_parks - before.num_parks >= 10
    assert returns.num_back >= 10
    assert returns.num_recomputed_tokens == 0
    assert_pool_is_whole(runner)


@pytest.mark.nightly
@of_engines("gpt_oss", "granite4")
def test_a_thousand_parks(named: tuple[str, StepRunner], monkeypatch: pytest.MonkeyPatch) -> None:
    name, runner = named
    returns = Returns(runner, monkeypatch)
    for seed in range(100):
        monkeypatch.setattr(runner.scheduler.line.resumes, "choose_way", random_way(seed, KEEPING))

        outcome = runner.run(MIXED, hook=together(churn(seed), holds(seed)))

        assert outcome.tokens == kind_reference(name)["mixed"].tokens, seed
        assert returns.num_recomputed_tokens == 0, seed
        if returns.num_back >= 1_000:
            return
    raise AssertionError(f"{returns.num_back} parks")


# -- what is wrong is noticed --------------------------------------------------------------------

PLAIN = of_engines("gpt_oss", "granite4", "llama4", "gemma4")
WINDOWS = of_engines("gpt_oss", "llama4", "gemma4")
GPT_OSS = of_engines("gpt_oss")


def differing(name: str, runner: StepRunner) -> dict[str, int]:
    everything = frozenset(range(num_groups(runner.case)))
    away = {arrival.request_id: everything for arrival in MIXED}
    outcome: Outcome = runner.run(MIXED, hook=fixed(away), check=False)
    return first_difference(kind_reference(name)["mixed"], outcome)


@PLAIN
def test_loads_that_copy_nothing_are_noticed(
    named: tuple[str, StepRunner], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TransferRunner, "_start_loads", lambda *args, **kwargs: None)

    assert len(differing(*named)) >= len(MIXED) // 2


@WINDOWS
def test_a_window_that_ends_a_block_early_is_noticed(
    named: tuple[str, StepRunner], monkeypatch: pytest.MonkeyPatch
) -> None:
    name, runner = named
    size = runner.scheduler.block_owner.geometry.block_size
    sides: SideGroups = runner.scheduler.block_owner.sides
    monkeypatch.setattr(sides, "windows", tuple(window - size for window in sides.windows))

    assert len(differing(name, runner)) >= len(MIXED) // 2


class BringsBackLess:
    """Of some groups' copies that come with a request the first block goes astray."""

    def __init__(self, restores: Any, groups: range) -> None:
        self._restores, self._groups = restores, groups
        self.num_astray = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._restores, name)

    def order_lacking(self, request_id: str, index: int, *args: Any) -> Any:
        ordered, blocks = self._restores.order_lacking(request_id, index, *args)
        if index in self._groups:
            for restore_id in ordered:
                order = self._restores.orders._restores[restore_id]
                order.block_ids[0] = self._restores.blocks.null.block_id
                self.num_astray += 1
        return ordered, blocks


@PLAIN
@pytest.mark.parametrize("what", ["an open block", "a window or a state"])
def test_what_does_not_come_back_is_noticed(
    named: tuple[str, StepRunner], monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    name, runner = named
    owner, resumes = runner.scheduler.block_owner, runner.scheduler.line.resumes
    num_groups, num_sides = owner.geometry.num_groups, len(owner.sides.windows)
    first = 0 if what == "an open block" else num_groups
    groups = range(first, first + (num_groups if what == "an open block" else num_sides))
    restores = BringsBackLess(owner.restores, groups)
    monkeypatch.setattr(owner.side_copies, "_restores", restores)
    monkeypatch.setattr(resumes, "choose_way", random_way(6, KEEPING))

    outcome = runner.run(MIXED, hook=holds(6, kinds=(park,)), check=False)

    assert restores.num_astray >= 10
    assert len(first_difference(kind_reference(name)["mixed"], outcome)) >= len(MIXED) // 2


@GPT_OSS
def test_side_blocks_that_are_taken_past_the_pools_keeper_are_noticed(
    named: tuple[str, StepRunner], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What their last owner left is then behind the rows' ends: NaN times zero is NaN."""
    name, runner = named
    sides: SideGroups = runner.scheduler.block_owner.sides
    monkeypatch.setattr(sides, "_blocks", TakesUncleared(sides._blocks))

    assert differing(name, runner)


class TakesUncleared:
    def __init__(self, blocks: Any) -> None:
        self._blocks = blocks

    def __getattr__(self, name: str) -> Any:
        return getattr(self._blocks, "take" if name == "take_open" else name)


@GPT_OSS
def test_each_kind_has_its_own_metadata(
    named: tuple[str, StepRunner], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It says how a step reads a context of some length: of a window as little as there is."""
    _, runner = named
    ranks_runner, seen = model_runner(runner), list[dict[str, Any]]()
    build = ranks_runner._build_attention_metadata

    def recording(**options: Any) -> Any:
        metadata, common = build(**options)
        seen.append(metadata)
        return metadata, common

    monkeypatch.setattr(ranks_runner, "_build_attention_metadata", recording)
    runner.run(MIXED[:1])

    groups = ranks_runner.kv_cache_config.kv_cache_groups
    full, *others, window = (group.layer_names[0] for group in groups)
    for metadata in seen:
        schedules = {name: metadata[name].scheduler_metadata for name in (full, *others, window)}
        assert len({id(one) for one in schedules.values()}) == 2
        assert schedules[full] is not schedules[window]


@of_engines("granite4")
def test_blocks_that_a_state_may_have_had_are_zeroed(
    named: tuple[str, StepRunner], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A state's bytes may be NaN as KV, and attention multiplies what is behind a row by zero."""
    _, runner = named
    scheduler, blocks = runner.scheduler, runner.scheduler.block_owner.blocks
    taken, zeroed, take = set[int](), set[int](), blocks.take_open
    name_blocks = scheduler._get_new_block_ids_to_zero  # into the step's output

    def taking(num_blocks: int) -> list[Any]:
        found = take(num_blocks)
        taken.update(block.block_id for block in found)
        return found

    def naming() -> list[int] | None:
        named = name_blocks()
        zeroed.update(named or ())
        return named

    monkeypatch.setattr(blocks, "take_open", taking)
    monkeypatch.setattr(scheduler, "_get_new_block_ids_to_zero", naming)
    runner.run(MIXED[:2])

    assert len(taken) >= 8
    assert zeroed == taken


def model_runner(runner: StepRunner) -> Any:
    return runner.core.model_executor.driver_worker.worker.model_runner


@pytest.mark.nightly
@pytest.mark.parametrize(("name", "num_blocks"), [("gpt_oss", 60), ("granite4", 22)])
def test_a_run_policy_without_layers_leaves_the_tokens_exact(name: str, num_blocks: int) -> None:
    controller = ControllerOptions(policy="evenflow")
    case = replace(CASES[name], kv=None, controller=controller, num_blocks=num_blocks)
    expected, runner = kind_reference(name)["mixed"], start(case)
    try:
        outcome = runner.run(MIXED)

        assert outcome.tokens == expected.tokens
        assert runner.scheduler.loop.counts.reasons["outgrown"] >= 1
        assert runner.scheduler.engine.shape.side_windows
    finally:
        runner.close()
