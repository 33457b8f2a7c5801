"""An engine goes on with answers that another one began: nothing of them differs.

Each is cut behind its first token, in its first third, before its last token and behind it. The
engine that goes on has their prompts in no cache, in its own cache with all of their output, and on
the host; layers leave and come back, and requests pause and are parked, at random.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import pytest

from lab.engine.step_runner import EngineCase, Hook, StepRunner
from lab.engine.workloads import churn, holds, together
from lab.known_drafts import KNOWN, known_drafts
from services.control.options import ControllerOptions
from services.executor.plugin import draft_sampling
from tests.exact.cases import SLOW_LINK, STANDING, make_case
from tests.exact.continued import MAX_TOKENS, Answer, Question, ask, questions, stopping
from tests.exact.drafts import count_drafts
from tests.exact.evidence import assert_pool_is_whole
from tests.exact.kinds import CASES, start

# Engines run in this process: their warnings are not ours to fail on.
pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.timeout(1_800)]

PLAIN = EngineCase(num_blocks=4_096, controller=ControllerOptions(), prefix_caching=True)


@contextmanager
def started(case: EngineCase) -> Iterator[StepRunner]:
    runner = start(case)
    try:
        yield runner
    finally:
        runner.close()


@pytest.fixture(scope="module")
def plain() -> Iterator[StepRunner]:
    with started(PLAIN) as runner:
        yield runner


Known = tuple[dict[str, Question], dict[str, Answer]]


def answered(plain: StepRunner) -> Known:
    """Return what is asked, and what is answered without an interruption."""
    asked = questions(1)
    answers = ask(plain, asked)
    strings = stopping(answers, asked)
    return asked | strings, answers | ask(plain, strings)


@pytest.fixture(scope="module")
def undisturbed(plain: StepRunner) -> Known:
    return answered(plain)


# How much of an answer of so many tokens is known.
CUTS: dict[str, Callable[[int], int]] = {
    "first": lambda length: 1,
    "third": lambda length: max(1, length // 3),
    "last": lambda length: length - 1,
    "end": lambda length: length,
}


def cut(
    known: Known, num_known: Callable[[int], int]
) -> tuple[dict[str, Question], dict[str, int]]:
    """Return the requests with the first part of their answers, and its length."""
    begun, lengths = {}, {}
    for name, question in known[0].items():
        ids = known[1][name].ids
        lengths[name] = num_known(len(ids))
        begun[name] = Question(question.prompt, question.sampling, tuple(ids[: lengths[name]]))
    return begun, lengths


def assert_continued(
    known: Known,
    lengths: Mapping[str, int],
    answers: Mapping[str, Answer],
    *,
    of_each_token: bool = True,
) -> None:
    """`of_each_token`: texts are compared token by token; else as a whole."""
    for name, length in lengths.items():
        expected, answer = known[1][name].rest(length), answers[name]
        assert answer.ids == expected.ids, name
        if of_each_token:
            assert answer.texts == expected.texts, name
        assert "".join(answer.texts) == "".join(expected.texts), name
        assert answer.ending == expected.ending, name
        assert answer.likeliest == expected.likeliest, name
        assert answer.logprobs == pytest.approx(expected.logprobs, abs=1e-4), name


AT_EACH_CUT = pytest.mark.parametrize("num_known", CUTS.values(), ids=CUTS)


@AT_EACH_CUT
def test_on_an_engine_that_has_the_whole_answer_in_its_cache(
    plain: StepRunner, undisturbed: Known, num_known: Callable[[int], int]
) -> None:
    begun, lengths = cut(undisturbed, num_known)

    assert_continued(undisturbed, lengths, ask(plain, begun))


TOKENS_AT_A_TIME = 6
PARTS = {
    f"{first} to {first + TOKENS_AT_A_TIME - 1}": range(first, first + TOKENS_AT_A_TIME)
    for first in range(1, MAX_TOKENS + 1, TOKENS_AT_A_TIME)
}


@pytest.mark.nightly
@pytest.mark.parametrize("part", PARTS.values(), ids=PARTS)
def test_behind_every_token_of_every_answer(
    plain: StepRunner, undisturbed: Known, part: range
) -> None:
    for num_tokens in part:
        begun, lengths = cut(undisturbed, partial(min, num_tokens))

        assert_continued(undisturbed, lengths, ask(plain, begun))


def spread(known: Known) -> list[dict[str, int]]:
    """Deal all numbers of tokens out, each to an answer that has so many: the n-th of each answer
    makes the n-th round.
    """
    names, rounds = deque(known[0]), list[dict[str, int]]()
    for num_tokens in range(1, MAX_TOKENS + 1):
        name = next(one for one in names if len(known[1][one].ids) >= num_tokens)
        names.remove(name)
        names.append(name)
        place = next((one for one in rounds if name not in one), None)
        if place is None:
            rounds.append(place := {})
        place[name] = num_tokens
    return rounds


def at_random(runner: StepRunner) -> Hook | None:
    """Return what moves layers, pauses and parks; a policy does by itself."""
    return together(churn(7), holds(7)) if runner.case.controller is None else None


def assert_continued_behind_every_token(known: Known, runner: StepRunner) -> None:
    """Have an engine go on behind each number of tokens, in one of the answers."""
    of_each_token = runner.case.speculative is None  # else a step's tokens have one text
    seen = set[int]()
    for lengths in spread(known):
        begun = {
            name: replace(known[0][name], begun=tuple(known[1][name].ids[:length]))
            for name, length in lengths.items()
        }

        answers = ask(runner, begun, hook=at_random(runner))

        assert_continued(known, lengths, answers, of_each_token=of_each_token)
        seen.update(lengths.values())
    assert seen == {*range(1, MAX_TOKENS + 1)}


NIGHTLY_PLAIN = {
    "in small chunks": replace(PLAIN, max_num_batched_tokens=97, prefix_caching=False),
    "asynchronous": replace(PLAIN, asynchronous=True),
    "evenflow": replace(PLAIN, controller=ControllerOptions(policy="evenflow"), num_blocks=40),
    "tensor-parallel": replace(PLAIN, tensor_parallel_size=2),
    "pipeline-parallel": replace(PLAIN, pipeline_parallel_size=2),
}


@pytest.mark.nightly
@pytest.mark.parametrize("case", NIGHTLY_PLAIN.values(), ids=NIGHTLY_PLAIN)
def test_on_another_engine_that_keeps_its_own_blocks(undisturbed: Known, case: EngineCase) -> None:
    with started(case) as runner:
        for num_known in CUTS.values():
            begun, lengths = cut(undisturbed, num_known)

            assert_continued(undisturbed, lengths, ask(runner, begun))
        assert_continued_behind_every_token(undisturbed, runner)


DRAFTS = known_drafts(num_drafts=3)
DRAFTING = {
    "plain": replace(PLAIN, speculative=DRAFTS),
    "layers": make_case(speculative=DRAFTS),
}


@pytest.mark.nightly
@pytest.mark.parametrize("right_frac", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("case", DRAFTING.values(), ids=DRAFTING)
def test_behind_every_token_with_drafts(
    undisturbed: Known, monkeypatch: pytest.MonkeyPatch, case: EngineCase, right_frac: float
) -> None:
    """Those that are drawn greedily: what is drawn otherwise depends on the drafts."""
    draft_sampling.repair()
    known = drawn_greedily(undisturbed)
    KNOWN.right_frac = right_frac
    KNOWN.answers = {tuple(one.prompt): known[1][name].ids for name, one in known[0].items()}
    with started(case) as runner:
        seen = count_drafts(runner, monkeypatch)

        assert_continued_behind_every_token(known, runner)

        assert seen["drafted"] >= 100
        assert (seen["accepted"] > 0) == (right_frac > 0)
        if case.kv is not None:
            assert_pool_is_whole(runner)


def drawn_greedily(known: Known) -> Known:
    """Return what an engine with drafts answers alike, and takes."""
    names = [
        name
        for name, question in known[0].items()
        if not {"temperature", "logit_bias"} & question.sampling.keys()
    ]
    return {name: known[0][name] for name in names}, {name: known[1][name] for name in names}


OTHERS = {name: CASES[name] for name in ("gpt_oss", "granite4")} | {
    "KV of eight bits": make_case(kv_cache_dtype="fp8_e4m3")
}


@pytest.mark.nightly
@pytest.mark.parametrize("case", OTHERS.values(), ids=OTHERS)
def test_behind_every_token_of_other_models_while_layers_move(case: EngineCase) -> None:
    """Those with windows or with states beside full attention, and KV that is rounded."""
    whole = replace(case, kv=None, controller=ControllerOptions(), num_blocks=4_096)
    with started(whole) as plain:
        known = answered(plain)
        for num_tokens in range(1, MAX_TOKENS + 1):
            begun, lengths = cut(known, partial(min, num_tokens))

            assert_continued(known, lengths, ask(plain, begun))
    with started(case) as runner:
        assert_continued_behind_every_token(known, runner)
        assert_pool_is_whole(runner)


LAYERWISE = STANDING | {
    "evenflow": make_case(controller=ControllerOptions(policy="evenflow")),
    "ellm": make_case(controller=ControllerOptions(policy="ellm")),
    "nothing cached": make_case(options=replace(SLOW_LINK, prefix_caching=False)),
}


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(case, id=name, marks=() if name == "layers" else pytest.mark.nightly)
        for name, case in LAYERWISE.items()
    ],
)
def layers(request: pytest.FixtureRequest, undisturbed: Known) -> Iterator[StepRunner]:
    with started(request.param) as runner:
        yield runner


@AT_EACH_CUT
def test_while_layers_move_and_requests_pause_and_are_parked(
    layers: StepRunner, undisturbed: Known, num_known: Callable[[int], int]
) -> None:
    begun, lengths = cut(undisturbed, num_known)

    answers = ask(layers, begun, hook=at_random(layers))

    assert_continued(undisturbed, lengths, answers)
    assert_pool_is_whole(layers)


@pytest.mark.nightly
def test_behind_every_token_while_layers_move(layers: StepRunner, undisturbed: Known) -> None:
    assert_continued_behind_every_token(undisturbed, layers)
    assert_pool_is_whole(layers)
