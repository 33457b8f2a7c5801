"""Drafts of layers with KV beside layer-wise KV: they stay in the pool, the model's leave.

Of an EAGLE head, or of a draft model.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lab.drafts import save_draft_model, save_eagle_head
from lab.engine.step_runner import EngineCase, StepRunner, first_difference
from lab.engine.workloads import churn, holds, long_prompt, mixed, random_way, with_aborts
from tests.exact.cases import make_case, num_groups
from tests.exact.drafts import (
    answers_of,
    assert_exact,
    count_drafts,
    draft_model_drafts,
    eagle_drafts,
)
from tests.exact.evidence import KEEPING, Returns, assert_pool_is_whole

# Engines run in this process: their warnings are not ours to fail on.
pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.timeout(900)]

CASES = {
    "asynchronous": make_case(asynchronous=True),
    "synchronous": make_case(),
    "in-small-chunks": make_case(asynchronous=True, max_num_batched_tokens=97, buffers=1),
    "tensor-parallel": make_case(tensor_parallel_size=2),
    # Of as many layers as a layer group.
    "draft-model": make_case(layers_per_group=2),
    "draft-model-asynchronous": make_case(asynchronous=True),
    "draft-model-tensor-parallel": make_case(layers_per_group=2, tensor_parallel_size=2),
}
# One test of a draft model with each commit; the rest of it is the head's, in time too.
HEAD, WITH_MODEL = ("asynchronous",), ("asynchronous", "draft-model")


def engines(*every_commit: str) -> pytest.MarkDecorator:
    params = [
        pytest.param(name, id=name, marks=() if name in every_commit else pytest.mark.nightly)
        for name in CASES
    ]
    return pytest.mark.parametrize("runner", params, indirect=True, scope="module")


@pytest.fixture(scope="module")
def runner(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[StepRunner]:
    case, directory = CASES[request.param], tmp_path_factory.mktemp("drafts")
    speculative = make_drafts(directory, case, of_model=request.param.startswith("draft-model"))
    runner = StepRunner(replace(case, speculative=speculative))
    yield runner
    runner.close()


def make_drafts(directory: Path, case: EngineCase, *, of_model: bool) -> dict[str, Any]:
    """Return the `speculative_config` of a head, or of a model of as many layers as a group."""
    if of_model:
        save_draft_model(directory, num_layers=case.kv.layers_per_group)
        return draft_model_drafts(directory)
    save_eagle_head(directory)
    return eagle_drafts(directory)


@engines(*WITH_MODEL)
def test_placements_that_change_at_any_step_leave_the_tokens_exact(
    runner: StepRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, workload = count_drafts(runner, monkeypatch), mixed(num_groups(runner.case))

    outcome = runner.run(workload, hook=churn(1))

    assert_exact(runner, "mixed", outcome, workload)
    assert 10 <= seen["accepted"] <= seen["drafted"] - 100
    assert len(runner.scheduler.block_owner.sides.windows) == 1


@engines(*HEAD)
def test_the_guard_alone_keeps_requests_that_the_pool_does_not_hold(runner: StepRunner) -> None:
    groups = num_groups(runner.case)

    assert_exact(runner, "mixed", runner.run(mixed()), mixed())
    assert_exact(runner, "long", runner.run(long_prompt(groups)), long_prompt(groups))


@engines(*HEAD)
def test_pauses_parks_and_aborts_with_drafts_in_flight(
    runner: StepRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is parked takes the KV of the layers that make drafts along."""
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
