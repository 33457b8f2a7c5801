"""A process that compiles grammars: started when it is needed, ended when it takes too long."""

import asyncio
import contextlib
import json
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable

import structlog

log = structlog.get_logger()

START_TIMEOUT_S = 60.0  # imports take seconds, more on a busy machine
_LINE_LIMIT_BYTES = 1 << 20
TOO_COMPLEX = "takes too long to compile"
DEADLY = "cannot be compiled"


class GrammarCompiler:
    """Compiles one grammar at a time."""

    def __init__(self, describe_tokenizer: Callable[[], str], *, timeout_s: float) -> None:
        """`describe_tokenizer` returns xgrammar's serialised tokeniser; it runs in a thread.

        A grammar that takes longer than `timeout_s` to compile has a fault.
        """
        self._describe_tokenizer = describe_tokenizer
        self._timeout_s = timeout_s
        self._process: Process | None = None

    async def fault(self, kind: str, text: str) -> str:
        """Return what is wrong with a grammar; empty: nothing. `kind` is vLLM's name for it."""
        for _ in range(2):  # a process that is found dead has not died of this grammar
            process = self._process or await self._start()
            try:
                return await self._ask(process, [kind, text], self._timeout_s)
            except TimeoutError:
                log.warning("grammar_timed_out", kind=kind, num_characters=len(text))
                return TOO_COMPLEX
            except EOFError:
                log.warning("grammar_compiler_died", kind=kind, num_characters=len(text))
        return DEADLY

    async def _start(self) -> Process:
        tokenizer = await asyncio.to_thread(self._describe_tokenizer)
        self._process = process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "services.executor.prompts.grammar_process",
            stdin=PIPE,
            stdout=PIPE,
            limit=_LINE_LIMIT_BYTES,
        )
        await self._ask(process, tokenizer, START_TIMEOUT_S)
        return process

    async def _ask(self, process: Process, question: object, timeout_s: float) -> str:
        """Return the answer to one line; TimeoutError without one in time, EOFError if the process
        has died. Whatever goes wrong ends it: its next answer would be to this question.
        """
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            async with asyncio.timeout(timeout_s):
                process.stdin.write(json.dumps(question).encode() + b"\n")
                with contextlib.suppress(ConnectionError):  # reading tells the same
                    await process.stdin.drain()
                line = await process.stdout.readline()
            if not line:
                raise EOFError("the process that compiles grammars has died")
            return str(json.loads(line))
        except BaseException:
            self._kill()
            raise

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
