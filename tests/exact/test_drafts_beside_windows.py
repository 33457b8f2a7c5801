"""Drafts of a model with windows: a window slides by tokens that cannot be rejected any more.

The layers with full attention leave the pool and come back; windows stay, and have room for drafts.
"""

from collections.abc import Iterator
from typing import Any

import pytest

from lab.engine.step_runner import EngineCase, StepRunner, first_difference
from lab.engine.workloads import churn, holds, random_way, together, with_aborts
from lab.known_drafts import KNOWN, known_drafts
from tests.exact.cases import num_groups
from tests.exact.drafts import count_drafts, known_answers
from tests.exact.evidence import KEEPING, Returns, assert_pool_is_whole, assert_tokens
from tests.exact.kinds import WORKLOADS, kind_case, kind_reference, start

# Engines run in this process: their warnings are not ours to fail on.
pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.timeout(900)]

MIXED, LONG = WORKLOADS["mixed"], WORKLOADS["long"]


def drafting(name: str, num_drafts: int, **engine: object) -> EngineCase:
    return kind_case(name, speculative=known_drafts(num_drafts=num_drafts), **engine)


EVERY_COMMIT = {"gpt_oss": drafting("gpt_oss", 3, num_blocks=120)}
CASES = {
    **EVERY_COMMIT,
    "gpt_oss-one": drafting("gpt_oss", 1, num_blocks=114),
    "gpt_oss-five-in-pairs": drafting("gpt_oss", 5, num_blocks=60, layers_per_group=2),
    "gemma3": drafting("gemma3", 3, num_blocks=128),
    "gemma4": drafting("gemma4", 3, num_blocks=96),
}


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(name, id=name, marks=() if name in EVERY_COMMIT else pytest.mark.nightly)
        for name in CASES
    ],
)
def named(request: pytest.FixtureRequest) -> Iterator[tuple[str, StepRunner]]:
    name = request.param.partition("-")[0]
    kind_reference(name)  # made in a process of its own
    runner = start(CASES[request.param])
    yield name, runner
    runner.close()


def draft(named: tuple[str, StepRunner], right_frac: float, patch: pytest.MonkeyPatch) -> None:
    """Let drafters know what stock vLLM answers without drafts, and be wrong now and then."""
    patch.setattr(KNOWN, "answers", known_answers(kind_reference(named[0])))
    patch.setattr(KNOWN, "right_frac", right_frac)


@pytest.mark.parametrize("right_frac", [0.0, pytest.param(0.5, marks=pytest.mark.nightly), 1.0])
def test_placements_that_change_at_any_step(
    right_frac: float, named: tuple[str, StepRunner], monkeypatch: pytest.MonkeyPatch
) -> None:
    name, runner = named
    draft(named, right_frac, monkeypatch)
    seen = count_drafts(runner, monkeypatch)

    outcome = runner.run(MIXED, hook=churn(1))

    assert_tokens(kind_reference(name)["mixed"], outcome, MIXED)
    assert min(outcome.num_offloads, outcome.num_restores) >= num_groups(runner.case)
    share = seen["accepted"] / seen["drafted"]  # what is right behind a wrong one is rejected, too
    assert share == right_frac if right_frac in (0.0, 1.0) else 0.1 < share < right_frac + 0.1
    assert_pool_is_whole(runner)


@pytest.mark.nightly
def test_a_prompt_beyond_the_pool_is_answered(
    named: tuple[str, StepRunner], monkeypatch: pytest.MonkeyPatch
) -> None:
    name, runner = named
    draft(named, 0.5, monkeypatch)

    outcome = runner.run(LONG)  # nobody chose a placement: the capacity guard does

    assert_tokens(kind_reference(name)["long"], outcome, LONG)
    assert min(outcome.num_offloads, outcome.num_restores) >= 1
    assert_pool_is_whole(runner)


@pytest.mark.parametrize("right_frac", [pytest.param(0.0, marks=pytest.mark.nightly), 0.8])
def test_pauses_parks_and_aborts_with_drafts_in_flight(
    right_frac: float, named: tuple[str, StepRunner], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request that is parked has its window as of the tokens that cannot be rejected."""
    name, runner = named
    draft(named, right_frac, monkeypatch)
    returns = Returns(runner, monkeypatch)
    monkeypatch.setattr(runner.scheduler.line.resumes, "choose_way", random_way(6, KEEPING))
    workload = with_aborts(MIXED, seed=3)

    outcome = runner.run(workload, hook=together(churn(6), holds(6)))

    assert_tokens(kind_reference(name)["mixed"], outcome, workload)
    assert returns.num_back >= 10
    num_drafts = runner.case.speculative["num_speculative_tokens"]
    assert returns.num_recomputed_tokens <= num_drafts * returns.num_back  # of the last step
    assert_pool_is_whole(runner)


def test_a_window_that_slides_by_drafts_is_noticed(
    named: tuple[str, StepRunner], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control: drafts that are rejected have taken a block of the window that is read yet."""
    name, runner = named
    draft(named, 0.0, monkeypatch)
    sides, num_drafts = (
        runner.scheduler.block_owner.sides,
        runner.case.speculative["num_speculative_tokens"],
    )
    slide = sides.slide

    def slide_by_drafts(request_id: str, *, num_tokens: int) -> None:
        slide(request_id, num_tokens=num_tokens + num_drafts)

    monkeypatch.setattr(sides, "slide", slide_by_drafts)

    outcome: Any = runner.run(MIXED, hook=churn(1), check=False)

    assert first_difference(kind_reference(name)["mixed"], outcome)
