"""A less urgent answer yields to urgent ones, comes back, and ends as stock vLLM's: an engine."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from lab.engine.closed_loop import asking
from lab.engine.step_runner import Arrival, StepRunner
from services.control.options import ControllerOptions
from services.placement.presets import Run
from services.placement.run.evenflow import decide
from services.placement.run.evenflow_rules import EvenflowRules
from services.placement.run.types import RunDecision, RunRequest, RunSnapshot
from tests.exact.cases import make_case
from tests.exact.urgent_stream import LOW, of_stock, urgent
from tests.stock_recipe import run_apart

pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.timeout(900)]

STEP_S = 0.01  # that a step takes by the clock of `Steps`
NUM_WAITING = 2  # urgent requests that always wait for room while the low one is there
MOST_URGENT = 300
RULES = EvenflowRules(raised_after_s=0.4, raised_turn_s=0.6)


@dataclass
class Steps:
    """The policy by a clock of steps: how fast a machine is decides nothing."""

    rules: EvenflowRules
    number: int = 0
    _ran: dict[str, tuple[int, int, int]] = field(default_factory=dict)  # since, waited, last

    def __call__(self, snapshot: RunSnapshot) -> RunDecision:
        self.number += 1
        requests = tuple(map(self._dated, snapshot.requests))
        decision = decide(replace(snapshot, requests=requests), self.rules)
        return replace(decision, valid_for_s=0.0)

    def _dated(self, request: RunRequest) -> RunRequest:
        now = self.number
        since, waited, last = self._ran.get(request.request_id, (now, 0, now))
        if request.runs:
            if last < now - 1:
                since, waited = now, now - last
            self._ran[request.request_id] = since, waited, now
            ages = STEP_S * (now - since), STEP_S * waited
            return replace(request, run_age_s=ages[0], waited_s=ages[1])
        self._ran[request.request_id] = since, waited, last
        return replace(request, waited_s=STEP_S * (now - last))


class UrgentStream(StepRunner):
    """Keeps urgent requests waiting for room for as long as the low one is there."""

    def add(self, arrival: Arrival) -> None:
        """Let a request arrive with its priority."""
        from vllm import SamplingParams

        self.engine.add_request(
            arrival.request_id,
            {"prompt_token_ids": list(arrival.prompt)},
            SamplingParams(max_tokens=arrival.num_output_tokens, temperature=0, ignore_eos=True),
            priority=1 if arrival.request_id == "low" else 0,
        )

    def stream(self, policy: Run) -> "Streamed":
        """Return what becomes of the low request and of those that come while it is there."""
        self.num_urgent, self.low = 0, LowSteps()
        schedule = self.scheduler.schedule

        def listened(*args: Any, **kwargs: Any) -> Any:
            output = schedule(*args, **kwargs)
            self.low.scheduled(self.scheduler.requests, output.num_scheduled_tokens)
            return output

        self.scheduler.schedule = listened
        try:
            with asking(self, "", run_policy=policy):
                outcome = self.run([LOW], hook=self._keep_busy)
        finally:
            self.scheduler.schedule = schedule
        return Streamed(outcome.tokens, self.low.losses, ended=self.num_urgent < MOST_URGENT)

    def _keep_busy(self, scheduler: Any, step: int) -> None:
        """Have urgent requests wait for as long as the low one is there, up to a number of them."""
        if "low" not in scheduler.requests:
            return
        num_waiting = len(scheduler.requests) - len(scheduler.running)
        num_waiting -= "low" not in {request.request_id for request in scheduler.running}
        for _ in range(min(NUM_WAITING - num_waiting, MOST_URGENT - self.num_urgent)):
            self.add(urgent(self.num_urgent))
            self.num_urgent += 1


@dataclass
class LowSteps:
    """What the low request has computed, and what of it is computed again."""

    num_computed: int = 0
    losses: list[int] = field(default_factory=list)  # tokens, at each return
    was_there: bool = True

    def scheduled(self, requests: Mapping[str, Any], num_scheduled: Mapping[str, int]) -> None:
        """Take in a step: the scheduler counts its tokens as computed already."""
        num_new = num_scheduled.get("low", 0)
        if num_new:
            end = requests["low"].num_computed_tokens
            if not self.was_there:
                self.losses.append(self.num_computed - (end - num_new))
            self.num_computed = end
        self.was_there = bool(num_new)


@dataclass(frozen=True)
class Streamed:
    """How a stream went."""

    tokens: Mapping[str, list[int]]
    losses: Sequence[int]  # tokens of the low request computed again, at each return
    ended: bool  # the low request, before the stream did


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[int]]:
    file: Path = tmp_path_factory.mktemp("stock") / "tokens.json"
    run_apart("tests.exact.urgent_stream", str(file))
    tokens: dict[str, list[int]] = json.loads(file.read_text())
    return tokens


@pytest.fixture(scope="module")
def runner() -> Iterator[UrgentStream]:
    runner = UrgentStream(make_case(controller=ControllerOptions(plan_timeout_s=30.0)))
    runner.run([replace(LOW, num_output_tokens=2)])  # brings the calibration
    yield runner
    runner.close()


def test_a_low_answer_ends_under_a_stream_of_urgent_ones_and_little_is_computed_anew(
    runner: UrgentStream, expected: dict[str, list[int]]
) -> None:
    streamed = runner.stream(Steps(RULES))

    assert streamed.ended
    assert streamed.tokens == {name: of_stock(expected, name) for name in streamed.tokens}
    assert len(streamed.tokens["low"]) == 500
    assert len(streamed.losses) >= 5
    # What it was writing into; and where the urgent ones outgrow the pool it does not wait for
    # copies under way, as many as a machine has in that time. Without any it loses hundreds.
    assert max(streamed.losses) < 4 * runner.case.block_size
    assert sum(streamed.losses) < 1_000
