"""Drafts beside layer-wise KV: tokens identical to stock vLLM, however many guesses are right.

A drafter that knows the answers is wrong as often as it is asked to be: so nothing to everything is
accepted. What it guesses depends on the tokens before it alone, so that stock vLLM is given the
same drafts.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from cli.client.engine_view import summary_lines
from cli.client.engine_watch import EngineState
from lab.engine.step_runner import StepRunner, first_difference
from lab.engine.workloads import (
    churn,
    holds,
    long_prompt,
    mixed,
    stopping,
    with_aborts,
)
from lab.known_drafts import KNOWN, known_drafts
from services.control.measures.tokens_per_step import TokensPerStep
from services.executor.convert import observation_to_proto
from services.executor.observation import from_plain
from tests.exact.cases import make_case, num_groups
from tests.exact.drafts import answers_of, assert_exact, count_drafts, known_answers
from tests.exact.evidence import assert_pool_is_whole, assert_tokens
from tests.exact.failing_engine import FaultRates
from tests.exact.failure_cases import run_with_faults
from tests.exact.reference import reference

# Engines run in this process: their warnings are not ours to fail on.
pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.timeout(900)]

CASES = {
    "three": make_case(speculative=known_drafts(num_drafts=3)),
    "one-in-small-chunks": make_case(
        layers_per_group=2,
        buffers=1,
        max_num_batched_tokens=97,
        speculative=known_drafts(num_drafts=1),
    ),
    "five-in-halves": make_case(layers_per_group=4, speculative=known_drafts(num_drafts=5)),
}
EVERY_COMMIT = "three"


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(case, id=name, marks=() if name == EVERY_COMMIT else pytest.mark.nightly)
        for name, case in CASES.items()
    ],
)
def runner(request: pytest.FixtureRequest) -> Iterator[StepRunner]:
    runner = StepRunner(request.param)
    yield runner
    runner.close()


ONE_ENGINE = pytest.mark.parametrize("runner", [CASES[EVERY_COMMIT]], ids=["three"], indirect=True)


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let drafters know what stock vLLM answers."""
    monkeypatch.setattr(KNOWN, "answers", known_answers())


@pytest.fixture
def seen(runner: StepRunner, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Return what `count_drafts` does, and how many more tokens than one the loop counts for each
    request that decodes.
    """
    seen = count_drafts(runner, monkeypatch)

    def decoded(brought: Sequence[int]) -> None:
        seen.update(counted=sum(brought) - len(brought))

    monkeypatch.setattr(runner.scheduler.loop.counts, "decoded", decoded)
    return seen


def draft(monkeypatch: pytest.MonkeyPatch, right_frac: float) -> None:
    monkeypatch.setattr(KNOWN, "right_frac", right_frac)


@pytest.mark.parametrize("right_frac", [0.0, 0.5, 0.8, 1.0])
def test_placements_that_change_at_any_step_leave_the_tokens_exact(
    right_frac: float, runner: StepRunner, seen: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    draft(monkeypatch, right_frac)
    workload = mixed(num_groups(runner.case))

    outcome = runner.run(workload, hook=churn(1))

    assert_exact(runner, "mixed", outcome, workload)
    num_cut = seen["accepted"] - seen["counted"]  # behind an answer's limit
    assert 0 <= num_cut <= runner.case.speculative["num_speculative_tokens"] * len(workload)
    share = seen["accepted"] / seen["drafted"]  # what is right behind a wrong one is rejected, too
    assert share == right_frac if right_frac in (0.0, 1.0) else 0.1 < share < right_frac + 0.1


@ONE_ENGINE
def test_watch_shows_what_a_step_brings(
    runner: StepRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[str] = []

    def look(scheduler: Any, step: int) -> None:
        update = observation_to_proto(from_plain(scheduler.observe()))
        state = EngineState()
        state.take(update, now_s=float(step))
        shown.append(summary_lines(state)[0])

    ledger = runner.scheduler.loop.ledger
    monkeypatch.setattr(ledger, "tokens_per_step", TokensPerStep())
    draft(monkeypatch, 1.0)
    runner.run(mixed(num_groups(runner.case)), hook=look)

    assert ", 1.00 tokens per request and step" in shown[0]
    assert f", {ledger.tokens_per_step.mean:.2f} tokens per request and step" in shown[-1]
    assert ledger.tokens_per_step.mean > 2.5  # of 4, where the drafter says as many as it is asked


def test_the_guard_alone_keeps_requests_that_the_pool_does_not_hold(
    runner: StepRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    draft(monkeypatch, 0.8)
    groups = num_groups(runner.case)

    outcome = runner.run(mixed())
    longer = runner.run(long_prompt(groups))

    assert_exact(runner, "mixed", outcome, mixed())
    assert_exact(runner, "long", longer, long_prompt(groups))
    if runner.case == CASES[EVERY_COMMIT]:  # without drafts: none
        assert outcome.num_preemptions + longer.num_preemptions <= 1


@pytest.mark.parametrize("right_frac", [0.0, 0.8])
def test_pauses_and_parks_with_drafts_in_flight(
    right_frac: float, runner: StepRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    draft(monkeypatch, right_frac)
    workload = mixed(num_groups(runner.case))

    outcome = runner.run(workload, hook=holds(3))

    assert not first_difference(answers_of("mixed", workload), outcome)
    assert outcome.num_preemptions >= 5
    assert_pool_is_whole(runner)


def test_aborts_leave_the_others_exact(runner: StepRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    draft(monkeypatch, 0.8)
    workload = with_aborts(mixed(num_groups(runner.case)), seed=5)

    outcome = runner.run(workload, hook=churn(6))

    assert_exact(runner, "mixed", outcome, workload)


@ONE_ENGINE
def test_a_stop_string_in_the_middle_of_accepted_drafts(
    runner: StepRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    draft(monkeypatch, 1.0)
    answers = reference("float32")
    workload = stopping(answers["mixed"].texts)[: len(mixed(num_groups(runner.case)))]

    outcome = runner.run(workload, hook=churn(2))

    expected = answers["stopping"]
    for arrival in workload:
        assert outcome.texts[arrival.request_id] == expected.texts[arrival.request_id]
        reason = expected.finish_reasons[arrival.request_id]
        assert outcome.finish_reasons[arrival.request_id] == reason


@pytest.mark.nightly
@ONE_ENGINE
def test_who_loses_its_kv_with_drafts_in_flight_begins_anew(
    runner: StepRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    draft(monkeypatch, 0.8)
    rates = FaultRates(load_fails=0.003, save_fails=0.03)

    run = run_with_faults(runner, rates, hook=churn(3))

    assert run.lost
    assert_tokens(reference("float32")["mixed"], run.outcome, mixed(8))


@ONE_ENGINE
def test_drafts_that_fill_blocks_are_noticed(
    runner: StepRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control: a block is copied, and given up, with drafts in it that are rejected later."""
    draft(monkeypatch, 0.5)
    workload, scheduler = mixed(num_groups(runner.case)), runner.scheduler
    for place in (scheduler.connector, scheduler.kv_cache_manager.coordinator):
        monkeypatch.setattr(place, "num_accepted", lambda request_id, num_tokens: num_tokens)

    outcome = runner.run(workload, hook=churn(1), check=False)

    assert first_difference(answers_of("mixed", workload), outcome)
