"""Copies fail, hang and change bytes under a real engine: no wrong token leaves.

One engine with the asynchronous scheduler; `tests/exact/failures.py` runs the other ones.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from lab.engine.conversations import conversations
from lab.engine.step_runner import Arrival, EngineCase, Outcome, StepRunner, first_difference
from lab.engine.workloads import churn, every, fixed, holds, mixed, random_way, together
from services.executor.kv_options import GuardMode, KVOptions
from services.placement.run.resume import ResumeWay
from tests.exact.cached_prefixes import MAX_ROUNDS, Hits
from tests.exact.evidence import assert_pool_is_whole
from tests.exact.failing_engine import FaultRates
from tests.exact.failure_cases import ALONE, CONVERSING, TOGETHER, assert_right, run_with_faults
from tests.exact.reference import answers_to, reference

pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.timeout(900)]

CASE = EngineCase(
    num_blocks=168,
    kv=KVOptions(
        host_bytes=256 << 20,
        restore_when_free_frac=0.02,
        integrity_guard=GuardMode.ALL,
        poison=True,
    ),
    asynchronous=True,
)
SAMPLED = [
    replace(arrival, sampling={"temperature": 1.0, "top_p": 0.9, "seed": 7, "logprobs": 2})
    for arrival in mixed(8)[1:5]
]


@pytest.fixture(scope="module")
def runner() -> Iterator[StepRunner]:
    runner = StepRunner(CASE)
    yield runner
    runner.close()


@pytest.fixture(scope="module")
def expected() -> Outcome:
    """What stock vLLM answers."""
    return answers_to(mixed(8), reference("float32")["mixed"])


@pytest.fixture(scope="module")
def expected_turns() -> Outcome:
    return reference("float32")["conversations"]


def first_conversations(number: int, answers: Outcome) -> list[Arrival]:
    """Return all turns of so many conversations, and another end of the first one."""
    return [turn for turn in conversations(answers.tokens) if turn.request_id < f"c{number}"]


def forgetting(absorb: Callable[[Any], Any]) -> Callable[[Any], dict[str, Any]]:
    """Return an `absorb` after which no request that lost its KV begins anew."""

    def absorb_and_forget(feedback: Any) -> dict[str, Any]:
        absorb(feedback)
        return {}

    return absorb_and_forget


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ALONE)
def test_each_failure_alone_leaves_the_tokens_exact(
    runner: StepRunner, expected: Outcome, kind: str
) -> None:
    run = run_with_faults(runner, ALONE[kind], hook=churn(2))

    assert_right(run, expected.tokens)
    assert sum(run.faults.values()) > 0
    assert_pool_is_whole(runner)


def test_all_failures_together_leave_the_tokens_exact(
    runner: StepRunner, expected: Outcome
) -> None:
    run = run_with_faults(runner, TOGETHER, hook=churn(3))

    assert_right(run, expected.tokens)
    assert min(run.faults.values()) > 0
    assert run.counts.num_recomputed_requests > 0
    assert_pool_is_whole(runner)


def test_copies_that_fail_while_requests_pause_park_and_come_back(
    runner: StepRunner, expected: Outcome, monkeypatch: pytest.MonkeyPatch
) -> None:
    resumes, counters = runner.scheduler.control.resumes, runner.scheduler.block_owner.counters
    before, was_lost = counters.copy(), False
    for seed in range(MAX_ROUNDS):
        monkeypatch.setattr(resumes, "choose_way", random_way(seed))

        hook = together(churn(seed, share=0.1), holds(seed))
        run = run_with_faults(runner, TOGETHER, hook=hook)

        assert_right(run, expected.tokens)
        was_lost |= bool(run.lost)
        missing = [w for w in ResumeWay if counters.num_resumes(w) == before.num_resumes(w)]
        if was_lost and not missing:
            break
    assert was_lost
    assert not missing
    assert_pool_is_whole(runner)


def test_aborts_in_the_middle_of_failing_copies(runner: StepRunner, expected: Outcome) -> None:
    aborted = {"r0": 12, "r2": 25, "r5": 33}
    workload = [replace(a, abort_at=aborted.get(a.request_id)) for a in mixed(8)]

    run = run_with_faults(runner, TOGETHER, hook=churn(4), workload=workload)

    assert_right(run, {r: t for r, t in expected.tokens.items() if r not in aborted})
    assert_pool_is_whole(runner)


def test_the_third_loss_ends_a_request_with_an_error_and_the_others_are_exact(
    runner: StepRunner, expected: Outcome
) -> None:
    workload = [a for a in mixed(8) if a.request_id in ("r0", "r1", "r4")]

    run = run_with_faults(
        runner, FaultRates(load_fails=1.0), hook=fixed({"r1": every(2, 8)}), workload=workload
    )

    assert run.outcome.finish_reasons == {"r0": "length", "r1": "error", "r4": "length"}
    assert_right(run, {r: expected.tokens[r] for r in run.outcome.finish_reasons})
    assert run.lost == {"r1"}
    assert run.counts.num_given_up_requests == 1
    assert run.counts.num_recomputed_requests == 2
    assert_pool_is_whole(runner)


def test_prefixes_that_go_wrong_on_their_way_back_leave_all_turns_exact(
    runner: StepRunner, expected_turns: Outcome, monkeypatch: pytest.MonkeyPatch
) -> None:
    hits, turns = Hits(runner, monkeypatch), first_conversations(4, expected_turns)
    right = {turn.request_id: expected_turns.tokens[turn.request_id] for turn in turns}
    for seed in range(MAX_ROUNDS):
        choose_way = random_way(seed)
        monkeypatch.setattr(runner.scheduler.control.resumes, "choose_way", choose_way)

        run = run_with_faults(runner, CONVERSING, hook=churn(seed, share=0.1), workload=turns)

        assert_right(run, right)
        if hits.num_blocks.keys() & run.lost:
            break
    assert hits.num_blocks.keys() & run.lost
    assert_pool_is_whole(runner)


def test_if_requests_ran_on_with_cached_blocks_that_did_not_come_back_wrong_tokens_would_leave(
    runner: StepRunner, expected_turns: Outcome, monkeypatch: pytest.MonkeyPatch
) -> None:
    resumes, losses = runner.scheduler.control.resumes, runner.scheduler.recovery.losses
    monkeypatch.setattr(resumes, "choose_way", lambda *_: ResumeWay.HOST_RESIDENT)
    monkeypatch.setattr(losses, "absorb", forgetting(losses.absorb))
    hits, turns = Hits(runner, monkeypatch), first_conversations(2, expected_turns)

    run = run_with_faults(runner, FaultRates(load_fails=0.05), workload=turns)

    wrong = {name for name, got in run.outcome.tokens.items() if got != expected_turns.tokens[name]}
    assert hits.num_blocks.keys() & wrong


def test_garbage_logits_of_a_request_leave_the_sampling_of_the_others_alone(
    runner: StepRunner,
) -> None:
    placed = fixed({"r2": every(2, 8)})  # nobody else has anything to load
    expected = runner.run(SAMPLED, hook=placed)

    run = run_with_faults(runner, FaultRates(load_fails=0.02), hook=placed, workload=SAMPLED)

    assert run.lost == {"r2"}  # its loads left NaN behind
    others = expected.tokens.keys() - run.lost
    assert {r: run.outcome.tokens[r] for r in others} == {r: expected.tokens[r] for r in others}


def test_failures_are_counted_by_cause(runner: StepRunner, expected: Outcome) -> None:
    run = run_with_faults(runner, TOGETHER, seed=2, hook=churn(6))

    sums, totals = run.outcome.sums, run.counts
    assert sums["num_checked_blocks"] > 0
    assert min(sums[f"num_{kind}_copies"] for kind in ("failed", "hung", "corrupt")) > 0
    num_losses = totals.num_losses_failed + totals.num_losses_hung + totals.num_losses_corrupt
    assert num_losses == totals.num_recomputed_requests + totals.num_given_up_requests > 0


def test_if_the_tokens_were_not_dropped_wrong_ones_would_leave(
    runner: StepRunner, expected: Outcome, monkeypatch: pytest.MonkeyPatch
) -> None:
    losses = runner.scheduler.recovery.losses
    monkeypatch.setattr(losses, "absorb", forgetting(losses.absorb))
    run = run_with_faults(
        runner, FaultRates(load_fails=0.05), hook=fixed({f"r{n}": every(2, 8) for n in range(8)})
    )

    assert first_difference(expected, run.outcome) != {}
