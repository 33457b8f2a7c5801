"""Grammars are compiled apart from the engine, once each, and in bounded time."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from services.executor.grammar_check import DEADLY, TOO_COMPLEX, GrammarCheck, GrammarError

xgr = pytest.importorskip("xgrammar")

from services.executor.grammar_process import NO_ANSWER, fault_of, make_compiler  # noqa: E402

TIMEOUT_S = 1.0
NUM_RULES = 1_500
# Takes some 40 s to compile for the smallest vocabulary.
ENDLESS = (
    "root ::= "
    + " | ".join(f"r{i}" for i in range(NUM_RULES))
    + "".join(f'\nr{i} ::= [a-z]* "x{i}" [a-z]* root?' for i in range(NUM_RULES))
)


def describe_tokenizer() -> str:
    """Describe a vocabulary of all bytes, all pairs of letters and an end."""
    letters = range(97, 123)
    pairs = [bytes([a, b]) for a in letters for b in letters]
    info = xgr.TokenizerInfo(
        [*(bytes([byte]) for byte in range(256)), b"<end>", *pairs], stop_token_ids=[256]
    )
    return str(info.serialize_json())


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("grammar", 'root ::= "a" | root "b"'),
        ("grammar", 'root ::= ""'),
        ("regex", "(ab)+"),
        ("json", '{"type": "object", "properties": {"child": {"$ref": "#"}}}'),
        ("json", '{"type": "object", "patternProperties": {"^a": {"type": "string"}}}'),
    ],
)
def test_a_form_that_an_answer_can_have_is_taken(kind: str, text: str) -> None:
    assert fault_of(make_compiler(describe_tokenizer()), kind, text) == ""


@pytest.mark.parametrize(
    ("kind", "text", "fault"),
    [
        ("grammar", "root ::= root", NO_ANSWER),
        ("grammar", 'root ::= other\nother ::= root "x"', NO_ANSWER),
        ("json", '{"$ref": "#"}', NO_ANSWER),
        ("json", '{"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}', NO_ANSWER),
        ("regex", "[^\\x00-\\U0010ffff]", NO_ANSWER),
        (
            "json",
            '{"type": "object", "patternProperties": {"(": {}}}',
            "Regex parsing error at position 2: The parenthesis is not closed.",
        ),
    ],
)
def test_a_form_that_no_answer_can_have_has_a_fault(kind: str, text: str, fault: str) -> None:
    assert fault_of(make_compiler(describe_tokenizer()), kind, text) == fault


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def check() -> AsyncIterator[GrammarCheck]:
    check = GrammarCheck(describe_tokenizer, timeout_s=TIMEOUT_S)
    yield check
    await check.close()


@pytest.mark.asyncio(loop_scope="module")
async def test_one_process_serves_all_and_each_form_is_compiled_once(check: GrammarCheck) -> None:
    await asyncio.gather(*(check.check("regex", f"a{{{k}}}") for k in range(1, 9)))
    with pytest.raises(GrammarError, match=NO_ANSWER):
        await check.check("grammar", "root ::= root")
    process = check._process
    assert process is not None
    process.kill()
    await process.wait()

    await check.check("regex", "a{1}")  # nobody is there to be asked
    with pytest.raises(GrammarError, match=NO_ANSWER):
        await check.check("grammar", "root ::= root")
    with pytest.raises(GrammarError, match=DEADLY):
        await check.check("regex", "b")
    await check.check("regex", "b")  # by a new process


@pytest.mark.asyncio(loop_scope="module")
async def test_a_form_without_end_is_given_up_and_the_next_one_is_compiled(
    check: GrammarCheck,
) -> None:
    await check.check("regex", "e")
    first = check._process

    with pytest.raises(GrammarError, match=TOO_COMPLEX):
        await check.check("grammar", ENDLESS)
    assert first is not None
    await first.wait()
    await check.check("regex", "f")


@pytest.mark.asyncio(loop_scope="module")
async def test_a_client_that_leaves_does_not_shift_the_answers(check: GrammarCheck) -> None:
    await check.check("regex", "c")
    leaving = asyncio.create_task(check.check("grammar", 'root ::= root "z"'))
    await asyncio.sleep(0)  # the question is on its way
    leaving.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await leaving

    await check.check("regex", "d")
    with pytest.raises(GrammarError, match=NO_ANSWER):
        await check.check("grammar", "root ::= root")
