"""Grammars are compiled apart from the engine, and by what they take of a processor."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator

import psutil
import pytest
import pytest_asyncio

from services.executor.prompts import grammar_compiler
from services.executor.prompts.grammar_check import GrammarCheck, GrammarError
from services.executor.prompts.grammar_compiler import (
    DEADLY,
    TOO_COMPLEX,
    GrammarCompiler,
    NoVerdictError,
)
from tests.byte_tokenizer import describe_tokenizer
from tests.gateways import until

pytest.importorskip("xgrammar")

from services.executor.prompts.grammar_process import NO_ANSWER, NOT_THIS_ANSWER

LONG_S = 600.0  # for what ends
SHORT_S = 0.5  # for what does not
NUM_RULES = 1_500
# Takes some 40 s to compile for the smallest vocabulary.
ENDLESS = (
    "root ::= "
    + " | ".join(f"r{i}" for i in range(NUM_RULES))
    + "".join(f'\nr{i} ::= [a-z]* "x{i}" [a-z]* root?' for i in range(NUM_RULES))
)


@pytest.fixture(scope="module", autouse=True)
def patience() -> Iterator[None]:
    """Let processes start on the slowest machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grammar_compiler, "START_TIMEOUT_S", LONG_S)
        yield


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def compiler() -> AsyncIterator[GrammarCompiler]:
    compiler = GrammarCompiler(describe_tokenizer)
    yield compiler
    await compiler.close()


def processes() -> list[psutil.Process]:
    """Return those that compile, without their forks."""
    module = "services.executor.prompts.grammar_process"
    with contextlib.suppress(psutil.NoSuchProcess):
        return [child for child in psutil.Process().children() if module in child.cmdline()]
    return []


def has_ended(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.status() == psutil.STATUS_ZOMBIE
    return True


async def process_of(compiler: GrammarCompiler) -> psutil.Process:
    """Return the process of the one compiler that there is, started and idle."""
    assert await compiler.fault("regex", "a", cpu_s=LONG_S) == ""
    (process,) = processes()
    return process


async def next_fork(*earlier: psutil.Process) -> psutil.Process:
    """Return a fork that is none of the `earlier` ones, once there is one."""

    def forks() -> list[psutil.Process]:
        with contextlib.suppress(psutil.NoSuchProcess):
            found = [fork for process in processes() for fork in process.children()]
            return [fork for fork in found if fork not in earlier]
        return []

    await until(lambda: bool(forks()))
    return forks()[0]


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.logs("grammar_used_up_its_time")
async def test_a_form_that_takes_too_much_of_a_processor_is_given_up_and_the_next_compiled(
    compiler: GrammarCompiler,
) -> None:
    process = await process_of(compiler)

    assert await compiler.fault("grammar", ENDLESS, cpu_s=SHORT_S) == TOO_COMPLEX
    assert await compiler.fault("grammar", "root ::= root", cpu_s=LONG_S) == NO_ANSWER
    assert await compiler.fault("regex", "b", cpu_s=LONG_S) == ""
    assert await process_of(compiler) == process  # its fork alone was ended


@pytest.mark.asyncio(loop_scope="module")
async def test_a_form_is_asked_about_what_an_answer_has_already(compiler: GrammarCompiler) -> None:
    a, b, end = 97, 98, 256  # of the vocabulary of bytes

    assert await compiler.fault("regex", "ab+", [a, b, b], cpu_s=LONG_S) == ""
    assert await compiler.fault("regex", "ab+", [a, b, end, a], cpu_s=LONG_S) == ""
    assert await compiler.fault("regex", "ab+", [a, a], cpu_s=LONG_S) == NOT_THIS_ANSWER
    assert await compiler.fault("regex", "ab+", [a, end], cpu_s=LONG_S) == NOT_THIS_ANSWER
    opened = list(b'{"a":')
    assert await compiler.fault("json_object", "", opened, cpu_s=LONG_S) == ""
    assert await compiler.fault("json_object", "", [a], cpu_s=LONG_S) == NOT_THIS_ANSWER


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.logs("grammar_compiler_stood_still")
async def test_a_process_that_stands_still_gives_no_verdict(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = await process_of(compiler)
    process.suspend()
    with monkeypatch.context() as patch:
        patch.setattr(grammar_compiler, "START_TIMEOUT_S", SHORT_S)
        with pytest.raises(NoVerdictError):
            await compiler.fault("regex", "c", cpu_s=SHORT_S / grammar_compiler.MAX_SLOWDOWN)
    await until(lambda: has_ended(process))

    assert await compiler.fault("regex", "c", cpu_s=LONG_S) == ""


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.logs("grammar_compiler_died")
async def test_a_form_that_two_forks_died_of_is_asked_of_no_third(
    compiler: GrammarCompiler,
) -> None:
    process = await process_of(compiler)
    asking = asyncio.create_task(compiler.fault("grammar", ENDLESS, cpu_s=LONG_S))
    first = await next_fork()
    first.kill()
    (await next_fork(first)).kill()

    assert await asking == DEADLY
    assert await process_of(compiler) == process


@pytest.mark.asyncio(loop_scope="module")
async def test_a_form_is_asked_of_a_second_process_and_not_to_blame_for_the_end_of_that(
    compiler: GrammarCompiler,
) -> None:
    process = await process_of(compiler)
    process.kill()
    await until(lambda: has_ended(process))
    asking = asyncio.create_task(compiler.fault("grammar", ENDLESS, cpu_s=LONG_S))
    fork = await next_fork()
    second = fork.parent()
    assert second is not None
    second.kill()

    with pytest.raises(NoVerdictError):
        await asking
    await until(lambda: has_ended(fork))


@pytest.mark.asyncio(loop_scope="module")
async def test_what_is_broken_off_does_not_shift_the_answers(compiler: GrammarCompiler) -> None:
    await process_of(compiler)
    leaving = asyncio.create_task(compiler.fault("grammar", ENDLESS, cpu_s=LONG_S))
    fork = await next_fork()
    leaving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaving

    assert await compiler.fault("regex", "d", cpu_s=LONG_S) == ""
    assert await compiler.fault("grammar", "root ::= root", cpu_s=LONG_S) == NO_ANSWER
    await until(lambda: has_ended(fork))


@pytest.mark.asyncio(loop_scope="module")
async def test_a_process_that_does_not_start_gives_no_verdict() -> None:
    compiler = GrammarCompiler(lambda: "no tokeniser")

    with pytest.raises(NoVerdictError):
        await compiler.fault("regex", "a", cpu_s=LONG_S)
    await compiler.close()


@pytest.mark.asyncio(loop_scope="module")
async def test_processes_end_with_the_check_that_they_work_for() -> None:
    check = GrammarCheck(
        lambda: GrammarCompiler(describe_tokenizer), cpu_s=LONG_S, max_wait_s=LONG_S
    )
    before = processes()
    await check.check("regex", "a")
    with pytest.raises(GrammarError, match=NO_ANSWER):
        await check.check("grammar", "root ::= root")
    asking = asyncio.create_task(check.check("grammar", ENDLESS))
    await until(lambda: len(processes()) == len(before) + 2)  # the slow one starts
    await check.close()

    with pytest.raises(asyncio.CancelledError):
        await asking
    await until(lambda: processes() == before)
