"""What a run with drafts must have gone through, and how many of them were right."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lab.engine.step_runner import Arrival, Outcome, StepRunner
from lab.engine.workloads import long_prompt, mixed
from tests.exact.evidence import assert_pool_is_whole, assert_tokens, num_layer_loads
from tests.exact.reference import reference

# The fewer steps a run takes, the fewer layers are loaded.
MIN_LAYER_LOADS, MIN_REUSED_EVICTIONS = 200, 10


def known_answers(
    answers: Mapping[str, Outcome] | None = None,
) -> dict[tuple[int, ...], list[int]]:
    """Return stock vLLM's answers by prompt, for drafters that know them.

    `answers`: of another model than the exactness model, by workload.
    """
    answers = answers or reference("float32")
    return {
        tuple(arrival.prompt): answers[name].tokens[arrival.request_id]
        for name, workload in (("mixed", mixed()), ("long", long_prompt()))
        for arrival in workload
        if arrival.request_id in answers[name].tokens
    }


def eagle_drafts(head: Path, *, num_drafts: int = 3) -> dict[str, Any]:
    """Return vLLM's `speculative_config` with the head of a directory."""
    return {"method": "eagle", "model": str(head), "num_speculative_tokens": num_drafts}


def draft_model_drafts(model: Path, *, num_drafts: int = 3) -> dict[str, Any]:
    """Return vLLM's `speculative_config` with the draft model of a directory."""
    config = eagle_drafts(model, num_drafts=num_drafts)
    return {**config, "method": "draft_model"}


def count_drafts(runner: StepRunner, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Return how many tokens are drafted and accepted from now on."""
    seen, count = Counter[str](), runner.scheduler.make_spec_decoding_stats

    def counted(stats: Any, **numbers: Any) -> Any:
        seen.update(drafted=numbers["num_draft_tokens"], accepted=numbers["num_accepted_tokens"])
        return count(stats, **numbers)

    monkeypatch.setattr(runner.scheduler, "make_spec_decoding_stats", counted)
    return seen


def assert_exact(
    runner: StepRunner, name: str, outcome: Outcome, workload: Sequence[Arrival]
) -> None:
    """Assert stock vLLM's tokens, from a run whose layers left and came back."""
    assert_tokens(reference("float32")[name], outcome, workload)
    assert min(outcome.num_offloads, outcome.num_restores) >= 1
    assert num_layer_loads(runner, outcome) >= MIN_LAYER_LOADS
    assert outcome.num_reused_evictions >= MIN_REUSED_EVICTIONS
    assert_pool_is_whole(runner)


def answers_of(name: str, workload: list[Arrival]) -> Any:
    outcome = reference("float32")[name]
    return replace(outcome, tokens={a.request_id: outcome.tokens[a.request_id] for a in workload})
