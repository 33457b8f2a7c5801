"""Drafts of an EAGLE head beside layer-wise KV: its layer stays in the pool, the model's leave."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from lab.drafts import save_eagle_head
from lab.engine.step_runner import StepRunner, first_difference
from lab.engine.workloads import churn, holds, long_prompt, mixed, random_way, with_aborts
from tests.exact.cases import make_case, num_groups
from tests.exact.drafts import answers_of, assert_exact, count_drafts, eagle_drafts
from tests.exact.evidence import KEEPING, Returns, assert_pool_is_whole

# Engines run in this process: their warnings are not ours to fail on.
pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.timeout(900)]

CASES = {
    "asynchronous": make_case(asynchronous=True),
    "synchronous": make_case(),
    "in-small-chunks": make_case(asynchronous=True, max_num_batched_tokens=97, buffers=1),
    "tensor-parallel": make_case(tensor_parallel_size=2),
}
EVERY_COMMIT = "asynchronous"


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory: Path = tmp_path_factory.mktemp("eagle")
    save_eagle_head(directory)
    return directory


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(case, id=name, marks=() if name == EVERY_COMMIT else pytest.mark.nightly)
        for name, case in CASES.items()
    ],
)
def runner(request: pytest.FixtureRequest, head: Path) -> Iterator[StepRunner]:
    runner = StepRunner(replace(request.param, speculative=eagle_drafts(head)))
    yield runner
    runner.close()


def test_placements_that_change_at_any_step_leave_the_tokens_exact(
    runner: StepRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, workload = count_drafts(runner, monkeypatch), mixed(num_groups(runner.case))

    outcome = runner.run(workload, hook=churn(1))

    assert_exact(runner, "mixed", outcome, workload)
    assert 10 <= seen["accepted"] <= seen["drafted"] - 100
    assert len(runner.scheduler.block_owner.sides.windows) == 1


def test_the_guard_alone_keeps_requests_that_the_pool_does_not_hold(runner: StepRunner) -> None:
    groups = num_groups(runner.case)

    assert_exact(runner, "mixed", runner.run(mixed()), mixed())
    assert_exact(runner, "long", runner.run(long_prompt(groups)), long_prompt(groups))


def test_pauses_parks_and_aborts_with_drafts_in_flight(
    runner: StepRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who is parked takes the KV of the head's layer along."""
    groups = num_groups(runner.case)
    aborted = with_aborts(mixed(groups), seed=5)

    returns = Returns(runner, monkeypatch)
    monkeypatch.setattr(runner.scheduler.line.resumes, "choose_way", random_way(6, KEEPING))

    outcome = runner.run(mixed(groups), hook=holds(3))
    others = runner.run(aborted, hook=churn(6))

    assert not first_difference(answers_of("mixed", mixed(groups)), outcome)
    assert outcome.num_preemptions >= 5
    assert returns.num_back >= 5
    assert returns.num_recomputed_tokens <= 3 * returns.num_back  # drafts in flight, at most
    assert_exact(runner, "mixed", others, aborted)
    assert_pool_is_whole(runner)
