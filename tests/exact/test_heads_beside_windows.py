"""Drafts of an EAGLE head for a model with windows: its layer keeps all, the windows slide."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from lab.drafts import save_eagle_head
from lab.engine.step_runner import StepRunner
from lab.engine.workloads import churn, holds, random_way, together, with_aborts
from tests.exact.drafts import count_drafts, eagle_drafts
from tests.exact.evidence import KEEPING, Returns, assert_pool_is_whole, assert_tokens
from tests.exact.kinds import WORKLOADS, kind_case, kind_reference, start

# Engines run in this process: their warnings are not ours to fail on.
pytestmark = [
    pytest.mark.nightly,
    pytest.mark.filterwarnings("default"),
    pytest.mark.timeout(900),
]

MIXED, LONG = WORKLOADS["mixed"], WORKLOADS["long"]
NUM_DRAFTS = 3


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StepRunner]:
    directory: Path = tmp_path_factory.mktemp("eagle")
    save_eagle_head(directory)
    kind_reference("gpt_oss")  # made in a process of its own
    runner = start(
        kind_case(
            "gpt_oss",
            num_blocks=150,
            asynchronous=True,
            speculative=eagle_drafts(directory, num_drafts=NUM_DRAFTS),
        )
    )
    yield runner
    runner.close()


def test_placements_that_change_at_any_step(
    runner: StepRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = count_drafts(runner, monkeypatch)

    outcome = runner.run(MIXED, hook=churn(1))

    assert_tokens(kind_reference("gpt_oss")["mixed"], outcome, MIXED)
    assert min(outcome.num_offloads, outcome.num_restores) >= 4
    assert seen["drafted"] >= 100
    windows = runner.scheduler.block_owner.sides.windows
    assert windows == (64, 64, 64, 64, runner.case.max_model_len)
    assert_pool_is_whole(runner)


def test_a_prompt_beyond_the_pool_is_answered(runner: StepRunner) -> None:
    outcome = runner.run(LONG)  # nobody chose a placement: the capacity guard does

    assert_tokens(kind_reference("gpt_oss")["long"], outcome, LONG)
    assert min(outcome.num_offloads, outcome.num_restores) >= 1
    assert_pool_is_whole(runner)


def test_pauses_parks_and_aborts_with_drafts_in_flight(
    runner: StepRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    returns = Returns(runner, monkeypatch)
    monkeypatch.setattr(runner.scheduler.line.resumes, "choose_way", random_way(6, KEEPING))
    workload = with_aborts(MIXED, seed=3)

    outcome = runner.run(workload, hook=together(churn(6), holds(6)))

    assert_tokens(kind_reference("gpt_oss")["mixed"], outcome, workload)
    assert returns.num_back >= 10
    assert returns.num_recomputed_tokens <= NUM_DRAFTS * returns.num_back  # of the last step
    assert_pool_is_whole(runner)
