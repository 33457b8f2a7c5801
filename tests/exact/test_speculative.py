"""Speculative decoding without layer-wise KV: drafts change no token, whoever runs."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lab.drafts import save_draft_model, save_eagle_head
from lab.engine.step_runner import EngineCase, StepRunner
from lab.engine.workloads import mixed
from services.control.options import ControllerOptions
from tests.exact.reference import reference

# Engines run in this process: their warnings are not ours to fail on.
pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.timeout(900)]

NUM_DRAFTS = 3
NUM_BLOCKS = 37  # of all layers: two thirds of what the workload takes


@pytest.fixture(scope="module", params=["draft_model", "eagle"])
def runner(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[StepRunner]:
    directory: Path = tmp_path_factory.mktemp(request.param)
    if request.param == "eagle":
        save_eagle_head(directory)
    else:
        save_draft_model(directory, num_layers=1)
    case = EngineCase(
        num_blocks=NUM_BLOCKS,
        controller=ControllerOptions(policy="evenflow"),
        speculative={
            "model": str(directory),
            "method": request.param,
            "num_speculative_tokens": NUM_DRAFTS,
        },
        asynchronous=request.param == "eagle",
    )
    runner = StepRunner(case)
    yield runner
    runner.close()


@pytest.mark.parametrize("policy", ["evenflow", "vllm"])
def test_drafts_leave_the_tokens_exact(
    policy: str, runner: StepRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler, seen = runner.scheduler, Counter[str]()
    count = scheduler.make_spec_decoding_stats

    def counted(stats: Any, **numbers: Any) -> Any:
        seen.update(drafts=numbers["num_draft_tokens"], accepted=numbers["num_accepted_tokens"])
        return count(stats, **numbers)

    monkeypatch.setattr(scheduler, "make_spec_decoding_stats", counted)
    scheduler.set_up(ControllerOptions(policy=policy))

    outcome = runner.run(mixed())

    assert outcome.tokens == reference("float32")["mixed"].tokens
    assert outcome.num_preemptions >= 1
    assert 10 <= seen["accepted"] <= seen["drafts"] - 100
