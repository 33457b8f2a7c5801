"""Says whether the engine will be able to hold an answer to a form, before the engine sees it.

vLLM parses a grammar when it checks a request and compiles it in the engine, where a fault fails
the request late and a compilation without end keeps all other grammars waiting.
"""

import asyncio
import contextlib
import json
import sys
from asyncio.subprocess import PIPE, Process
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from hashlib import sha256

import structlog

from services.kit.clock import Clock, monotonic_s

log = structlog.get_logger()

START_TIMEOUT_S = 60.0  # imports take seconds, more on a busy machine
MAX_WAIT_S = 20.0  # for the grammars of other requests
MAX_REMEMBERED = 4_096
TIMEOUT_REMEMBERED_S = 600.0  # it may have been the machine's fault
_LINE_LIMIT_BYTES = 1 << 20
TOO_COMPLEX = "takes too long to compile"
DEADLY = "cannot be compiled"


class GrammarError(ValueError):
    """An answer cannot be held to the form that was asked for."""


class GrammarsBusyError(Exception):
    """Too many grammars wait to be compiled."""


class GrammarCheck:
    """Compiles each new grammar once, in a process that is started at the first one. It goes on
    when who asked has left: to break off costs more.
    """

    def __init__(
        self,
        describe_tokenizer: Callable[[], str],
        *,
        timeout_s: float,
        clock: Clock = monotonic_s,
    ) -> None:
        """`describe_tokenizer` returns xgrammar's serialised tokeniser; it runs in a thread.

        A grammar that takes longer than `timeout_s` to compile is refused.
        """
        self._describe_tokenizer = describe_tokenizer
        self._timeout_s = timeout_s
        self._process: Process | None = None
        self._clock = clock
        self._turn = asyncio.Lock()
        self._compiling: dict[bytes, asyncio.Task[str]] = {}  # by digest, as below
        self._faults: OrderedDict[bytes, tuple[str, float]] = OrderedDict()  # and until when

    async def check(self, kind: str, text: str) -> None:
        """Raise GrammarError if the engine could not use the grammar, GrammarsBusyError if it was
        not found out in time. `kind` is vLLM's name: json, regex, grammar or structural_tag.
        """
        key = sha256(json.dumps([kind, text]).encode()).digest()
        fault, until_s = self._faults.get(key, ("", 0.0))
        if until_s <= self._clock():
            fault = await asyncio.shield(self._compiling.get(key) or self._begin(key, kind, text))
        if fault:
            raise GrammarError(fault)

    def _begin(self, key: bytes, kind: str, text: str) -> asyncio.Task[str]:
        task = self._compiling[key] = asyncio.create_task(self._compiled(kind, text))
        task.add_done_callback(partial(self._remember, key))
        return task

    def _remember(self, key: bytes, task: asyncio.Task[str]) -> None:
        del self._compiling[key]
        if task.cancelled() or task.exception() is not None:
            return
        fault = task.result()
        lasts_s = TIMEOUT_REMEMBERED_S if fault == TOO_COMPLEX else float("inf")
        self._faults[key] = (fault, self._clock() + lasts_s)
        self._faults.move_to_end(key)
        if len(self._faults) > MAX_REMEMBERED:
            self._faults.popitem(last=False)

    async def _compiled(self, kind: str, text: str) -> str:
        try:
            async with asyncio.timeout(MAX_WAIT_S):
                await self._turn.acquire()
        except TimeoutError:
            raise GrammarsBusyError("too many forms wait to be compiled") from None
        try:
            return await self._fault(kind, text)
        finally:
            self._turn.release()

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

    async def _fault(self, kind: str, text: str) -> str:
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
        for task in self._compiling.values():
            task.cancel()
        process = self._process
        self._kill()
        if process is not None:
            await process.wait()
