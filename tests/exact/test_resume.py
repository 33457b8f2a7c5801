"""An engine goes on with answers that another one began: nothing of them differs.

Each is cut behind its first token, in its first third, before its last token and behind it. The
engine that goes on has their prompts in no cache, in its own cache with all of their output, and on
the host; layers leave and come back, and requests pause and are parked, at random.
"""

from collections.abc import Iterator, Mapping

import pytest

from lab.engine.step_runner import EngineCase, StepRunner
from lab.engine.workloads import churn, holds, together
from services.control.options import ControllerOptions
from tests.exact.cases import make_case
from tests.exact.continued import Answer, Question, ask, questions, stopping
from tests.exact.evidence import assert_pool_is_whole

# Engines run in this process: their warnings are not ours to fail on.
pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.timeout(1_800)]

PLAIN = EngineCase(num_blocks=4_096, controller=ControllerOptions(), prefix_caching=True)


@pytest.fixture(scope="module")
def plain() -> Iterator[StepRunner]:
    runner = StepRunner(PLAIN)
    yield runner
    runner.close()


Known = tuple[dict[str, Question], dict[str, Answer]]


@pytest.fixture(scope="module")
def undisturbed(plain: StepRunner) -> Known:
    """What is asked, and what is answered without an interruption."""
    asked = questions(1)
    answers = ask(plain, asked)
    strings = stopping(answers, asked)
    return asked | strings, answers | ask(plain, strings)


def cut(known: Known, where: str) -> tuple[dict[str, Question], dict[str, int]]:
    """Return the requests with the first part of their answers, and its length."""
    asked, answers = known
    begun, lengths = {}, {}
    for name, question in asked.items():
        ids = answers[name].ids
        length = {"first": 1, "third": max(1, len(ids) // 3), "last": len(ids) - 1}.get(
            where, len(ids)
        )
        begun[name] = Question(question.prompt, question.sampling, tuple(ids[:length]))
        lengths[name] = length
    return begun, lengths


def assert_continued(
    known: Known, lengths: Mapping[str, int], answers: Mapping[str, Answer]
) -> None:
    for name, length in lengths.items():
        expected, answer = known[1][name].rest(length), answers[name]
        assert answer.ids == expected.ids, name
        assert answer.texts == expected.texts, name
        assert answer.ending == expected.ending, name
        assert answer.likeliest == expected.likeliest, name
        assert answer.logprobs == pytest.approx(expected.logprobs, abs=1e-4), name


CUTS = pytest.mark.parametrize("where", ["first", "third", "last", "end"])


@CUTS
def test_on_an_engine_that_has_the_whole_answer_in_its_cache(
    plain: StepRunner, undisturbed: Known, where: str
) -> None:
    begun, lengths = cut(undisturbed, where)

    assert_continued(undisturbed, lengths, ask(plain, begun))


@pytest.fixture(scope="module")
def layers(undisturbed: Known) -> Iterator[StepRunner]:
    runner = StepRunner(make_case())
    yield runner
    runner.close()


@CUTS
def test_while_layers_move_and_requests_pause_and_are_parked(
    layers: StepRunner, undisturbed: Known, where: str
) -> None:
    begun, lengths = cut(undisturbed, where)

    answers = ask(layers, begun, hook=together(churn(7), holds(7)))

    assert_continued(undisturbed, lengths, answers)
    assert_pool_is_whole(layers)
