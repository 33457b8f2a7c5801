"""What requests ask for beside tokens, with drafts: as stock vLLM has it, with them and without.

Log-probabilities, several answers, stop strings, and forms, whose drafts the grammar looks at. The
drafter knows what each of them is answered.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from lab.engine.step_runner import Arrival, EngineCase, Outcome, StepRunner, make_prompt, stock
from lab.engine.workloads import churn
from lab.known_drafts import KNOWN, known_drafts
from services.executor.plugin import draft_sampling
from tests.exact.cases import make_case
from tests.exact.drafts import count_drafts

# Engines run in this process: their warnings are not ours to fail on.
pytestmark = [
    pytest.mark.nightly,
    pytest.mark.filterwarnings("default"),
    pytest.mark.timeout(900),
]

CASE = make_case(share=0.7, speculative=known_drafts(num_drafts=3))
LENGTH = 60
FORMS: dict[str, dict[str, Any]] = {
    "regex": {"regex": "[a-f]{5}(-[0-9]{4}){6}"},
    "choice": {"choice": ["a rather long answer, the first", "a rather long answer, the second"]},
    "schema": {"json": {"type": "object", "properties": {"a": {"enum": [1234567, 7654321]}},
                        "required": ["a"], "additionalProperties": False}},
}  # fmt: skip


def asked(name: str, number: int, **sampling: Any) -> Arrival:
    return Arrival(
        request_id=name,
        prompt=make_prompt(100 + 37 * number, seed=1_000 + number),
        num_output_tokens=LENGTH,
        step=number,
        sampling=sampling,
    )


def workload() -> list[Arrival]:
    from vllm.sampling_params import StructuredOutputsParams

    formed = [
        asked(name, 4 + n, ignore_eos=False, structured_outputs=StructuredOutputsParams(**form))
        for n, (name, form) in enumerate(FORMS.items())
    ]
    return [
        asked("plain", 0),
        asked("likely", 1, logprobs=3),
        asked("two", 2, n=2, temperature=1.0, seed=5),
        asked("certain", 3, temperature=1.0, top_k=1, seed=5),
        *formed,
    ]


@pytest.fixture(scope="module")
def answers() -> Iterator[dict[str, Outcome]]:
    """Return what stock vLLM answers without drafts, and both engines with them.

    Its sampler is put right for all of them, as `services/executor/plugin/draft_sampling.py` says.
    """
    draft_sampling.repair()
    given = workload()
    plain = run(replace(stock(CASE), speculative=None), given)[0]
    stopped = plain.texts["plain"]
    given.append(asked("stop", 0, stop=[stopped[40:44]]))
    KNOWN.answers = {tuple(one.prompt): plain.tokens.get(one.request_id, ()) for one in given[:-1]}
    KNOWN.right_frac = 0.9
    found = {"plain": plain}
    for name, case in (("stock", stock(CASE)), ("layerwise", CASE)):
        found[name], seen = run(case, given)
        assert found[name].num_preemptions == 0
        assert 100 <= seen["accepted"] < seen["drafted"]
    yield found
    KNOWN.answers = {}


def run(case: EngineCase, given: list[Arrival]) -> tuple[Outcome, Counter[str]]:
    runner = StepRunner(case)
    try:
        with pytest.MonkeyPatch.context() as patch:
            seen = count_drafts(runner, patch)
            hook = None if case.kv is None else churn(1)
            return runner.run(given, hook=hook, check=False), seen
    finally:
        runner.close()


def test_greedy_tokens_are_those_without_drafts(answers: dict[str, Outcome]) -> None:
    for name in ("plain", "likely", "certain", *FORMS):
        tokens = answers["plain"].tokens[name]
        assert answers["layerwise"].tokens[name] == tokens == answers["stock"].tokens[name]


def test_several_sampled_answers_are_stocks_with_the_same_drafts(
    answers: dict[str, Outcome],
) -> None:
    first, second = (answers["layerwise"].tokens[name] for name in ("two", "two/1"))

    assert [first, second] == [answers["stock"].tokens[name] for name in ("two", "two/1")]
    assert first != second
    assert [len(first), len(second)] == [LENGTH] * 2


def test_forms_are_kept_to_their_end(answers: dict[str, Outcome]) -> None:
    for name in FORMS:
        texts = {one: answers[one].texts[name] for one in answers}
        assert len(set(texts.values())) == 1
        assert answers["layerwise"].finish_reasons[name] == "stop"


def test_each_accepted_token_has_its_log_probability(answers: dict[str, Outcome]) -> None:
    ours = answers["layerwise"].logprobs["likely"]

    assert len(ours) == LENGTH
    assert ours == answers["stock"].logprobs["likely"]
    assert ours == pytest.approx(answers["plain"].logprobs["likely"], abs=1e-4)


def test_a_stop_string_ends_an_answer_within_a_burst(answers: dict[str, Outcome]) -> None:
    whole = answers["plain"].texts["plain"]
    for one in ("stock", "layerwise"):
        text = answers[one].texts["stop"]
        assert whole.startswith(text)
        assert len(text) <= 40
        assert answers[one].finish_reasons["stop"] == "stop"
