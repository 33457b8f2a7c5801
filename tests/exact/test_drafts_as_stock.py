"""As many drafts are accepted as by stock vLLM, which is given the same, where all run on."""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from lab.drafts import save_draft_model, save_eagle_head
from lab.engine.step_runner import (
    Arrival,
    EngineCase,
    Outcome,
    StepRunner,
    first_difference,
    stock,
)
from lab.engine.workloads import churn, mixed
from lab.known_drafts import KNOWN, known_drafts
from tests.exact.cases import make_case
from tests.exact.drafts import (
    count_drafts,
    draft_model_drafts,
    eagle_drafts,
    known_answers,
)
from tests.exact.kinds import kind_case, start
from tests.exact.latent_cases import latent_case

# Engines run in this process: their warnings are not ours to fail on.
pytestmark = [
    pytest.mark.nightly,
    pytest.mark.filterwarnings("default"),
    pytest.mark.timeout(900),
]


Drafts: TypeAlias = dict[tuple[str, int], list[int]]


def assert_as_stock(speculative: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Synchronously: stock vLLM's asynchronous scheduler makes no drafts on a CPU."""
    case = make_case(share=0.7, speculative=speculative)  # so that nobody is preempted
    found: list[tuple[Any, Counter[str]]] = []
    for one in (stock(case), case):
        runner = StepRunner(one)
        seen = count_drafts(runner, monkeypatch)
        outcome = runner.run(mixed(8), hook=None if one.kv is None else churn(1), check=False)
        monkeypatch.undo()
        runner.close()
        found.append((outcome.tokens, seen))
        assert outcome.num_preemptions == 0

    assert found[0] == found[1]
    assert found[0][1]["drafted"] >= 100


@pytest.mark.parametrize(("num_drafts", "right_frac"), [(1, 0.5), (3, 0.8), (5, 0.0), (5, 1.0)])
def test_drafts_of_a_drafter_without_kv(
    num_drafts: int, right_frac: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    KNOWN.answers, KNOWN.right_frac = known_answers(), right_frac

    assert_as_stock(known_drafts(num_drafts=num_drafts), monkeypatch)


@pytest.mark.parametrize("num_drafts", [1, 3])
def test_drafts_of_a_draft_model(
    num_drafts: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_draft_model(tmp_path, num_layers=1)

    assert_as_stock(draft_model_drafts(tmp_path, num_drafts=num_drafts), monkeypatch)


@pytest.mark.parametrize("num_drafts", [1, 3, 5])
def test_drafts_of_a_head_with_kv(
    num_drafts: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_eagle_head(tmp_path)

    assert_as_stock(eagle_drafts(tmp_path, num_drafts=num_drafts), monkeypatch)


def listen_to_drafts(scheduler: Any, patch: pytest.MonkeyPatch) -> Drafts:
    """Return each request's drafts by the number of tokens before them, from now on."""
    drafts, update = Drafts(), scheduler.update_draft_token_ids

    def updated(made: Any) -> None:
        update(made)
        for request in scheduler.running:
            if request.spec_token_ids:
                drafts[request.request_id, request.num_tokens] = list(request.spec_token_ids)

    patch.setattr(scheduler, "update_draft_token_ids", updated)
    return drafts


def test_drafts_of_a_head_beside_windows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The head guesses hardly ever right: it is the drafts themselves that are compared."""
    save_eagle_head(tmp_path)
    case = kind_case("gpt_oss", num_blocks=500, speculative=eagle_drafts(tmp_path))
    found: list[Drafts] = []
    for one in (stock(case), case):
        runner = start(one)
        found.append(listen_to_drafts(runner.scheduler, monkeypatch))
        outcome = runner.run(mixed(8), hook=None if one.kv is None else churn(1), check=False)
        monkeypatch.undo()
        runner.close()
        assert outcome.num_preemptions == 0

    assert len(found[0]) >= 100
    assert found[0] == found[1]


@pytest.mark.parametrize("case", [kind_case("granite4"), latent_case()], ids=["states", "MLA"])
def test_stock_vllm_computes_wrong_tokens_on_a_cpu_beside_states_and_mla(
    case: EngineCase, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Why `check_drafts_supported` refuses them: where this fails, vLLM has mended it."""
    asked = mixed(8)[:1]  # alone, so that no answer depends on who else is in a step
    expected, with_drafts = (
        run_alone(stock(replace(case, speculative=speculative)), asked, monkeypatch)
        for speculative in (None, known_drafts(num_drafts=3))
    )

    different = first_difference(expected, with_drafts)
    assert different == {asked[0].request_id: 1}


def run_alone(case: EngineCase, asked: list[Arrival], patch: pytest.MonkeyPatch) -> Outcome:
    patch.setattr(KNOWN, "answers", {tuple(asked[0].prompt): [11] * 900})  # wrong ones
    runner = start(case)
    try:
        return runner.run(asked, check=False)
    finally:
        runner.close()
