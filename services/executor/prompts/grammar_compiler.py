"""A process that compiles grammars: started when it is needed, ended when it does not answer."""

import asyncio
import contextlib
import json
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable, Sequence

import structlog

log = structlog.get_logger()

START_TIMEOUT_S = 60.0  # imports take 2 s of a processor, more by the clock of a busy machine
MAX_SLOWDOWN = 20.0  # seconds by the clock for one of a processor; beyond, the process stands still
_LINE_LIMIT_BYTES = 1 << 20
TOO_COMPLEX = "takes too long to compile"
DEADLY = "cannot be compiled"


class NoVerdictError(Exception):
    """Nothing was found out about a grammar: the machine is at fault, or the process."""


class GrammarCompiler:
    """Compiles one grammar at a time."""

    def __init__(self, describe_tokenizer: Callable[[], str]) -> None:
        """`describe_tokenizer` returns xgrammar's serialised tokeniser; it runs in a thread."""
        self._describe_tokenizer = describe_tokenizer
        self._process: Process | None = None

    async def fault(self, kind: str, text: str, ids: Sequence[int] = (), *, cpu_s: float) -> str:
        """Return what is wrong with a grammar; empty: nothing. `kind` is vLLM's name for it, `ids`
        are the tokens that an answer has already.

        One that takes more than `cpu_s` > 0 seconds of a processor is TOO_COMPLEX. Raises
        NoVerdictError if there is no answer, however long it had by the clock.
        """
        for _ in range(2):  # what is found dead has not died of this grammar
            process = self._process or await self._start()
            answer = await self._ask(process, [kind, text, list(ids), cpu_s], _timeout_s(cpu_s))
            if isinstance(answer, str):
                return answer
            facts = {"kind": kind, "num_characters": len(text), "exit_code": answer}
            if answer == -signal.SIGPROF:
                log.info("grammar_used_up_its_time", cpu_s=cpu_s, **facts)
                return TOO_COMPLEX
            log.warning("grammar_compiler_died", **facts)
        if answer is None:  # the process does not compile: its forks do
            raise NoVerdictError("the process that compiles grammars dies")
        return DEADLY

    async def _start(self) -> Process:
        """Return a process that has read the tokeniser. Raises NoVerdictError."""
        tokenizer = await asyncio.to_thread(self._describe_tokenizer)
        self._process = process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "services.executor.prompts.grammar_process",
            stdin=PIPE,
            stdout=PIPE,
            limit=_LINE_LIMIT_BYTES,
        )
        if await self._ask(process, tokenizer, START_TIMEOUT_S) != "":
            raise NoVerdictError("the process that compiles grammars does not start")
        return process

    async def _ask(self, process: Process, question: object, timeout_s: float) -> str | int | None:
        """Return the answer to one line, None if the process is dead. Raises NoVerdictError without
        one in time. All but an answer ends the process: its next one would be to this question.
        """
        assert process.stdin is not None
        assert process.stdout is not None
        line = b""
        try:
            async with asyncio.timeout(timeout_s):
                process.stdin.write(json.dumps(question).encode() + b"\n")
                with contextlib.suppress(ConnectionError):  # reading tells the same
                    await process.stdin.drain()
                line = await process.stdout.readline()
        except TimeoutError:
            log.warning("grammar_compiler_stood_still", timeout_s=timeout_s)
            raise NoVerdictError("the process that compiles grammars stands still") from None
        finally:
            if not line:
                self._kill()
        answer: str | int | None = json.loads(line) if line else None
        return answer

    def _kill(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()

    async def close(self) -> None:
        """End the process, if there is one."""
        process = self._process
        self._kill()
        if process is not None:
            await process.wait()


def _timeout_s(cpu_s: float) -> float:
    """Return how long `cpu_s` seconds of a processor may take by the clock."""
    return max(START_TIMEOUT_S, MAX_SLOWDOWN * cpu_s)
