"""Grammars are compiled apart from the engine, once each, and in bounded time."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from services.executor.prompts import grammar_check, grammar_compiler
from services.executor.prompts.grammar_check import GrammarCheck, GrammarError
from services.executor.prompts.grammar_compiler import DEADLY, TOO_COMPLEX, GrammarCompiler
from tests.byte_tokenizer import describe_tokenizer
from tests.gateways import until

pytest.importorskip("xgrammar")

from services.executor.prompts.grammar_process import NO_ANSWER

LONG_S = 600.0  # for what ends
SHORT_S = 0.5  # for what does not
NUM_RULES = 1_500
# Takes some 40 s to compile for the smallest vocabulary.
ENDLESS = (
    "root ::= "
    + " | ".join(f"r{i}" for i in range(NUM_RULES))
    + "".join(f'\nr{i} ::= [a-z]* "x{i}" [a-z]* root?' for i in range(NUM_RULES))
)


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def check() -> AsyncIterator[GrammarCheck]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grammar_compiler, "START_TIMEOUT_S", LONG_S)
        patch.setattr(grammar_check, "MAX_WAIT_S", LONG_S)
        check = GrammarCheck(describe_tokenizer, timeout_s=LONG_S)
        yield check
        await check.close()


def compiler_of(check: GrammarCheck) -> GrammarCompiler:
    """Return the one whose turn is next."""
    return check._idle[-1]


@pytest.mark.asyncio(loop_scope="module")
async def test_one_process_serves_a_tenant_and_each_form_is_compiled_once(
    check: GrammarCheck,
) -> None:
    forms = [f"a{{{k}}}" for k in range(1, 9)]
    await asyncio.gather(*(check.check("regex", form, tenant="alice") for form in forms))
    assert [compiler._process is None for compiler in check._compilers] == [True, False]
    with pytest.raises(GrammarError, match=NO_ANSWER):
        await check.check("grammar", "root ::= root")
    process = compiler_of(check)._process
    assert process is not None
    process.kill()
    await process.wait()

    await check.check("regex", "a{1}")  # nobody is there to be asked
    with pytest.raises(GrammarError, match=NO_ANSWER):
        await check.check("grammar", "root ::= root")
    await check.check("regex", "b")  # by a new process
    assert compiler_of(check)._process is not process


@pytest.mark.asyncio(loop_scope="module")
async def test_a_form_that_two_processes_died_of_is_asked_of_no_third(
    check: GrammarCheck, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[object] = []

    async def die(process: object, question: object, timeout_s: float) -> str:
        asked.append(question)
        raise EOFError

    await check.check("regex", "g")
    with monkeypatch.context() as patch:
        patch.setattr(compiler_of(check), "_ask", die)
        for _ in range(3):
            with pytest.raises(GrammarError, match=DEADLY):
                await check.check("regex", "h")

    assert asked == [["regex", "h"]] * 2


@pytest.mark.asyncio(loop_scope="module")
async def test_a_form_without_end_is_given_up_and_the_next_one_is_compiled(
    check: GrammarCheck, monkeypatch: pytest.MonkeyPatch
) -> None:
    await check.check("regex", "e")
    first = compiler_of(check)._process

    with monkeypatch.context() as patch:
        patch.setattr(compiler_of(check), "_timeout_s", SHORT_S)
        with pytest.raises(GrammarError, match=TOO_COMPLEX):
            await check.check("grammar", ENDLESS)
    assert first is not None
    await first.wait()
    with pytest.raises(GrammarError, match=TOO_COMPLEX):
        await check.check("grammar", ENDLESS)  # for which no process was started
    assert compiler_of(check)._process is None
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


async def test_a_tenants_forms_keep_no_other_tenants_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun: list[str] = []
    gates = {text: asyncio.Event() for text in "abcd"}

    async def fault(compiler: GrammarCompiler, kind: str, text: str) -> str:
        begun.append(text)
        await gates[text].wait()
        return ""

    monkeypatch.setattr(GrammarCompiler, "fault", fault)
    check = GrammarCheck(describe_tokenizer, timeout_s=LONG_S)
    asked = [("a", "alice"), ("b", "alice"), ("c", "bob"), ("d", "carol")]
    async with asyncio.TaskGroup() as checks:
        for text, tenant in asked:
            checks.create_task(check.check("regex", text, tenant=tenant))
        await until(lambda: len(begun) == 2)
        assert begun == ["a", "c"]  # one of alice's; then both processes are busy
        gates["c"].set()
        await until(lambda: len(begun) == 3)
        assert begun[2] == "d"
        for gate in gates.values():
            gate.set()

    assert begun == ["a", "c", "d", "b"]
